"""Address: where the server is, and how patient a connection to it is."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qs, urlsplit

import pika

from ergon_framework.errors import ConfigurationError

#: Where the address of the server is looked for if the program does not give one.
VARIABLE: Final = "ERGON_RABBITMQ__URL"
#: Seconds of silence after which the server gives a connection up, and with it what it holds; asked for unless the
#: address says otherwise. A server's own default is a minute, for which a worker's work would wait.
_HEARTBEAT: Final = 20


def parameters(url: str, *, timeout: float) -> pika.URLParameters:
    """How to connect to *url*; the message of a refusal does not quote it, because a password may be in it."""
    problem = ""
    try:
        found = pika.URLParameters(url)
        given = parse_qs(urlsplit(url).query)
    except (ValueError, TypeError) as error:
        problem = type(error).__name__
    if problem or urlsplit(url).scheme not in ("amqp", "amqps"):
        raise ConfigurationError(
            "the address of RabbitMQ cannot be read; one looks like amqp://user:password@host:5672/vhost, with options "
            f"as in ?heartbeat=20 ({problem or 'it does not begin with amqp:// or amqps://'})"
        )
    if urlsplit(url).path == "//":  # as Celery and others write the vhost that is called "/"
        found.virtual_host = "/"
    if "heartbeat" not in given:
        found.heartbeat = _HEARTBEAT
    found.connection_attempts = 1
    found.socket_timeout = found.stack_timeout = timeout
    return found
