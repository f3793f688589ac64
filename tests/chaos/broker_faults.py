"""Faults for brokers; the ports of a worker's connections are read from the kernel, not from the server."""

from __future__ import annotations

import random

import psutil

from tests.chaos.broker_servers import FaultableBroker
from tests.chaos.faults import FaultInjector
from tests.chaos.fleet import Fleet, ProcessRecord


class BrokerFaultInjector(FaultInjector):
    """Injects faults into workers, the broker and the connections between them."""

    def __init__(self, server: FaultableBroker, fleet: Fleet, *, lease: float, rng: random.Random) -> None:
        super().__init__(server, fleet, lease=lease, sockets="", rng=rng)
        self._server_port = server.port

    def _list_ports(self, record: ProcessRecord) -> list[int]:
        try:
            connections = psutil.Process(record.process.pid).net_connections("tcp")
        except psutil.Error:
            return []
        return [
            connection.laddr.port
            for connection in connections
            if connection.raddr and connection.raddr.port == self._server_port
        ]
