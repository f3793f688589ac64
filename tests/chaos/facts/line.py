"""The line between two zones: two network namespaces, and a relay that carries packets from the one to the other.

The relay is a process of its own between two TUN devices. What it does to packets is told on its stdin, one word a
line: good, cut (they vanish), reset (every connection is refused), delayed, lossy. When its stdin ends, so does it.
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

#: Large, so that a relay in Python keeps pace.
MTU = 60_000
_TUNSETIFF, _TUN, _NO_PACKET_INFORMATION = 0x400454CA, 0x0001, 0x1000
_NEWNET = 0x40000000
MOODS = ("good", "cut", "reset", "delayed", "lossy")
LOSS = 0.05
DELAY = 0.1


class Line:
    """Two namespaces with an address each, and the relay between them."""

    def __init__(self, name: str) -> None:
        self.spaces = (f"{name}-a", f"{name}-b")
        self.addresses = ("10.77.0.1", "10.77.0.2")
        self._relay: subprocess.Popen[str] | None = None
        self.mood = "good"

    def start(self) -> None:
        for space in self.spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        self._relay = subprocess.Popen(
            [sys.executable, __file__, *self.spaces], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._relay.stdout.readline().strip() != "ready":
            raise RuntimeError("the relay did not start; it needs root and /dev/net/tun")
        for space, own, other in zip(self.spaces, self.addresses, reversed(self.addresses), strict=True):
            _ip("-n", space, "addr", "add", own, "peer", other, "dev", "line")
            _ip("-n", space, "link", "set", "line", "mtu", str(MTU), "up")

    def turn(self, mood: str) -> None:
        """Let it be so from now on."""
        self.mood = mood
        self._relay.stdin.write(f"{mood}\n")
        self._relay.stdin.flush()

    def end(self) -> None:
        if self._relay is not None:
            self._relay.stdin.close()
            self._relay.wait(10)
            self._relay.stdout.close()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


# -- the relay ---------------------------------------------------------------------------------------------


def _device(space: str) -> int:
    """A TUN device called "line" inside of *space*; its descriptor may be used by anybody."""
    found: list[int] = []

    def enter() -> None:
        # A namespace is a thread's: this one is for nothing else.
        with Path(f"/run/netns/{space}").open("rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"line", _TUN | _NO_PACKET_INFORMATION))
        found.append(device)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return found[0]


class _Relay:
    def __init__(self, spaces: list[str]) -> None:
        self._devices = [_device(space) for space in spaces]
        self._mood = "good"
        self._late: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._dice = random.Random(1)

    def run(self) -> None:
        print("ready", flush=True)
        stdin = sys.stdin.fileno()
        os.set_blocking(stdin, False)
        while True:
            wait = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            ready, _, _ = select.select([*self._devices, stdin], [], [], wait)
            if stdin in ready:
                words = os.read(stdin, 4096)
                if not words:
                    return
                self._mood = words.decode().split()[-1]
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(self._late)
                self._send(device, packet)
            for device in ready:
                if device != stdin:
                    self._carry(device)

    def _carry(self, device: int) -> None:
        other = self._devices[device == self._devices[0]]
        for _ in range(64):
            try:
                packet = os.read(device, MTU + 100)
            except BlockingIOError:
                return
            if self._mood == "cut" or (self._mood == "lossy" and self._dice.random() < LOSS):
                continue
            if self._mood == "reset":
                answer = _refusal(packet)
                if answer is not None:
                    self._send(device, answer)
            elif self._mood == "delayed":
                due = time.monotonic() + DELAY * (0.5 + self._dice.random())
                heapq.heappush(self._late, (due, next(self._numbers), other, packet))
            else:
                self._send(other, packet)

    def _send(self, device: int, packet: bytes) -> None:
        # A device that is down, or has no room, loses packets as others do.
        with contextlib.suppress(OSError):
            os.write(device, packet)


def _refusal(packet: bytes) -> bytes | None:
    """The answer that ends the connection of a TCP packet; None if it is none, or is such an answer."""
    if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
        return None
    header = (packet[0] & 15) * 4
    source, target, sequence, acknowledged, offset, flags = struct.unpack_from("!HHIIBB", packet, header)
    if flags & 4:
        return None
    length = len(packet) - header - (offset >> 4) * 4 + bool(flags & 2) + bool(flags & 1)
    place, kind = (acknowledged, 4) if flags & 16 else (0, 20)
    tcp = struct.pack("!HHIIBBHHH", target, source, place, (sequence + length) % 2**32, 80, kind, 0, 0, 0)
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
