"""Check ``ergon run`` as an operator uses it: real processes, real signals, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from ergon_framework.runner.exit import RunExit
from tests.integration.running import ERGON, ErgonProcess

GRACE_SECONDS = 0.4
VARIANTS = ("def", "async def")
#: Stderr stays empty, so that the last line of both streams is that of stdout.
QUIET_ARGUMENTS = ("--log-level", "warning")


def make_task(flavour, body, async_body, *, policy="policy()", decorator_arguments=""):
    """Return a task whose handler prints that it began and then runs *body*, or *awaits* in the async variant."""
    handler_body = body if flavour == "def" else async_body
    return f"""
@consumer(queue, policy={policy}{decorator_arguments})
{flavour} task(order, transaction: Transaction):
    say("began")
{handler_body}
"""


@pytest.fixture(params=VARIANTS)
def flavour(request):
    return request.param


# -- signals --------------------------------------------------------------------------------------


@pytest.mark.spec("CON-36")
@pytest.mark.parametrize(
    "flavour, stop_signal",
    [("def", signal.SIGTERM), ("async def", signal.SIGTERM), ("def", signal.SIGINT)],
    indirect=["flavour"],
)
def test_an_idle_process_exits_at_a_signal(tmp_path, flavour, stop_signal):
    with ErgonProcess(tmp_path, make_task(flavour, "", "", policy="policy(drain=60)")) as process:
        process.wait_for("fetch")
        process.send_signal(stop_signal)
        code, seconds = process.wait_for_exit()
    assert (code, process.notes) == (RunExit.OK, ["fetch"])
    assert seconds < 1
    assert any("stopped by a signal" in line for line in process.output)


BLOCKED_QUEUE = """
class Blocked(Noted):
    def fetch_transactions(self, batch_size, **extra):
        super().fetch_transactions(batch_size)
        threading.Event().wait()

    async def fetch_transactions_async(self, batch_size, **extra):
        await super().fetch_transactions_async(batch_size)
        await asyncio.Event().wait()

queue = Blocked("orders")
"""


@pytest.mark.spec("CON-36")
def test_a_blocked_fetch_is_not_waited_for(tmp_path, flavour):
    with ErgonProcess(tmp_path, BLOCKED_QUEUE + make_task(flavour, "", "", policy="policy(drain=60)")) as process:
        process.wait_for("fetch")
        process.send_signal()
        code, seconds = process.wait_for_exit()
    assert (code, process.notes) == (RunExit.OK, ["fetch"])
    assert seconds < 1


@pytest.mark.spec("CON-36")
def test_a_transaction_in_backoff_is_released_when_the_drain_is_over(tmp_path, flavour):
    raising = '    raise ConnectionError("no answer")'
    retry = 'policy(retry={"backoff": 20.0})'
    with ErgonProcess(tmp_path, "orders(2)" + make_task(flavour, raising, raising, policy=retry)) as process:
        process.wait_for("began")
        process.send_signal()
        code, seconds = process.wait_for_exit()
    assert (code, process.notes) == (RunExit.OK, ["fetch", "Release order-1 settled"])
    assert GRACE_SECONDS <= seconds < GRACE_SECONDS + 1


@pytest.mark.spec("CON-36")
def test_running_work_is_drained_and_nothing_more_is_fetched(tmp_path, flavour):
    source = "orders(2)" + make_task(flavour, "    heard()", "    await heard_async()", policy="policy(drain=60)")
    with ErgonProcess(tmp_path, source) as process:
        process.wait_for("began")
        process.send_signal()
        process.wait_for("SIGTERM: running work has 60 s")
        process.send_line()
        code, _ = process.wait_for_exit()
    assert (code, process.notes) == (RunExit.OK, ["fetch", "Ack order-1 settled"])


# A handler that ignores cancellation, in the variant that has cancellation.
ENDLESS_BODY = "    threading.Event().wait()"
ENDLESS_ASYNC_BODY = """
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
"""


@pytest.mark.spec("CON-36", "CON-46")
def test_a_handler_that_never_returns_does_not_keep_the_process(tmp_path, flavour):
    with ErgonProcess(tmp_path, "orders(2)" + make_task(flavour, ENDLESS_BODY, ENDLESS_ASYNC_BODY)) as process:
        process.wait_for("began")
        process.send_signal()
        code, seconds = process.wait_for_exit()
    # Its claim is neither acked nor released: the broker redelivers it once the process is gone.
    assert (code, process.notes) == (RunExit.LEFT_BEHIND, ["fetch"])
    assert GRACE_SECONDS <= seconds < GRACE_SECONDS + 1
    assert any(line.split() == ["still", "running", "1"] for line in process.output)


@pytest.mark.spec("CON-46")
def test_a_handler_that_blocks_the_event_loop_does_not_keep_the_process(tmp_path):
    source = "orders(1)" + make_task("async def", "", "    time.sleep(3600)")
    with ErgonProcess(tmp_path, source) as process:
        process.wait_for("began")
        process.send_signal()
        code, seconds = process.wait_for_exit()
    assert code == RunExit.FORCED
    assert GRACE_SECONDS <= seconds < GRACE_SECONDS + 1


@pytest.mark.spec("CON-46")
@pytest.mark.parametrize(
    "statement",
    [
        "threading.Thread(target=threading.Event().wait).start()",
        "import atexit; atexit.register(threading.Event().wait)",
    ],
)
def test_a_blocked_interpreter_exit_does_not_keep_the_process(tmp_path, statement):
    with ErgonProcess(tmp_path, f"{statement}\n" + make_task("def", "", "")) as process:
        process.wait_for("fetch")
        process.send_signal()
        code, seconds = process.wait_for_exit()
    assert code == RunExit.OK
    assert seconds < GRACE_SECONDS + 1


LIFESPAN = """
@asynccontextmanager
async def life_async():
    say("opening")
    {before}
    yield {{}}
    {after}

