"""A message that does not fit into the memory of its worker, under a real memory limit, on every broker.

The worker runs in a memory cgroup and is started again whenever the kernel has killed it. Two cases: the body is over
the limit of the codec, and must be dead-lettered without a single death; and the codec admits the body, so that the
process dies of it each time, and it must be dead-lettered after max_deliveries deaths. The ten messages around it are
handled in both. Leases are the defaults: with one of 2 seconds a claim may end while its worker is still being killed,
and one death then costs two deliveries. One line of JSON; the exit code is 1 if a target is missed, or if no memory
cgroup can be made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.codec import JsonCodec
from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.schema.migrate import upgrade
from ergon_framework.transaction import Transaction
from tests.servers.nats import PrivateNats
from tests.servers.postgres import PrivatePostgres
from tests.servers.rabbitmq import PrivateRabbitMQ
from tests.servers.redis import PrivateRedis

ERGON = [sys.executable, "-P", "-c", "from ergon_framework.cli.main import main; main()"]
MIB = 1024 * 1024
#: What a killed worker ends with.
KILLED = -9
MAX_DELIVERIES = 10
NEIGHBOURS = [f"{when}-{number}" for when in ("before", "after") for number in range(5)]
#: What the codec of the worker admits in the second case.
ADMITTED = 1 << 30
#: JetStream stores no message of 32 MiB or more, whatever max_payload says.
MOST_MEGABYTES = {"nats": 30}
QUEUES: dict[str, Any] = {
    "postgres": PostgresQueue,
    "rabbitmq": RabbitMQQueue,
    "nats": NatsQueue,
    "redis": RedisQueue,
}
WORKER = """
import os
from ergon_framework import ConsumerPolicy, consumer
from ergon_framework.connectors.codec import JsonCodec
from ergon_framework.connectors.{broker} import {kind}

@consumer({kind}({name!r}{options}{codec}), policy=ConsumerPolicy.load({{"loop": {{"streaming": True}}}}))
def handle(order):
    if isinstance(order, str):
        # The large one; where it could be decoded, handling it takes more than there is.
        copies = [order + str(number) for number in range(1000)]
    with open({ledger!r}, "a", encoding="utf-8") as ledger:
        ledger.write(f"{{order['name']}}\\n")
"""


@dataclass(frozen=True)
class Case:
    """Whether the codec of the worker admits the message, and what must become of it."""

    admitted: bool
    reason: str
    deaths: int


CASES = {
    "over the limit of the codec": Case(admitted=False, reason="undecodable", deaths=0),
    "admitted by the codec": Case(admitted=True, reason="max_deliveries", deaths=MAX_DELIVERIES),
}


class MemoryGroup:
    """A memory cgroup, of version 2 or 1, whose processes are killed at a number of bytes."""

    def __init__(self, name: str, limit: int) -> None:
        version_1, version_2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        self.path = (version_1 if version_1.is_dir() else version_2) / name
        names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", limit)
        if not version_1.is_dir():
            names = ("memory.max", "memory.swap.max", 0)
        self.path.mkdir()
        (self.path / names[0]).write_text(str(limit), encoding="ascii")
        with contextlib.suppress(OSError):  # a kernel that does not account for swap
            (self.path / names[1]).write_text(str(names[2]), encoding="ascii")

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start *command* inside."""
        inside = ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh", *command]
        return subprocess.Popen(inside, **options)

    def remove(self) -> None:
        for _ in range(50):
            try:
                self.path.rmdir()
            except OSError:
                time.sleep(0.1)
            else:
                return


def start_server(broker: str, folder: Path) -> tuple[Any, str]:
    """Start a private server; return it and its address."""
    folder.mkdir()
    folder.chmod(0o755)
    server: Any
    if broker == "postgres":
        server = PrivatePostgres(folder)
        server.start()
        upgrade(server.dsn())
        return server, server.dsn()
    if broker == "nats":
        server = PrivateNats(folder, settings=f"max_payload: {64 * MIB}\n")
    else:
        server = {"rabbitmq": PrivateRabbitMQ, "redis": PrivateRedis}[broker](folder)
    server.start()
    return server, server.url


