"""Providers with nothing but the environment: with a database all processes share state, without one they say so."""

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
from ergon_framework.providers.sql.summary import summary
from ergon_framework.providers.synthetic import Behaviour, SyntheticUpstream
from ergon_framework.schema import migrate
from tests.docs.snippets import snippets
from tests.integration.metering import ask

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
VARIABLE = "ERGON_POSTGRES__DSN"
PROGRAM = Path(__file__).with_name("provider_program.py")
#: Seconds after which provider_health_states is documented to hold the truth.
DOCUMENTED_DELAY = 6.0


def environment(dsn=None, **more):
    plain = {name: value for name, value in os.environ.items() if not name.startswith("ERGON_")}
    given = {} if dsn is None else {VARIABLE: dsn}
    return plain | {"PYTHONPATH": str(ROOT)} | given | more


class Worker:
    """One process that runs the program."""

    def __init__(self, flavour, upstream, calls, env):
        command = [sys.executable, PROGRAM, flavour, str(upstream.address[1]), str(calls)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, text=True, cwd=ROOT)

    def begin(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def made(self):
        return int(self.process.stdout.readline())

    def end(self):
        """Close its input; what it wrote to standard error."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, errors
        return errors


@pytest.fixture
def work():
    started = []

    def start(*args):
        started.append(Worker(*args))
        return started[-1]

    yield start
    for worker in started:
        worker.process.kill()
        worker.process.wait()


@pytest.fixture
def upstream():
    with SyntheticUpstream(then=Behaviour(body={"fine": True})) as server:
        yield server


@pytest.mark.spec("DX-25", "PRV-19")
@pytest.mark.parametrize("flavours", [("threads", "threads"), ("asyncio", "asyncio"), ("threads", "asyncio")])
def test_a_limit_of_ten_admits_ten_calls_of_two_processes(database, upstream, work, flavours):
    env = environment(database)
    workers = [work(flavour, upstream, 10, env) for flavour in flavours]
    for worker in workers:
        worker.begin()
    made = [worker.made() for worker in workers]
    assert (sum(made), upstream.calls) == (10, 10)
    for worker in workers:
        assert "not shared" not in worker.end()
    # Both ended by themselves, and what they had in memory is in the tables.
    assert ask(database, "select count(*) from ergon.provider_execution_metrics where outcome = 'success'") == [(10,)]
    assert ask(database, "select count(*) from ergon.provider_execution_metrics") == [(20,)]


@pytest.mark.spec("DX-25")
def test_without_a_database_a_warning_says_once_that_limits_are_per_process(upstream, work):
    worker = work("threads", upstream, 5, environment())
    worker.begin()
    assert worker.made() == 5
    worker.begin()
    assert worker.made() == 5
    (said,) = [line for line in worker.end().splitlines() if line.startswith("WARNING")]
    assert "per process" in said
    assert VARIABLE in said


@pytest.mark.spec("DX-25")
def test_a_database_without_the_tables_is_told_to_be_upgraded(postgres, upstream, work):
    empty = postgres.create_database(f"state_{os.getpid()}")
    worker = work("threads", upstream, 1, environment(empty))
    worker.begin()
    assert worker.made() == 0
    assert "run: ergon db upgrade" in worker.end()
    assert upstream.calls == 0


@pytest.mark.spec("DX-25")
def test_a_database_that_is_out_of_reach_is_named_as_the_reason(upstream, work):
    worker = work("asyncio", upstream, 1, environment("postgresql://127.0.0.1:1/none"))
    worker.begin()
    assert worker.made() == 0
    assert "the database is out of reach" in worker.end()
    assert upstream.calls == 0


@pytest.mark.spec("DX-25")
def test_a_missing_extra_is_named(upstream, tmp_path):
    # A folder of that name in front of the installed package is what "not installed" looks like to an import.
    (tmp_path / "psycopg.py").write_text("raise ImportError('not installed')\n")
    env = environment("postgresql://127.0.0.1:1/none", PYTHONPATH=f"{tmp_path}:{ROOT}")
    command = [sys.executable, PROGRAM, "threads", str(upstream.address[1]), "1"]
    ran = subprocess.run(command, input="go\n", env=env, text=True, capture_output=True, timeout=PATIENCE, check=False)
    assert ran.returncode != 0
    assert "pip install 'ergon-framework[postgres]'" in ran.stderr


@pytest.mark.spec("DX-25")
def test_memory_can_be_asked_for_although_a_database_is_configured(upstream):
    program = (
        "from types import SimpleNamespace\n"
        "from ergon_framework.providers.memory import MemoryBooks\n"
        "from ergon_framework.providers.synthetic import SyntheticProvider\n"
        f"upstream = SimpleNamespace(address=('127.0.0.1', {upstream.address[1]}))\n"
        "print(SyntheticProvider(upstream, books=MemoryBooks()).call('echo'))\n"
        "import sys; assert 'psycopg' not in sys.modules\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=environment("postgresql://127.0.0.1:1/none"),
        text=True,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


# -- health ---------------------------------------------------------------------------------------------


@pytest.mark.spec("DX-26", "PRV-10")
def test_the_health_table_is_true_within_the_documented_time_and_at_close(database, work):
    """Two processes, a first success and then failures: the table agrees with what the upstream counted."""
    behaviours = [Behaviour(body={}), *[Behaviour(status=422)] * 6]
    with SyntheticUpstream(*behaviours, then=Behaviour(body={})) as upstream:
        env = environment(database)
        workers = [work("threads", upstream, 1, env), work("asyncio", upstream, 6, env)]
        for worker in workers:  # one after the other, so that the first batch is a success alone
            worker.begin()
            worker.made()
            until_counted(database, upstream)
        ended = time.monotonic()
        succeeded, made = 1, upstream.calls
        assert made == 7
        while rates(database) != pytest.approx(succeeded / made):
            assert time.monotonic() - ended < DOCUMENTED_DELAY, f"the table says {rates(database)}"
            time.sleep(0.05)
        with psycopg.connect(database) as line:
            (health,) = summary(line, "acme").providers
        assert health.success_rate_1h == pytest.approx(rates(database))
        # And at close, however soon it comes: three more calls, and the end at once.
        workers[0].begin()
        workers[0].made()
        workers[0].end()
        workers[1].end()
        assert upstream.calls == 8
        assert rates(database) == pytest.approx(2 / 8)


def rates(dsn):
    found = ask(dsn, "select success_rate_1h from ergon.provider_health_states where tenant_id = 'acme'")
    return found[0][0] if found else None


def until_counted(dsn, upstream):
    """Wait until the attempts are written, which is another promise."""
    until = time.monotonic() + PATIENCE
    while ask(dsn, "select count(*) from ergon.provider_execution_metrics") != [(upstream.calls,)]:
        assert time.monotonic() < until
        time.sleep(0.02)


# -- ergon run --------------------------------------------------------------------------------------------

TASK = """
from types import SimpleNamespace
import os
from ergon_framework import consumer
from ergon_framework.connectors.postgres.queue import PostgresQueue
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.providers.synthetic import SyntheticProvider

upstream = SimpleNamespace(address=("127.0.0.1", int(os.environ["TEST_PORT"])))
policy = ProviderPolicy(retry=RetryPolicy(max_attempts=1), quota=QuotaPolicy(month=10))
payments = SyntheticProvider(upstream, policy=policy)
orders = PostgresQueue("orders", dsn=os.environ["TEST_DSN"])


@consumer(orders, uses=[payments])
def charge(order: dict) -> None:
    payments.call("charge", order)
"""


def run_task(folder, dsn, upstream, *, processes, toml):
    (folder / "shop.py").write_text(TASK)
    (folder / "ergon.toml").write_text(toml)
    env = environment(TEST_DSN=dsn, TEST_PORT=str(upstream.address[1]), PYTHONPATH=f"{ROOT}:{folder}")
    return subprocess.run(
        [Path(sys.executable).with_name("ergon"), "run", "shop:charge", "--processes", str(processes)],
        env=env,
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.spec("DX-25")
def test_ergon_run_shares_the_state_that_its_settings_name(database, upstream, tmp_path):
    queue = PostgresQueue("orders", dsn=database)
    queue.dispatch([queue.transaction({"number": number}, id=f"order-{number}") for number in range(16)])
    queue.close()
    ran = run_task(tmp_path, database, upstream, processes=2, toml=f'[postgres]\ndsn = "{database}"\n')
    assert upstream.calls == 10, ran.stderr
    assert "not shared" not in ran.stderr
    assert ask(database, "select count(*) from ergon.provider_execution_metrics where outcome = 'success'") == [(10,)]


@pytest.mark.spec("DX-25")
def test_ergon_run_says_at_its_start_that_the_schema_is_too_old(postgres, upstream, tmp_path):
    old = postgres.create_database(f"old_{os.getpid()}")
    migrate.upgrade(old, "0001")
    ran = run_task(tmp_path, old, upstream, processes=1, toml=f'[postgres]\ndsn = "{old}"\n')
    assert ran.returncode == 2, ran.stderr
    assert "run: ergon db upgrade" in ran.stderr


@pytest.mark.spec("DX-25")
def test_ergon_run_warns_at_its_start_where_no_database_is_named(database, upstream, tmp_path):
    ran = run_task(tmp_path, database, upstream, processes=1, toml="")
    assert ran.stderr.count("provider state not shared") == 1
    assert VARIABLE in ran.stderr


# -- Celery -----------------------------------------------------------------------------------------------


@pytest.mark.spec("DX-25", "PRV-19")
def test_the_program_of_the_celery_guide_shares_its_limit(database, new_rabbitmq, tmp_path):
    """The files of the guide as they are printed, with another limit, and two children of a real worker."""
    guide = (ROOT / "docs/guides/celery.md").read_text(encoding="utf-8")
    files = {one.title: one.text for one in snippets(guide) if one.title in {"rank.py", "shop.py"}}
    files["rank.py"], limits = re.subn(r"QuotaPolicy\(\w+=[\d_]+\)", "QuotaPolicy(month=10)", files["rank.py"])
    assert limits == 1
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    sender = (
        "from shop import snapshot\n"
        "sent = [snapshot.delay({'page': f'/{n}'}, tenant_id='acme') for n in range(24)]\n"
        "ends = [one.get(timeout=60, propagate=False) for one in sent]\n"
        "print(sum(isinstance(end, dict) for end in ends))\n"
    )
    env = environment(database, RABBITMQ_URL=new_rabbitmq().url, PYTHONPATH=f"{ROOT}:{tmp_path}")
    log = tmp_path / "worker.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "--concurrency", "2", "--without-mingle"]
        worker = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=out, stderr=out, start_new_session=True)
    try:
        ran = subprocess.run(
            [sys.executable, "-c", sender],
            env=env,
            cwd=tmp_path,
            text=True,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
    finally:
        worker.terminate()
        worker.wait(PATIENCE)
    said = log.read_text(errors="replace")
    assert ran.stdout.split() == ["10"], ran.stderr + said
    assert "not shared" not in said
    used = ask(database, "select used_count, limit_count from ergon.provider_quota_states")
    assert used == [(10, 10)]
    # The children have ended, and left nothing unwritten.
    rows = ask(database, "select outcome, count(*) from ergon.provider_execution_metrics group by 1")
    assert dict(rows)["success"] == 10
    assert rates(database) is not None