@contextmanager
def life():
    say("opening")
    {before}
    yield {{}}
    {after}

"""


@pytest.mark.spec("CON-46")
def test_a_lifespan_that_does_not_end_does_not_keep_the_process(tmp_path, flavour):
    span = ", lifespan=life" if flavour == "def" else ", lifespan=life_async"
    source = LIFESPAN.format(before="", after="time.sleep(3600)") + make_task(flavour, "", "", decorator_arguments=span)
    with ErgonProcess(tmp_path, source) as process:
        process.wait_for("fetch")
        process.send_signal()
        code, seconds = process.wait_for_exit()
    assert code == RunExit.FORCED
    assert seconds < GRACE_SECONDS + 1


@pytest.mark.spec("CON-36")
def test_a_signal_before_the_loop_starts_is_not_lost(tmp_path, flavour):
    span = ", lifespan=life" if flavour == "def" else ", lifespan=life_async"
    source = LIFESPAN.format(before="heard()", after="")
    source += "orders(1)" + make_task(flavour, "", "", policy="policy(drain=60)", decorator_arguments=span)
    with ErgonProcess(tmp_path, source) as process:
        process.wait_for("opening")
        process.send_signal()
        process.wait_for("SIGTERM")
        process.send_line()
        code, _ = process.wait_for_exit()
    assert (code, process.notes) == (RunExit.OK, [])


@pytest.mark.spec("CON-36")
def test_a_second_signal_stops_immediately(tmp_path, flavour):
    source = "orders(1)" + make_task(flavour, ENDLESS_BODY, ENDLESS_ASYNC_BODY, policy="policy(drain=60)")
    with ErgonProcess(tmp_path, source) as process:
        process.wait_for("began")
        process.send_signal()
        process.wait_for("a second signal stops it immediately")
        process.send_signal(signal.SIGINT)
        code, seconds = process.wait_for_exit()
    assert (code, process.notes) == (RunExit.LEFT_BEHIND, ["fetch"])
    assert seconds < 1


# -- exits without a signal -----------------------------------------------------------------------


@pytest.mark.spec("CON-35")
def test_a_handler_cannot_end_the_process_by_raising(tmp_path, flavour):
    raising = """
    if transaction.id == "order-1":
        raise SystemExit(9)
    if transaction.id == "order-2":
        raise KeyboardInterrupt
    if transaction.id == "order-3":
        raise asyncio.CancelledError