def work_off(queue: Any, group: MemoryGroup, folder: Path, options: argparse.Namespace) -> tuple[list[int], float]:
    """Have a worker run until the large message is dead and the others are handled; return how workers ended."""
    ends: list[int] = []
    began, worker = time.monotonic(), None
    with (folder / "worker.log").open("ab") as log:
        try:
            while time.monotonic() < began + options.patience:
                if worker is None or worker.poll() is not None:
                    ends += [] if worker is None else [worker.returncode]
                    worker = group.start([*ERGON, "run", "app:handle"], cwd=folder, stdout=log, stderr=log)
                depth = queue.depth()
                if depth is not None and depth.dead and handled_in(folder) >= set(NEIGHBOURS):
                    break
                time.sleep(0.1)
        finally:
            if worker is not None:
                worker.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(40)
                worker.kill()
                worker.wait()
            group.remove()
    return ends, round(time.monotonic() - began, 1)


def handled_in(folder: Path) -> set[str]:
    """Return the names that workers have written into the ledger."""
    return set((folder / "ledger").read_text(encoding="utf-8").split())


def run(broker: str, case: Case, address: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Have one large message and its neighbours handled; return what became of them."""
    name = f"orders_{uuid.uuid4().hex[:8]}"
    place = {"dsn" if broker == "postgres" else "url": address}
    place |= {} if broker == "rabbitmq" or options.lease is None else {"lease": options.lease}
    wide = as_sync(QUEUES[broker](name, **place, codec=JsonCodec(max_bytes=ADMITTED)))
    wide.open()
    middle = len(NEIGHBOURS) // 2
    wide.dispatch([Transaction(each, {"name": each}) for each in NEIGHBOURS[:middle]])
    megabytes = min(options.megabytes, MOST_MEGABYTES.get(broker, options.megabytes))
    wide.dispatch([Transaction("large", "x" * (megabytes * MIB))])
    wide.dispatch([Transaction(each, {"name": each}) for each in NEIGHBOURS[middle:]])
    (folder / "ledger").write_text("", encoding="utf-8")
    values = {"broker": broker, "kind": QUEUES[broker].__name__, "name": name, "ledger": str(folder / "ledger")}
    values["options"] = "".join(f", {key}={value!r}" for key, value in place.items())
    codec = f", codec=JsonCodec(max_bytes={ADMITTED})" if case.admitted else ""
    (folder / "app.py").write_text(WORKER.format(**values, codec=codec), encoding="utf-8")
    group = MemoryGroup(f"ergon-memory-{name}", options.limit * MIB)
    ends, seconds = work_off(wide, group, folder, options)
    wide.close()
    # As an operator lists them: with the codec of the worker, and without loading what is large.
    reader = as_sync(QUEUES[broker](name, **place, codec=JsonCodec(max_bytes=ADMITTED) if case.admitted else None))
    reader.open()
    letters = reader.list_dead(DeadLetterQuery())
    reader.close()
    handled = len(handled_in(folder) & set(NEIGHBOURS))
    told = {
        "megabytes": megabytes,
        "deaths": ends.count(KILLED),
        "other ends": len(ends) - ends.count(KILLED),
        "neighbours handled": handled,
        "dead letters": [[each.id, each.reason, each.size] for each in letters],
        "seconds": seconds,
    }
    right = [(each.id, each.reason) for each in letters] == [("large", case.reason)]
    told["ok"] = right and handled == len(NEIGHBOURS) and len(ends) == case.deaths and set(ends) <= {KILLED}
    return told


def run_broker(broker: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both cases on a server of their own; return their figures by name."""
    folder.mkdir()
    folder.chmod(0o755)
    server, address = start_server(broker, folder / "server")
    results = {}
    try:
        for words, case in CASES.items():
            results[f"{broker}, {words}"] = run(broker, case, address, options, folder)
            print(json.dumps(results), file=sys.stderr, flush=True)
    finally:
        server.kill()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--brokers", nargs="*", default=list(QUEUES), choices=list(QUEUES))
    parser.add_argument("--megabytes", type=int, default=80, help="of the large message")
    parser.add_argument("--limit", type=int, default=250, help="MiB that the worker may take")
    parser.add_argument(
        "--lease", type=float, default=None, help="seconds of a claim; the default of the queue if omitted"
    )
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for each case")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ergon-chaos-memory-"))
    folder.chmod(0o755)
    told: dict[str, Any] = {"limit MiB": options.limit}
    # Side by side: most of the time passes while the leases of killed workers run out.
    with ThreadPoolExecutor(len(options.brokers)) as pool:
        for results in pool.map(lambda broker: run_broker(broker, options, folder / broker), options.brokers):
            told |= results
    good = all(result["ok"] for result in told.values() if isinstance(result, dict))
    if good:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"logs are kept in {folder}", file=sys.stderr)
    print(json.dumps({"ok": good, **told}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
