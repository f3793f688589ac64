"""Addresses of Redis: of one server, or of the sentinels that know the primary of a service; and how to find that.

A sentinel is a process that watches a primary and its replicas, and promotes a replica when the primary fails.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError
from ergon_framework.redaction import learn_password

_SENTINEL_SUFFIX: Final = "+sentinel"
_DEFAULT_SENTINEL_PORT: Final = 26379
#: Parameters of an address that the client does not know: the login at the sentinels.
_SENTINEL_USER, _SENTINEL_PASSWORD = "sentinel_username", "sentinel_password"


class ServerNode(NamedTuple):
    """One server: of a cluster, or of those that sentinels watch."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RedisAddress(NamedTuple):
    """A parsed address; with sentinels, host and port of *url* are those of the first one."""

    url: str
    sentinels: tuple[ServerNode, ...] = ()
    #: The name by which the sentinels know the primary and its replicas.
    service: str = ""
    sentinel_user: str | None = None
    sentinel_password: str | None = None


def parse_address(url: str) -> RedisAddress:
    """Parse *url*; raise ConfigurationError, without quoting it, if it names sentinels and is invalid.

    >>> parse_address("redis+sentinel://app:pw@one,two:26380/orders/2?socket_timeout=1").url
    'redis://app:pw@one:26379/2?socket_timeout=1'
    >>> [str(node) for node in parse_address("rediss+sentinel://one,[::1]:7/orders").sentinels]
    ['one:26379', '[::1]:7']
    """
    scheme, separator, _ = url.partition("://")
    if not separator or not scheme.lower().endswith(_SENTINEL_SUFFIX):
        return RedisAddress(url)
    try:
        parts = urlsplit(url)
        login, at, hosts = parts.netloc.rpartition("@")
        sentinels = tuple(_parse_node(host) for host in hosts.split(","))
        _, service, *database = parts.path.split("/")
        if not service or len(database) > 1 or not all(map(str.isdigit, database)):
            raise ValueError("the path is not a service and a database")  # noqa: TRY301 - replaced below
    except ValueError:
        raise ConfigurationError(
            "the address of the sentinels is invalid; expected, e.g., "
            "redis+sentinel://user@host1:26379,host2:26379/service/0"
        ) from None
    parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
    user, password = parameters.pop(_SENTINEL_USER, None), parameters.pop(_SENTINEL_PASSWORD, None)
    if password:
        learn_password(password)
    server_url = (
        f"{parts.scheme.removesuffix(_SENTINEL_SUFFIX)}://{login}{at}{sentinels[0]}/{''.join(database) or 0}"
        f"{'?' if parameters else ''}{urlencode(parameters)}"
    )
    return RedisAddress(server_url, sentinels, unquote(service), user, password)


def _parse_node(host: str) -> ServerNode:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError("a host is missing")
    return ServerNode(parts.hostname, parts.port or _DEFAULT_SENTINEL_PORT)


# -- the primary ------------------------------------------------------------------------------------


class PrimaryFinder:
    """Asks the sentinels of *service* for its primary, the one that answered last first; thread-safe."""

    def __init__(self, service: str, sentinels: Sequence[ServerNode]) -> None:
        self._service = service
        self._sentinels = tuple(sentinels)

    @property
    def question(self) -> tuple[str, ...]:
        """The command that asks a sentinel."""
        return "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service

    def find(self) -> Generator[ServerNode, Sequence[bytes] | ErgonError | None, ServerNode]:
        """Yield the sentinels to ask and receive their answers, or errors; return the primary."""
        sentinels, failures, unknown_count = self._sentinels, [], 0
        for sentinel in sentinels:
            answer = yield sentinel
            if isinstance(answer, ErgonError):
                failures.append(answer)
            elif answer is None:
                unknown_count += 1
            else:
                self._sentinels = (sentinel, *(other for other in sentinels if other != sentinel))
                host, port = answer
                return ServerNode(host.decode(), int(port))
        if unknown_count == len(sentinels):
            raise ConfigurationError(
                f"the sentinels watch no service {self._service!r}; correct its name in the address"
            )
        if failures and all(isinstance(failure, ConfigurationError) for failure in failures):
            raise failures[0]
        names = ", ".join(map(str, sentinels))
        reason = f": {failures[-1]}" if failures else ""
        raise ConnectionLostError(f"no sentinel at {names} names the primary of {self._service!r}{reason}")


def require_primary(node: ServerNode) -> Generator[tuple[Any, ...], Any, None]:
    """Raise ConnectionLostError unless the server calls itself a primary: sentinels may name one that is demoted."""
    role, *_ = yield ("ROLE",)
    if role != b"master":
        raise ConnectionLostError(f"the server {node} is a replica now, and the sentinels have not switched yet")
