"""Connection parameters: the address of the server, and the timeouts of a connection to it."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qs, urlsplit

import pika

from ergon_framework.errors import ConfigurationError

#: The environment variable with the server's address, used if the program passes none.
URL_VARIABLE: Final = "ERGON_RABBITMQ__URL"
#: Heartbeat timeout in seconds, after which the server closes a connection and releases its claims; requested unless
#: the address sets another. The server's default is a minute, which would delay a dead worker's claims.
_HEARTBEAT_SECONDS: Final = 20


def connection_parameters(url: str, *, timeout: float) -> pika.URLParameters:
    """Return the connection parameters of *url*; errors do not quote it, because it may contain a password."""
    problem = ""
    try:
        url_parameters = pika.URLParameters(url)
        query = parse_qs(urlsplit(url).query)
    except (ValueError, TypeError) as error:
        problem = type(error).__name__
    if problem or urlsplit(url).scheme not in ("amqp", "amqps"):
        raise ConfigurationError(
            "the address of RabbitMQ cannot be read; one looks like amqp://user:password@host:5672/vhost, with options "
            f"as in ?heartbeat=20 ({problem or 'it does not begin with amqp:// or amqps://'})"
        )
    if urlsplit(url).path == "//":  # Celery and others write the vhost "/" like this
        url_parameters.virtual_host = "/"
    if "heartbeat" not in query:
        url_parameters.heartbeat = _HEARTBEAT_SECONDS
    url_parameters.connection_attempts = 1
    url_parameters.socket_timeout = url_parameters.stack_timeout = timeout
    return url_parameters
