"""Faults for brokers: the same torment; whose connections are whose is asked of the kernel, not of the server."""

from __future__ import annotations

import random

import psutil

from tests.chaos.broker_servers import Victim
from tests.chaos.faults import Torment
from tests.chaos.fleet import Fleet, Life


class BrokerTorment(Torment):
    """Torments workers, the broker and the lines between them."""

    def __init__(self, server: Victim, fleet: Fleet, *, lease: float, dice: random.Random) -> None:
        super().__init__(server, fleet, lease=lease, sockets="", dice=dice)
        self._port = server.port

    def _ports(self, life: Life) -> list[int]:
        try:
            lines = psutil.Process(life.process.pid).net_connections("tcp")
        except psutil.Error:
            return []
        return [line.laddr.port for line in lines if line.raddr and line.raddr.port == self._port]
