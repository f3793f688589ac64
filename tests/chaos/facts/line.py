"""The link between two zones: two network namespaces and a relay that forwards packets between them.

The relay is a separate process between two TUN devices. It reads one mode per line from its stdin: good, cut (packets
vanish), reset (every connection is refused), delayed, lossy. It exits when its stdin ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

#: Large, so that a relay in Python keeps up.
MTU = 60_000
_TUNSETIFF, _TUN, _NO_PACKET_INFORMATION = 0x400454CA, 0x0001, 0x1000
_NEWNET = 0x40000000
MODES = ("good", "cut", "reset", "delayed", "lossy")
LOSS_RATE = 0.05
DELAY_SECONDS = 0.1


class ZoneLink:
    """Two namespaces with an address each, and the relay between them."""

    def __init__(self, name: str) -> None:
        self.namespaces = (f"{name}-a", f"{name}-b")
        self.addresses = ("10.77.0.1", "10.77.0.2")
        self._relay: subprocess.Popen[str] | None = None
        self.mode = "good"

    def start(self) -> None:
        for namespace in self.namespaces:
            _run_ip("netns", "add", namespace)
            _run_ip("-n", namespace, "link", "set", "lo", "up")
        self._relay = subprocess.Popen(
            [sys.executable, __file__, *self.namespaces], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._relay.stdout.readline().strip() != "ready":
            raise RuntimeError("the relay did not start; it needs root and /dev/net/tun")
        for namespace, own_address, peer_address in zip(
            self.namespaces, self.addresses, reversed(self.addresses), strict=True
        ):
            _run_ip("-n", namespace, "addr", "add", own_address, "peer", peer_address, "dev", "line")
            _run_ip("-n", namespace, "link", "set", "line", "mtu", str(MTU), "up")

    def set_mode(self, mode: str) -> None:
        """Set the mode of the link."""
        self.mode = mode
        self._relay.stdin.write(f"{mode}\n")
        self._relay.stdin.flush()

    def end(self) -> None:
        if self._relay is not None:
            self._relay.stdin.close()
            self._relay.wait(10)
            self._relay.stdout.close()
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def _run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


# -- the relay ---------------------------------------------------------------------------------------------


def _open_device(namespace: str) -> int:
    """Open a TUN device called "line" inside *space*; its descriptor works in every namespace."""
    descriptors: list[int] = []

    def enter() -> None:
        # A namespace belongs to a thread, so this thread does nothing else.
        with Path(f"/run/netns/{namespace}").open("rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"line", _TUN | _NO_PACKET_INFORMATION))
        descriptors.append(device)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return descriptors[0]


class _Relay:
    def __init__(self, namespaces: list[str]) -> None:
        self._devices = [_open_device(namespace) for namespace in namespaces]
        self._mode = "good"
        self._delayed: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._rng = random.Random(1)

    def run(self) -> None:
        print("ready", flush=True)
        stdin = sys.stdin.fileno()
        os.set_blocking(stdin, False)
        while True:
            timeout = max(0.0, self._delayed[0][0] - time.monotonic()) if self._delayed else None
            ready, _, _ = select.select([*self._devices, stdin], [], [], timeout)
            if stdin in ready:
                text = os.read(stdin, 4096)
                if not text:
                    return
                self._mode = text.decode().split()[-1]
            while self._delayed and self._delayed[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(self._delayed)
                self._send(device, packet)
            for device in ready:
                if device != stdin:
                    self._forward(device)

    def _forward(self, device: int) -> None:
        other = self._devices[device == self._devices[0]]
        for _ in range(64):
            try:
                packet = os.read(device, MTU + 100)
            except BlockingIOError:
                return
            if self._mode == "cut" or (self._mode == "lossy" and self._rng.random() < LOSS_RATE):
                continue
            if self._mode == "reset":
                reset = _build_reset(packet)
                if reset is not None:
                    self._send(device, reset)
            elif self._mode == "delayed":
                due = time.monotonic() + DELAY_SECONDS * (0.5 + self._rng.random())
                heapq.heappush(self._delayed, (due, next(self._numbers), other, packet))
            else:
                self._send(other, packet)

    def _send(self, device: int, packet: bytes) -> None:
        # A device that is down or has no free buffer loses packets.
        with contextlib.suppress(OSError):
            os.write(device, packet)


def _build_reset(packet: bytes) -> bytes | None:
    """Build the RST for a TCP packet; None if it is not TCP, or is an RST itself."""
    if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
        return None
    header = (packet[0] & 15) * 4
    source, target, sequence, acknowledged, offset, flags = struct.unpack_from("!HHIIBB", packet, header)
    if flags & 4:
        return None
    length = len(packet) - header - (offset >> 4) * 4 + bool(flags & 2) + bool(flags & 1)
    reset_sequence, reset_flags = (acknowledged, 4) if flags & 16 else (0, 20)
    tcp = struct.pack(
        "!HHIIBBHHH", target, source, reset_sequence, (sequence + length) % 2**32, 80, reset_flags, 0, 0, 0
    )
    pseudo = packet[16:20] + packet[12:16] + struct.pack("!BBH", 0, socket.IPPROTO_TCP, len(tcp))
    tcp = tcp[:16] + struct.pack("!H", _checksum(pseudo + tcp)) + tcp[18:]
    ip = struct.pack("!BBHHHBBH", 69, 0, 20 + len(tcp), 0, 0, 64, socket.IPPROTO_TCP, 0) + packet[16:20] + packet[12:16]
    return ip[:10] + struct.pack("!H", _checksum(ip)) + ip[12:] + tcp


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


if __name__ == "__main__":
    _Relay(sys.argv[1:]).run()
