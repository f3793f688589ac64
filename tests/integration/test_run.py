"""``ergon run`` as an operator has it: real processes, real signals, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from ergon_framework.runner.exits import Exit
from tests.integration.running import ERGON, Running

GRACE = 0.4
FLAVOURS = ("def", "async def")
#: Stderr stays empty, so that the last line of both streams is that of stdout.
QUIET = ("--log-level", "warning")


def handled(flavour, body, awaits, *, policy="policy()", decorated=""):
    """A task whose handler says that it began, and then does *body*, or *awaits* in the async flavour."""
    inner = body if flavour == "def" else awaits
    return f"""
@consumer(queue, policy={policy}{decorated})
{flavour} task(order, transaction: Transaction):
    say("began")
{inner}
"""


@pytest.fixture(params=FLAVOURS)
def flavour(request):
    return request.param


# -- signals --------------------------------------------------------------------------------------


@pytest.mark.spec("CON-36")
@pytest.mark.parametrize(
    "flavour, stopping",
    [("def", signal.SIGTERM), ("async def", signal.SIGTERM), ("def", signal.SIGINT)],
    indirect=["flavour"],
)
def test_an_idle_process_leaves_at_a_signal(tmp_path, flavour, stopping):
    with Running(tmp_path, handled(flavour, "", "", policy="policy(drain=60)")) as process:
        process.wait_for("fetch")
        process.send(stopping)
        code, seconds = process.ended()
    assert (code, process.notes) == (Exit.OK, ["fetch"])
    assert seconds < 1
    assert any("stopped by a signal" in line for line in process.said)


BLOCKED = """
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
    with Running(tmp_path, BLOCKED + handled(flavour, "", "", policy="policy(drain=60)")) as process:
        process.wait_for("fetch")
        process.send()
        code, seconds = process.ended()
    assert (code, process.notes) == (Exit.OK, ["fetch"])
    assert seconds < 1


@pytest.mark.spec("CON-36")
def test_what_waits_in_a_backoff_is_released_when_the_drain_is_over(tmp_path, flavour):
    raising = '    raise ConnectionError("no answer")'
    retry = 'policy(retry={"backoff": 20.0})'
    with Running(tmp_path, "orders(2)" + handled(flavour, raising, raising, policy=retry)) as process:
        process.wait_for("began")
        process.send()
        code, seconds = process.ended()
    assert (code, process.notes) == (Exit.OK, ["fetch", "Release order-1 settled"])
    assert GRACE <= seconds < GRACE + 1


@pytest.mark.spec("CON-36")
def test_running_work_is_drained_and_nothing_more_is_fetched(tmp_path, flavour):
    source = "orders(2)" + handled(flavour, "    heard()", "    await heard_async()", policy="policy(drain=60)")
    with Running(tmp_path, source) as process:
        process.wait_for("began")
        process.send()
        process.wait_for("SIGTERM: running work has 60 s")
        process.go()
        code, _ = process.ended()
    assert (code, process.notes) == (Exit.OK, ["fetch", "Ack order-1 settled"])


# A cancellation that is shrugged off, in the flavour that has cancellations.
FOREVER = "    threading.Event().wait()"
FOREVER_ASYNC = """
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
"""


@pytest.mark.spec("CON-36", "CON-46")
def test_a_handler_that_never_returns_does_not_keep_the_process(tmp_path, flavour):
    with Running(tmp_path, "orders(2)" + handled(flavour, FOREVER, FOREVER_ASYNC)) as process:
        process.wait_for("began")
        process.send()
        code, seconds = process.ended()
    # Its claim is neither acked nor released: the broker takes it back once the process is gone.
    assert (code, process.notes) == (Exit.LEFT_BEHIND, ["fetch"])
    assert GRACE <= seconds < GRACE + 1
    assert any(line.split() == ["still", "running", "1"] for line in process.said)


@pytest.mark.spec("CON-46")
def test_a_handler_that_blocks_the_event_loop_does_not_keep_the_process(tmp_path):
    source = "orders(1)" + handled("async def", "", "    time.sleep(3600)")
    with Running(tmp_path, source) as process:
        process.wait_for("began")
        process.send()
        code, seconds = process.ended()
    assert code == Exit.FORCED
    assert GRACE <= seconds < GRACE + 1


@pytest.mark.spec("CON-46")
@pytest.mark.parametrize(
    "held",
    [
        "threading.Thread(target=threading.Event().wait).start()",
        "import atexit; atexit.register(threading.Event().wait)",
    ],
)
def test_what_holds_the_interpreter_does_not_keep_the_process(tmp_path, held):
    with Running(tmp_path, f"{held}\n" + handled("def", "", "")) as process:
        process.wait_for("fetch")
        process.send()
        code, seconds = process.ended()
    assert code == Exit.OK
    assert seconds < GRACE + 1


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
    source = LIFESPAN.format(before="", after="time.sleep(3600)") + handled(flavour, "", "", decorated=span)
    with Running(tmp_path, source) as process:
        process.wait_for("fetch")
        process.send()
        code, seconds = process.ended()
    assert code == Exit.FORCED
    assert seconds < GRACE + 1


