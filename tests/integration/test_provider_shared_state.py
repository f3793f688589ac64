"""Check providers configured by the environment alone: with a database all processes share state, else they warn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from ergon_framework.connectors.postgres.queue import PostgresQueue
from ergon_framework.database import migrate
from ergon_framework.providers.http.health_reader import read_summary
from ergon_framework.testing.fake_provider import Behaviour, FakeProviderServer
from tests.docs.snippets import find_snippets
from tests.integration.metering import query

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 60.0
VARIABLE = "ERGON_POSTGRES__DSN"
PROGRAM_PATH = Path(__file__).with_name("provider_program.py")
#: Documented maximum delay of provider_health_states in seconds.
DOCUMENTED_DELAY_SECONDS = 6.0


def make_environment(dsn=None, **overrides):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ERGON_")}
    database = {} if dsn is None else {VARIABLE: dsn}
    return inherited | {"PYTHONPATH": str(ROOT)} | database | overrides


class ProgramProcess:
    """One process that runs the program."""

    def __init__(self, variant, upstream, calls, env):
        command = [sys.executable, PROGRAM_PATH, variant, str(upstream.address[1]), str(calls)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, text=True, cwd=ROOT)

    def start_calls(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def read_call_count(self):
        return int(self.process.stdout.readline())

    def stop(self):
        """Close its input and return what it wrote to standard error."""
        _, errors = self.process.communicate(timeout=TIMEOUT_SECONDS)
        assert self.process.returncode == 0, errors
        return errors


@pytest.fixture
def start_worker():
    started = []

    def start(*args):
        started.append(ProgramProcess(*args))
        return started[-1]

    yield start
    for worker in started:
        worker.process.kill()
        worker.process.wait()


@pytest.fixture
def upstream():
    with FakeProviderServer(then=Behaviour(body={"fine": True})) as server:
        yield server


@pytest.mark.spec("DX-25", "PRV-19")
@pytest.mark.parametrize("variants", [("threads", "threads"), ("asyncio", "asyncio"), ("threads", "asyncio")])
def test_a_limit_of_ten_admits_ten_calls_of_two_processes(database, upstream, start_worker, variants):
    env = make_environment(database)
    workers = [start_worker(variant, upstream, 10, env) for variant in variants]
    for worker in workers:
        worker.start_calls()
    counts = [worker.read_call_count() for worker in workers]
    assert (sum(counts), upstream.calls) == (10, 10)
    for worker in workers:
        assert "not shared" not in worker.stop()
    # Both ended automatically, and what they had in memory is in the tables.
    assert query(database, "select count(*) from ergon.provider_execution_metrics where outcome = 'success'") == [(10,)]
    assert query(database, "select count(*) from ergon.provider_execution_metrics") == [(20,)]


@pytest.mark.spec("DX-25")
def test_without_a_database_one_warning_states_that_limits_are_per_process(upstream, start_worker):
    worker = start_worker("threads", upstream, 5, make_environment())
    worker.start_calls()
    assert worker.read_call_count() == 5
    worker.start_calls()
    assert worker.read_call_count() == 5
    (warning,) = [line for line in worker.stop().splitlines() if line.startswith("WARNING")]
    assert "per process" in warning
    assert VARIABLE in warning


@pytest.mark.spec("DX-25")
def test_a_database_without_the_tables_is_reported_with_the_upgrade_command(postgres, upstream, start_worker):
    empty = postgres.create_database(f"state_{os.getpid()}")
    worker = start_worker("threads", upstream, 1, make_environment(empty))
    worker.start_calls()
    assert worker.read_call_count() == 0
    assert "run: ergon db upgrade" in worker.stop()
    assert upstream.calls == 0


@pytest.mark.spec("DX-25")
def test_an_unavailable_database_is_reported_as_the_reason(upstream, start_worker):
    worker = start_worker("asyncio", upstream, 1, make_environment("postgresql://127.0.0.1:1/none"))
    worker.start_calls()
    assert worker.read_call_count() == 0
    assert "the database is unavailable" in worker.stop()
    assert upstream.calls == 0


@pytest.mark.spec("DX-25")
def test_a_missing_extra_is_named(upstream, tmp_path):
    # To an import, a missing extra looks like a folder of that name in front of the installed package.
    (tmp_path / "psycopg.py").write_text("raise ImportError('not installed')\n")
    env = make_environment("postgresql://127.0.0.1:1/none", PYTHONPATH=f"{tmp_path}:{ROOT}")
    command = [sys.executable, PROGRAM_PATH, "threads", str(upstream.address[1]), "1"]
    result = subprocess.run(
        command, input="go\n", env=env, text=True, capture_output=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert result.returncode != 0
    assert "pip install 'ergon-framework[postgres]'" in result.stderr


@pytest.mark.spec("DX-25")
def test_memory_can_be_chosen_although_a_database_is_configured(upstream):
    program = (
        "from types import SimpleNamespace\n"
        "from ergon_framework.providers.memory_state import MemoryProviderState\n"
        "from ergon_framework.testing.fake_provider import FakeProvider\n"
        f"upstream = SimpleNamespace(address=('127.0.0.1', {upstream.address[1]}))\n"
        "print(FakeProvider(upstream, state_store=MemoryProviderState()).call('echo'))\n"
        "import sys; assert 'psycopg' not in sys.modules\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=make_environment("postgresql://127.0.0.1:1/none"),
        text=True,
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


# -- health ---------------------------------------------------------------------------------------------


@pytest.mark.spec("DX-26", "PRV-10")
def test_the_health_table_is_correct_within_the_documented_time_and_at_close(database, start_worker):
    """Two processes, a first success and then failures: the table agrees with what the upstream counted."""
    behaviours = [Behaviour(body={}), *[Behaviour(status=422)] * 6]
    with FakeProviderServer(*behaviours, then=Behaviour(body={})) as upstream:
        env = make_environment(database)
        workers = [start_worker("threads", upstream, 1, env), start_worker("asyncio", upstream, 6, env)]
        for worker in workers:  # one after the other, so that the first batch is a success alone
            worker.start_calls()
            worker.read_call_count()
            wait_until_recorded(database, upstream)
        ended_at = time.monotonic()
        succeeded, call_count = 1, upstream.calls
        assert call_count == 7
        while read_success_rate(database) != pytest.approx(succeeded / call_count):
            assert time.monotonic() - ended_at < DOCUMENTED_DELAY_SECONDS, (
                f"the table says {read_success_rate(database)}"
            )
            time.sleep(0.05)
        with psycopg.connect(database) as connection:
            (health,) = read_summary(connection, "acme").providers
        assert health.success_rate_1h == pytest.approx(read_success_rate(database))
        # And at close, however early: three more calls, and the end immediately after.
        workers[0].start_calls()
        workers[0].read_call_count()
        workers[0].stop()
        workers[1].stop()
        assert upstream.calls == 8
        assert read_success_rate(database) == pytest.approx(2 / 8)


def read_success_rate(dsn):
    rows = query(dsn, "select success_rate_1h from ergon.provider_health_states where tenant_id = 'acme'")
    return rows[0][0] if rows else None


def wait_until_recorded(dsn, upstream):
    """Wait until the attempts are written, which a separate rule guarantees."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while query(dsn, "select count(*) from ergon.provider_execution_metrics") != [(upstream.calls,)]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- ergon run --------------------------------------------------------------------------------------------

