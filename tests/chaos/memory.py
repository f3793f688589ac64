"""A message that does not fit into the memory of its worker, under a real memory limit, on every broker.

The worker runs in a memory cgroup and is restarted whenever the kernel has killed it. Two cases: the body is over
the limit of the codec, and must be dead-lettered without a single kill; and the codec admits the body, so that the
process is killed each time, and it must be dead-lettered after max_deliveries kills. The ten other messages are
handled in both. Leases are the defaults: with one of 2 seconds a claim may end while its worker is still being killed,
and one kill then costs two deliveries. One line of JSON; the exit code is 1 if a target is missed, or if no memory
cgroup can be created.
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
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.database.migrate import upgrade
from ergon_framework.transaction import Transaction
from tests.servers.nats import PrivateNats
from tests.servers.postgres import PrivatePostgres
from tests.servers.rabbitmq import PrivateRabbitMQ
from tests.servers.redis import PrivateRedis

ERGON = [sys.executable, "-P", "-c", "from ergon_framework.cli.main import main; main()"]
MIB = 1024 * 1024
#: The exit status of a killed worker.
KILLED_EXIT_CODE = -9
MAX_DELIVERIES = 10
NEIGHBOUR_IDS = [f"{when}-{number}" for when in ("before", "after") for number in range(5)]
#: The limit of the worker's codec in the second case.
ADMITTED_BYTES = 1 << 30
#: JetStream stores no message of 32 MiB or more, whatever max_payload says.
MAX_MEGABYTES = {"nats": 30}
QUEUES: dict[str, Any] = {
    "postgres": PostgresQueue,
    "rabbitmq": RabbitMQQueue,
    "nats": NatsQueue,
    "redis": RedisQueue,
}
WORKER_PROGRAM = """
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
    """Whether the codec of the worker admits the message, and the expected result."""

    is_admitted: bool
    reason: str
    kills: int


CASES = {
    "over the limit of the codec": Case(is_admitted=False, reason="undecodable", kills=0),
    "admitted by the codec": Case(is_admitted=True, reason="max_deliveries", kills=MAX_DELIVERIES),
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
        wrapped_command = ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh", *command]
        return subprocess.Popen(wrapped_command, **options)

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


def run_worker(queue: Any, group: MemoryGroup, folder: Path, options: argparse.Namespace) -> tuple[list[int], float]:
    """Run a worker until the large message is dead-lettered and the others are handled; return its exit statuses."""
    exit_codes: list[int] = []
    started_at, worker = time.monotonic(), None
    with (folder / "worker.log").open("ab") as log:
        try:
            while time.monotonic() < started_at + options.patience:
                if worker is None or worker.poll() is not None:
                    exit_codes += [] if worker is None else [worker.returncode]
                    worker = group.start([*ERGON, "run", "app:handle"], cwd=folder, stdout=log, stderr=log)
                depth = queue.depth()
                if depth is not None and depth.dead and read_handled(folder) >= set(NEIGHBOUR_IDS):
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
    return exit_codes, round(time.monotonic() - started_at, 1)


def read_handled(folder: Path) -> set[str]:
    """Return the names that workers have written into the ledger."""
    return set((folder / "ledger").read_text(encoding="utf-8").split())


def run_case(broker: str, case: Case, address: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Have one large message and its neighbours handled; return the results."""
    name = f"orders_{uuid.uuid4().hex[:8]}"
    queue_options = {"dsn" if broker == "postgres" else "url": address}
    queue_options |= {} if broker == "rabbitmq" or options.lease is None else {"lease": options.lease}
    producer_queue = as_sync(QUEUES[broker](name, **queue_options, codec=JsonCodec(max_bytes=ADMITTED_BYTES)))
    producer_queue.open()
    middle = len(NEIGHBOUR_IDS) // 2
    producer_queue.dispatch([Transaction({"name": each}, id=each) for each in NEIGHBOUR_IDS[:middle]])
    megabytes = min(options.megabytes, MAX_MEGABYTES.get(broker, options.megabytes))
    producer_queue.dispatch([Transaction("x" * (megabytes * MIB), id="large")])
    producer_queue.dispatch([Transaction({"name": each}, id=each) for each in NEIGHBOUR_IDS[middle:]])
    (folder / "ledger").write_text("", encoding="utf-8")
    values = {"broker": broker, "kind": QUEUES[broker].__name__, "name": name, "ledger": str(folder / "ledger")}
    values["options"] = "".join(f", {key}={value!r}" for key, value in queue_options.items())
    codec = f", codec=JsonCodec(max_bytes={ADMITTED_BYTES})" if case.is_admitted else ""
    (folder / "app.py").write_text(WORKER_PROGRAM.format(**values, codec=codec), encoding="utf-8")
    group = MemoryGroup(f"ergon-memory-{name}", options.limit * MIB)
    exit_codes, seconds = run_worker(producer_queue, group, folder, options)
    producer_queue.close()
    # As an operator lists them: with the codec of the worker, and without loading large bodies.
    reader = as_sync(
        QUEUES[broker](name, **queue_options, codec=JsonCodec(max_bytes=ADMITTED_BYTES) if case.is_admitted else None)
    )
    reader.open()
    dead_letters = reader.list_dead(DeadLetterQuery())
    reader.close()
    handled = len(read_handled(folder) & set(NEIGHBOUR_IDS))
    result = {
        "megabytes": megabytes,
        "deaths": exit_codes.count(KILLED_EXIT_CODE),
        "other ends": len(exit_codes) - exit_codes.count(KILLED_EXIT_CODE),
        "neighbours handled": handled,
        "dead letters": [[each.id, each.reason, each.size] for each in dead_letters],
        "seconds": seconds,
    }
    is_expected = [(each.id, each.reason) for each in dead_letters] == [("large", case.reason)]
    result["ok"] = (
        is_expected
        and handled == len(NEIGHBOUR_IDS)
        and len(exit_codes) == case.kills
        and set(exit_codes) <= {KILLED_EXIT_CODE}
    )
    return result


def run_broker(broker: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both cases on a separate server; return their figures by name."""
    folder.mkdir()
    folder.chmod(0o755)
    server, address = start_server(broker, folder / "server")
    results = {}
    try:
        for description, case in CASES.items():
            results[f"{broker}, {description}"] = run_case(broker, case, address, options, folder)
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
    summary: dict[str, Any] = {"limit MiB": options.limit}
    # In parallel: most of the time passes while the leases of killed workers run out.
    with ThreadPoolExecutor(len(options.brokers)) as pool:
        for results in pool.map(lambda broker: run_broker(broker, options, folder / broker), options.brokers):
            summary |= results
    has_passed = all(result["ok"] for result in summary.values() if isinstance(result, dict))
    if has_passed:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"logs are kept in {folder}", file=sys.stderr)
    print(json.dumps({"ok": has_passed, **summary}))
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
