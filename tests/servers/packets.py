"""PacketDrop: the line to one TCP port of this machine, cut by the kernel's own packet filter.

Nothing is closed and nobody is told: packets vanish, as they do when a cable is pulled. The rules are put into the
kernel's nftables over netlink, because the command of that name is not on every machine. The table belongs to the
socket that made it, so the line is whole again when this process ends, however it ends.
"""

from __future__ import annotations

import os
import socket
import struct
from itertools import count

_NETLINK_NETFILTER = 12
_REQUEST, _ACK, _CREATE, _APPEND = 0x1, 0x4, 0x400, 0x800
_NLMSG_ERROR = 2
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_SUBSYSTEM = 10  # nftables within netfilter
_NEWTABLE, _DELTABLE, _NEWCHAIN, _NEWRULE = 0, 2, 3, 6
_INET = 1
_OWNED_BY_SOCKET = 0x2
_NESTED = 0x8000
_HOOK_INPUT = 1
_REGISTER_VERDICT, _REGISTER_1 = 0, 1
_PAYLOAD_TRANSPORT = 2
_META_L4PROTO = 16
_DROP = 0


class CannotCutError(RuntimeError):
    """This machine does not let us drop packets, and no weaker fault may stand in for it."""


def _attribute(kind: int, value: bytes) -> bytes:
    padding = -len(value) % 4
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * padding


def _nest(kind: int, *attributes: bytes) -> bytes:
    return _attribute(kind | _NESTED, b"".join(attributes))


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack("!I", value))


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def _expression(name: str, *attributes: bytes) -> bytes:
    return _nest(1, _text(1, name), _nest(2, *attributes))


def _equals(value: bytes) -> bytes:
    return _expression("cmp", _number(1, _REGISTER_1), _number(2, 0), _nest(3, _attribute(1, value)))


def _drop_where(port: int, *, offset: int) -> bytes:
    """Drop TCP packets whose port at *offset* of their header (0 is the source's, 2 the destination's) is *port*."""
    return b"".join(
        (
            _expression("meta", _number(1, _REGISTER_1), _number(2, _META_L4PROTO)),
            _equals(bytes([socket.IPPROTO_TCP])),
            _expression(
                "payload", _number(1, _REGISTER_1), _number(2, _PAYLOAD_TRANSPORT), _number(3, offset), _number(4, 2)
            ),
            _equals(struct.pack("!H", port)),
            _expression("immediate", _number(1, _REGISTER_VERDICT), _nest(2, _nest(2, _number(1, _DROP)))),
        )
    )


class PacketDrop:
    """All packets from and to one port of this machine vanish between ``cut`` and ``mend``."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._table = f"ergon_test_{port}"
        self._line: socket.socket | None = None
        self._sequence = count(1)

    @property
    def is_cut(self) -> bool:
        return self._line is not None

    def cut(self) -> None:
        """Drop packets from now on."""
        if self._line is not None:
            return
        try:
            line = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        except OSError as error:
            raise self._refused(error) from error
        try:
            line.settimeout(5)
            line.bind((0, 0))
            self._send(line, *self._rules())
        except OSError as error:
            line.close()
            raise self._refused(error) from error
        self._line = line

    def mend(self) -> None:
        """Let packets pass again; the sender's kernel repeats what was dropped."""
        if self._line is None:
            return
        line, self._line = self._line, None
        try:
            self._send(line, self._message(_DELTABLE, _text(1, self._table)))
        finally:
            line.close()

    def _rules(self) -> list[bytes]:
        chain, create = "input", _CREATE
        return [
            self._message(_NEWTABLE, _text(1, self._table), _number(2, _OWNED_BY_SOCKET), flags=create),
            self._message(
                _NEWCHAIN,
                _text(1, self._table),
                _text(3, chain),
                _nest(4, _number(1, _HOOK_INPUT), _number(2, 0)),
                _text(7, "filter"),
                flags=create,
            ),
            *(
                self._message(
                    _NEWRULE,
                    _text(1, self._table),
                    _text(2, chain),
                    _nest(4, _drop_where(self._port, offset=offset)),
                    flags=create | _APPEND,
                )
                for offset in (0, 2)
            ),
        ]

    def _message(self, kind: int, *attributes: bytes, flags: int = 0) -> bytes:
        body = struct.pack("!BBH", _INET, 0, 0) + b"".join(attributes)
        return self._framed(_SUBSYSTEM << 8 | kind, body, flags=_REQUEST | _ACK | flags)

    def _framed(self, kind: int, body: bytes, *, flags: int) -> bytes:
        return struct.pack("=IHHII", 16 + len(body), kind, flags, next(self._sequence), 0) + body

    def _send(self, line: socket.socket, *messages: bytes) -> None:
        """Send one batch, which the kernel takes whole or not at all, and read the answer to each message."""
        edge = struct.pack("!BBH", 0, 0, _SUBSYSTEM)
        begin = self._framed(_BATCH_BEGIN, edge, flags=_REQUEST)
        line.send(begin + b"".join(messages) + self._framed(_BATCH_END, edge, flags=_REQUEST))
        missing = {struct.unpack_from("=I", message, 8)[0] for message in messages}
        while missing:
            answers = line.recv(65536)
            while answers:
                length, kind, _, sequence, _ = struct.unpack_from("=IHHII", answers)
                if kind == _NLMSG_ERROR:
                    code = struct.unpack_from("=i", answers, 16)[0]
                    if code:
                        raise OSError(-code, os.strerror(-code))
                    missing.discard(sequence)
                answers = answers[(length + 3) & ~3 :]

    def _refused(self, error: OSError) -> CannotCutError:
        return CannotCutError(
            f"cannot drop packets of port {self._port}: {error}. It takes Linux with nftables and the right to "
            "administer the network: run the tests as root, or in a container with --cap-add NET_ADMIN"
        )