TASK_MODULE = """
from types import SimpleNamespace
import os
from ergon_framework import consumer
from ergon_framework.connectors.postgres.queue import PostgresQueue
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.testing.fake_provider import FakeProvider

upstream = SimpleNamespace(address=("127.0.0.1", int(os.environ["TEST_PORT"])))
policy = ProviderPolicy(retry=RetryPolicy(max_attempts=1), quota=QuotaPolicy(month=10))
payments = FakeProvider(upstream, policy=policy)
orders = PostgresQueue("orders", dsn=os.environ["TEST_DSN"])


@consumer(orders, uses=[payments])
def charge(order: dict) -> None:
    payments.call("charge", order)
"""


def run_task(folder, dsn, upstream, *, processes, toml):
    (folder / "shop.py").write_text(TASK_MODULE)
    (folder / "ergon.toml").write_text(toml)
    env = make_environment(TEST_DSN=dsn, TEST_PORT=str(upstream.address[1]), PYTHONPATH=f"{ROOT}:{folder}")
    return subprocess.run(
        [Path(sys.executable).with_name("ergon"), "run", "shop:charge", "--processes", str(processes)],
        env=env,
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


@pytest.mark.spec("DX-25")
def test_ergon_run_shares_the_state_that_its_settings_name(database, upstream, tmp_path):
    queue = PostgresQueue("orders", dsn=database)
    queue.dispatch([queue.transaction({"number": number}, id=f"order-{number}") for number in range(16)])
    queue.close()
    result = run_task(tmp_path, database, upstream, processes=2, toml=f'[postgres]\ndsn = "{database}"\n')
    assert upstream.calls == 10, result.stderr
    assert "not shared" not in result.stderr
    assert query(database, "select count(*) from ergon.provider_execution_metrics where outcome = 'success'") == [(10,)]


@pytest.mark.spec("DX-25")
def test_ergon_run_reports_at_startup_that_the_schema_is_too_old(postgres, upstream, tmp_path):
    old = postgres.create_database(f"old_{os.getpid()}")
    migrate.upgrade(old, "0001")
    result = run_task(tmp_path, old, upstream, processes=1, toml=f'[postgres]\ndsn = "{old}"\n')
    assert result.returncode == 2, result.stderr
    assert "run: ergon db upgrade" in result.stderr


@pytest.mark.spec("DX-25")
def test_ergon_run_warns_at_startup_without_a_database(database, upstream, tmp_path):
    result = run_task(tmp_path, database, upstream, processes=1, toml="")
    assert result.stderr.count("provider state not shared") == 1
    assert VARIABLE in result.stderr


# -- Celery -----------------------------------------------------------------------------------------------


@pytest.mark.spec("DX-25", "PRV-19")
def test_the_celery_guide_program_shares_its_limit(database, new_rabbitmq, tmp_path):
    """Run the guide's files as printed, with another limit, and two children of a real worker."""
    guide = (ROOT / "docs/guides/celery.md").read_text(encoding="utf-8")
    files = {one.title: one.text for one in find_snippets(guide) if one.title in {"rank.py", "shop.py"}}
    files["rank.py"], limits = re.subn(r"calls_per_\w+=[\d_]+", "calls_per_month=10", files["rank.py"])
    assert limits == 1
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    sender = (
        "from shop import snapshot\n"
        "sent = [snapshot.delay({'page': f'/{n}'}, tenant_id='acme') for n in range(24)]\n"
        "ends = [one.get(timeout=60, propagate=False) for one in sent]\n"
        "print(sum(isinstance(end, dict) for end in ends))\n"
    )
    env = make_environment(database, RABBITMQ_URL=new_rabbitmq().url, PYTHONPATH=f"{ROOT}:{tmp_path}")
    log = tmp_path / "worker.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "--concurrency", "2", "--without-mingle"]
        worker = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=out, stderr=out, start_new_session=True)
    try:
        result = subprocess.run(
            [sys.executable, "-c", sender],
            env=env,
            cwd=tmp_path,
            text=True,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    finally:
        worker.terminate()
        worker.wait(TIMEOUT_SECONDS)
    log_text = log.read_text(errors="replace")
    assert result.stdout.split() == ["10"], result.stderr + log_text
    assert "not shared" not in log_text
    used = query(database, "select used_count, limit_count from ergon.provider_quota_states")
    assert used == [(10, 10)]
    # The children have exited and left nothing unwritten.
    rows = query(database, "select outcome, count(*) from ergon.provider_execution_metrics group by 1")
    assert dict(rows)["success"] == 10
    assert read_success_rate(database) is not None