"""
    policy = 'policy(streaming=False, retry={"max_attempts": 1})'
    with ErgonProcess(tmp_path, "orders(4)" + make_task(flavour, raising, raising, policy=policy)) as process:
        code, _ = process.wait_for_exit()
    assert code == RunExit.OK
    assert sorted(line for line in process.notes if line != "fetch") == [
        "Ack order-4 settled",
        "DeadLetter order-1 settled",
        "DeadLetter order-2 settled",
        "DeadLetter order-3 settled",
    ]


BROKEN_QUEUE = """
class Broken(Noted):
    def fetch_transactions(self, batch_size, **extra):
        raise OSError("no route")

    async def fetch_transactions_async(self, batch_size, **extra):
        raise OSError("no route")

queue = Broken("orders")
"""


def test_a_connector_that_cannot_be_read_is_a_failure(tmp_path, flavour):
    with ErgonProcess(tmp_path, BROKEN_QUEUE + make_task(flavour, "", "")) as process:
        code, _ = process.wait_for_exit()
    assert code == RunExit.FAILED
    assert any("no route" in line for line in process.output)


def test_a_lifespan_that_fails_is_a_failure_with_its_traceback(tmp_path):
    source = LIFESPAN.format(before='raise OSError("no pool")', after="")
    with ErgonProcess(tmp_path, source + make_task("def", "", "", decorator_arguments=", lifespan=life")) as process:
        code, _ = process.wait_for_exit()
    assert code == RunExit.FAILED
    assert "OSError: no pool" in process.output


def test_a_loop_timeout_has_its_own_exit_code(tmp_path):
    with ErgonProcess(tmp_path, make_task("def", "", "", policy="policy(timeout=0.1)")) as process:
        code, _ = process.wait_for_exit()
    assert code == RunExit.TIMEOUT


def test_abandoned_handlers_do_not_keep_a_process_with_nothing_left_to_do(tmp_path, flavour):
    retry = 'policy(streaming=False, concurrency=2, retry={"timeout": 0.1, "exit_grace": 0.0})'
    with ErgonProcess(
        tmp_path, "orders(1)" + make_task(flavour, ENDLESS_BODY, ENDLESS_ASYNC_BODY, policy=retry)
    ) as process:
        code, _ = process.wait_for_exit()
    assert code == RunExit.LEFT_BEHIND


def test_the_options_override_the_policy_and_json_is_the_last_line(tmp_path):
    source = "orders(3)" + make_task("def", "", "")
    (tmp_path / "policy.toml").write_text("[loop]\nstreaming = true\nlimit = 1\n", encoding="utf-8")
    with ErgonProcess(
        tmp_path, source, "--policy", "policy.toml", "--once", "--limit", "2", "--json", *QUIET_ARGUMENTS
    ) as process:
        code, _ = process.wait_for_exit()
    result = json.loads(process.output[-1])
    assert code == result["exit_code"] == RunExit.OK
    assert (result["stop_reason"], result["started"], result["counts"]["succeeded"]) == ("limit", 2, 2)


@pytest.mark.spec("RUN-03")
def test_an_unknown_policy_key_is_rejected_with_the_nearest_known_one(tmp_path):
    (tmp_path / "policy.toml").write_text("[loop]\nstreeming = true\n", encoding="utf-8")
    with ErgonProcess(tmp_path, make_task("def", "", ""), "--policy", "policy.toml") as process:
        code, _ = process.wait_for_exit()
    assert (code, process.notes) == (RunExit.USAGE, [])
    assert any("'streeming'" in line and "did you mean 'streaming'?" in line for line in process.output)


def test_without_its_libraries_the_command_names_the_extra_to_install(tmp_path):
    program = f"import sys; sys.modules['typer'] = None; {ERGON[-1]}"
    result = subprocess.run([*ERGON[:-1], program, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == RunExit.USAGE
    assert "pip install 'ergon-framework[cli]'" in result.stderr