@pytest.mark.spec("CON-36")
def test_a_signal_before_the_loop_began_is_not_lost(tmp_path, flavour):
    span = ", lifespan=life" if flavour == "def" else ", lifespan=life_async"
    source = LIFESPAN.format(before="heard()", after="")
    source += "orders(1)" + handled(flavour, "", "", policy="policy(drain=60)", decorated=span)
    with Running(tmp_path, source) as process:
        process.wait_for("opening")
        process.send()
        process.wait_for("SIGTERM")
        process.go()
        code, _ = process.ended()
    assert (code, process.notes) == (Exit.OK, [])


@pytest.mark.spec("CON-36")
def test_a_second_signal_hurries(tmp_path, flavour):
    source = "orders(1)" + handled(flavour, FOREVER, FOREVER_ASYNC, policy="policy(drain=60)")
    with Running(tmp_path, source) as process:
        process.wait_for("began")
        process.send()
        process.wait_for("a second signal ends it at once")
        process.send(signal.SIGINT)
        code, seconds = process.ended()
    assert (code, process.notes) == (Exit.LEFT_BEHIND, ["fetch"])
    assert seconds < 1


# -- how it ends without a signal -----------------------------------------------------------------


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
    once = 'policy(streaming=False, retry={"max_attempts": 1})'
    with Running(tmp_path, "orders(4)" + handled(flavour, raising, raising, policy=once)) as process:
        code, _ = process.ended()
    assert code == Exit.OK
    assert sorted(line for line in process.notes if line != "fetch") == [
        "Ack order-4 settled",
        "DeadLetter order-1 settled",
        "DeadLetter order-2 settled",
        "DeadLetter order-3 settled",
    ]


BROKEN = """
class Broken(Noted):
    def fetch_transactions(self, batch_size, **extra):
        raise OSError("no route")

    async def fetch_transactions_async(self, batch_size, **extra):
        raise OSError("no route")

queue = Broken("orders")
"""


def test_a_connector_that_cannot_be_read_is_a_failure(tmp_path, flavour):
    with Running(tmp_path, BROKEN + handled(flavour, "", "")) as process:
        code, _ = process.ended()
    assert code == Exit.FAILED
    assert any("no route" in line for line in process.said)


def test_a_lifespan_that_fails_is_a_failure_with_its_traceback(tmp_path):
    source = LIFESPAN.format(before='raise OSError("no pool")', after="")
    with Running(tmp_path, source + handled("def", "", "", decorated=", lifespan=life")) as process:
        code, _ = process.ended()
    assert code == Exit.FAILED
    assert "OSError: no pool" in process.said


def test_a_loop_whose_time_is_over_has_a_code_of_its_own(tmp_path):
    with Running(tmp_path, handled("def", "", "", policy="policy(timeout=0.1)")) as process:
        code, _ = process.ended()
    assert code == Exit.TIMEOUT


def test_handlers_left_behind_do_not_keep_a_process_that_has_nothing_more_to_do(tmp_path, flavour):
    retry = 'policy(streaming=False, concurrency=2, retry={"timeout": 0.1, "abandon_grace": 0.0})'
    with Running(tmp_path, "orders(1)" + handled(flavour, FOREVER, FOREVER_ASYNC, policy=retry)) as process:
        code, _ = process.ended()
    assert code == Exit.LEFT_BEHIND


def test_the_options_override_the_policy_and_json_is_the_last_line(tmp_path):
    source = "orders(3)" + handled("def", "", "")
    (tmp_path / "policy.toml").write_text("[loop]\nstreaming = true\nlimit = 1\n", encoding="utf-8")
    with Running(tmp_path, source, "--policy", "policy.toml", "--once", "--limit", "2", "--json", *QUIET) as process:
        code, _ = process.ended()
    told = json.loads(process.said[-1])
    assert code == told["exit_code"] == Exit.OK
    assert (told["end"], told["started"], told["counts"]["succeeded"]) == ("limit", 2, 2)


@pytest.mark.spec("RUN-03")
def test_an_unknown_policy_key_is_refused_with_the_nearest_known_one(tmp_path):
    (tmp_path / "policy.toml").write_text("[loop]\nstreeming = true\n", encoding="utf-8")
    with Running(tmp_path, handled("def", "", ""), "--policy", "policy.toml") as process:
        code, _ = process.ended()
    assert (code, process.notes) == (Exit.USAGE, [])
    assert any("'streeming'" in line and "did you mean 'streaming'?" in line for line in process.said)


def test_without_its_libraries_the_command_says_which_extra_to_install(tmp_path):
    hidden = f"import sys; sys.modules['typer'] = None; {ERGON[-1]}"
    done = subprocess.run([*ERGON[:-1], hidden, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.USAGE
    assert "pip install 'ergon-framework[cli]'" in done.stderr
