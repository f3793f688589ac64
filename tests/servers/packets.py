"""PacketDrop: cuts the connection to one TCP port of this machine with the kernel's own packet filter.

Nothing is closed and no end is notified: packets vanish, as they do when a cable is pulled. The rules are put into the
kernel's nftables over netlink, because the command of that name is not on every machine. The table belongs to the
socket that created it, so packets pass again when this process ends, however it ends.
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


class PacketDropError(RuntimeError):
    """This machine does not allow dropping packets, and no weaker fault may replace it."""


def _encode_attribute(kind: int, value: bytes) -> bytes:
    padding = -len(value) % 4
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * padding


def _encode_nested(kind: int, *attributes: bytes) -> bytes:
    return _encode_attribute(kind | _NESTED, b"".join(attributes))


def _encode_number(kind: int, value: int) -> bytes:
    return _encode_attribute(kind, struct.pack("!I", value))


def _encode_text(kind: int, value: str) -> bytes:
    return _encode_attribute(kind, value.encode() + b"\0")


def _encode_expression(name: str, *attributes: bytes) -> bytes:
    return _encode_nested(1, _encode_text(1, name), _encode_nested(2, *attributes))


def _encode_comparison(value: bytes) -> bytes:
    return _encode_expression(
        "cmp", _encode_number(1, _REGISTER_1), _encode_number(2, 0), _encode_nested(3, _encode_attribute(1, value))
    )


def _encode_drop_rule(port: int, *, offset: int) -> bytes:
    """Drop TCP packets whose port at *offset* of their header (0 is the source's, 2 the destination's) is *port*."""
    return b"".join(
        (
            _encode_expression("meta", _encode_number(1, _REGISTER_1), _encode_number(2, _META_L4PROTO)),
            _encode_comparison(bytes([socket.IPPROTO_TCP])),
            _encode_expression(
                "payload",
                _encode_number(1, _REGISTER_1),
                _encode_number(2, _PAYLOAD_TRANSPORT),
                _encode_number(3, offset),
                _encode_number(4, 2),
            ),
            _encode_comparison(struct.pack("!H", port)),
            _encode_expression(
                "immediate",
                _encode_number(1, _REGISTER_VERDICT),
                _encode_nested(2, _encode_nested(2, _encode_number(1, _DROP))),
            ),
        )
    )


class PacketDrop:
    """All packets from and to one port of this machine vanish between ``cut`` and ``mend``."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._table = f"ergon_test_{port}"
        self._netlink: socket.socket | None = None
        self._sequence = count(1)

    @property
    def is_cut(self) -> bool:
        return self._netlink is not None

    def partition_network(self) -> None:
        """Drop packets from now on."""
        if self._netlink is not None:
            return
        try:
            netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        except OSError as error:
            raise self._to_error(error) from error
        try:
            netlink.settimeout(5)
            netlink.bind((0, 0))
            self._send(netlink, *self._build_rules())
        except OSError as error:
            netlink.close()
            raise self._to_error(error) from error
        self._netlink = netlink

    def heal_network(self) -> None:
        """Let packets pass again; the sender's kernel retransmits the dropped ones."""
        if self._netlink is None:
            return
        netlink, self._netlink = self._netlink, None
        try:
            self._send(netlink, self._build_message(_DELTABLE, _encode_text(1, self._table)))
        finally:
            netlink.close()

    def _build_rules(self) -> list[bytes]:
        chain, create = "input", _CREATE
        return [
            self._build_message(
                _NEWTABLE, _encode_text(1, self._table), _encode_number(2, _OWNED_BY_SOCKET), flags=create
            ),
            self._build_message(
                _NEWCHAIN,
                _encode_text(1, self._table),
                _encode_text(3, chain),
                _encode_nested(4, _encode_number(1, _HOOK_INPUT), _encode_number(2, 0)),
                _encode_text(7, "filter"),
                flags=create,
            ),
            *(
                self._build_message(
                    _NEWRULE,
                    _encode_text(1, self._table),
                    _encode_text(2, chain),
                    _encode_nested(4, _encode_drop_rule(self._port, offset=offset)),
                    flags=create | _APPEND,
                )
                for offset in (0, 2)
            ),
        ]

    def _build_message(self, kind: int, *attributes: bytes, flags: int = 0) -> bytes:
        body = struct.pack("!BBH", _INET, 0, 0) + b"".join(attributes)
        return self._frame_message(_SUBSYSTEM << 8 | kind, body, flags=_REQUEST | _ACK | flags)

    def _frame_message(self, kind: int, body: bytes, *, flags: int) -> bytes:
        return struct.pack("=IHHII", 16 + len(body), kind, flags, next(self._sequence), 0) + body

    def _send(self, netlink: socket.socket, *messages: bytes) -> None:
        """Send one batch, which the kernel applies atomically, and read the answer to each message."""
        batch_header = struct.pack("!BBH", 0, 0, _SUBSYSTEM)
        begin = self._frame_message(_BATCH_BEGIN, batch_header, flags=_REQUEST)
        netlink.send(begin + b"".join(messages) + self._frame_message(_BATCH_END, batch_header, flags=_REQUEST))
        missing = {struct.unpack_from("=I", message, 8)[0] for message in messages}
        while missing:
            answers = netlink.recv(65536)
            while answers:
                length, kind, _, sequence, _ = struct.unpack_from("=IHHII", answers)
                if kind == _NLMSG_ERROR:
                    code = struct.unpack_from("=i", answers, 16)[0]
                    if code:
                        raise OSError(-code, os.strerror(-code))
                    missing.discard(sequence)
                answers = answers[(length + 3) & ~3 :]

    def _to_error(self, error: OSError) -> PacketDropError:
        return PacketDropError(
            f"cannot drop packets of port {self._port}: {error}. It takes Linux with nftables and the right to "
            "administer the network: run the tests as root, or in a container with --cap-add NET_ADMIN"
        )
