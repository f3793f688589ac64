"""``ergon why``: which provider a transaction waits for or failed by, until when, and what to do about it."""

from __future__ import annotations

import sys
import time

import psycopg
import pytest

from ergon_framework import ConsumerPolicy, consumer
from ergon_framework.cli.app import app
from ergon_framework.connectors.base import DeadLetter, Later
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt, Failure
from ergon_framework.providers.base import ProviderBase
from ergon_framework.providers.books import Account
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.errors import ProviderAuthError, ProviderError, ReasonCode
from ergon_framework.providers.health import Outcome
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.providers.sql import operator, standings
from ergon_framework.providers.sql.books import PostgresBooks
from ergon_framework.providers.sql.writer import MetricsWriter
from ergon_framework.transaction import Transaction
from tests.integration.metering import ask, attempt
from tests.integration.test_why import SECRET, told, why
from tests.servers.postgres import free_port

pytestmark = pytest.mark.spec("RUN-06")

FRAGILE = ProviderPolicy(
    timeout=5,
    retry=RetryPolicy(max_attempts=1),
    breaker=BreakerPolicy(failure_threshold=2, open_cooldown_seconds=600),
)
METERED = ProviderPolicy(timeout=5, quota=QuotaPolicy(month=1))
SHARED = {"scope": "provider"}


class Pay(ProviderBase):
    """Charges cards, or raises what it is told to."""

    provider_name = "pay"
    capability = "charging"
    raises: BaseException | None = None

    def _execute_impl(self, **_):
        if self.raises is not None:
            raise self.raises
        return {"paid": True}


class Shop:
    """A queue, a provider, and a task that calls it for each transaction."""

    def __init__(self, dsn, queue, policy, *, writes):
        self.dsn, self.queue = dsn, queue
        self.books = PostgresBooks(dsn, metrics=writes)
        self.pay = Pay(books=self.books, policy=policy)

        @consumer(queue, uses=[self.pay])
        def charge(order):
            self.pay.call("charge", order)

        self.charge = charge

    def fails(self, *tenants, error=None):
        """Have a call of each of *tenants* fail."""
        self.pay.raises = ConnectionResetError(SECRET) if error is None else error
        for tenant in tenants:
            with pytest.raises(ProviderError):
                self.pay.call("charge", {"card": SECRET}, tenant=tenant)

    def takes(self, name="order-1", *, max_deferral=3600, **fields):
        """Run one transaction, and have written down what there is to be written."""
        self.queue.dispatch([Transaction(name, {"card": SECRET}, **{"tenant": "acme"} | fields)])
        self.charge.run(ConsumerPolicy.load({"loop": {"max_deferral": max_deferral}}))
        self.books.close()


@pytest.fixture
def dsn(database, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)
    return database


@pytest.fixture
def queue(dsn):
    made = PostgresQueue("orders", dsn=dsn)
    made.open()
    yield made
    made.close()


@pytest.fixture
def shop(dsn, queue):
    made = []

    def make(policy, *, writes=True):
        made.append(Shop(dsn, queue, policy, writes=writes))
        return made[-1]

    yield make
    for one in made:
        one.books.close()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Puts a task where the command line finds it."""
    name = f"shop_{time.monotonic_ns()}"
    monkeypatch.syspath_prepend(tmp_path)

    def write(policy):
        (tmp_path / f"{name}.py").write_text(
            "from ergon_framework import consumer\n"
            "from ergon_framework.connectors.postgres import PostgresQueue\n"
            "from ergon_framework.providers.policy import ProviderPolicy\n"
            "from tests.integration.test_why_providers import Pay\n"
            f"pay = Pay(policy=ProviderPolicy.load({policy!r}))\n"
            "@consumer(PostgresQueue('orders'), uses=[pay])\n"
            "def charge(order): ...\n"
        )
        return f"{name}:charge"

    yield write
    sys.modules.pop(name, None)


def waiting(*words):
    """What is told of the transaction, which is told of first."""
    found = told(*words)["histories"][0]
    assert found["kind"] == "transaction"
    return found


def the_provider(found):
    [one] = found["providers"]
    assert (one["provider"], one["capability"]) == ("pay", "charging")
    return one


# -- a call that was not made ---------------------------------------------------------------------------


def test_an_open_breaker_is_why_a_transaction_waits(shop):
    acme = shop(FRAGILE)
    acme.fails("acme", "acme")
    acme.takes()
    found = waiting("order-1")
    one = the_provider(found)
    assert (one["tenant"], one["operation"], one["known"], one["reason"]) == ("acme", "charge", "call", "circuit_open")
    [hold] = one["holds"]
    assert (hold["cause"], hold["shared"]) == ("breaker", False)
    assert hold["until"] == pytest.approx(found["place"]["until"], abs=5)
    assert "the breaker is open until 20" in hold["words"]
    assert hold["words"].endswith(", 2 faults in a row")
    assert one["failures"] == {"connection_error": 2}
    assert found["now"].endswith("because pay.charge was not called (circuit_open)")
    assert found["next"].startswith("nothing, it comes back by itself; ")
    assert found["next"].endswith("ergon provider breaker list --tenant acme --provider pay")
    shown = why("order-1").stdout
    assert "\n  provider: pay (charging) of tenant acme: charge was not called (circuit_open); the breaker is " in shown
    assert "; failed in the last hour: connection_error 2\n" in shown


def test_a_spent_quota_is_why_a_transaction_waits(shop):
    acme = shop(METERED)
    acme.pay.call("charge", {}, tenant="acme")
    acme.takes()
    found = waiting("order-1")
    one = the_provider(found)
    assert one["reason"] == "quota_exhausted"
    [hold] = one["holds"]
    assert (hold["cause"], hold["until"] % 86_400) == ("quota", 0)
    assert hold["words"].startswith("the quota per month is spent until ")
    assert hold["words"].endswith(", 1 of 1 used")
    assert "ergon provider quota list --tenant acme --provider pay; " in found["next"]
    assert "ergon provider quota extend pay charging --tenant acme --calls N" in found["next"]


def test_an_operators_word_is_why_a_transaction_waits(shop, dsn):
    acme = shop(FRAGILE)
    operator.force_open(dsn, Account("acme", "pay", "charging"), seconds=600, actor="jo", reason=SECRET)
    acme.takes()
    found = waiting("order-1")
    [hold] = the_provider(found)["holds"]
    assert hold["cause"] == "operator"
    assert hold["words"].startswith("an operator keeps the breaker open until ")
    assert found["next"].endswith("to end it: ergon provider breaker lift pay charging --tenant acme --reason WHY")


def test_a_hold_that_is_over_is_said_to_be_over(shop, dsn):
    acme = shop(FRAGILE)
    operator.force_open(dsn, Account("acme", "pay", "charging"), seconds=600, actor="jo", reason="INC-7")
    acme.takes()
    operator.lift(dsn, Account("acme", "pay", "charging"), actor="jo", reason="over")
    found = waiting("order-1")
    one = the_provider(found)
    assert one["holds"] == []
    assert "nothing holds its calls back now" in one["words"]
    assert found["next"] == "look at the provider: ergon provider health --tenant acme"


# -- where no attempt was written down ------------------------------------------------------------------


def test_without_attempts_the_task_says_which_providers_it_uses(shop, module):
    acme = shop(FRAGILE, writes=False)
    acme.fails("acme", "acme")
    acme.takes()
    found = waiting("order-1", "--task", module({}))
    one = the_provider(found)
    assert (one["known"], [hold["cause"] for hold in one["holds"]]) == ("uses", ["breaker"])
    assert "the last error was connection_error at 20" in one["words"]
    assert "ergon provider breaker list --tenant acme --provider pay" in found["next"]


def test_without_a_task_what_ends_at_the_same_moment_is_a_guess_and_said_to_be_one(shop, dsn):
    acme = shop(FRAGILE, writes=False)
    acme.fails("acme", "acme")
    acme.takes()
    operator.force_open(dsn, Account("acme", "mail", "sending"), seconds=9_000, actor="jo", reason="another end")
    found = waiting("order-1")
    one = the_provider(found)
    assert one["known"] == "moment"
    assert one["words"].startswith("perhaps pay (charging) of tenant acme: the breaker is open until ")
    assert "because" not in found["now"]


def test_what_an_attempt_has_asked_for_is_no_provider(shop, queue):
    acme = shop(FRAGILE, writes=False)
    acme.fails("acme", "acme")
    queue.dispatch([Transaction("order-1", {}, tenant="acme")])
    [delivery] = queue.fetch_transactions(1, wait=5.0)
    past = Attempt(attempt=0, category=Category.SYSTEM, error="no line", at=time.time(), delay=600.0)
    queue.settle([(delivery, Later(600.0, attempts=1, history=(past,)))])
    assert waiting("order-1")["providers"] == []


def test_a_closed_gate_is_why_a_ready_transaction_is_not_fetched(shop, queue, module):
    everybody = shop(FRAGILE.model_copy(update=SHARED), writes=False)
    everybody.fails("acme", "beta")
    queue.dispatch([Transaction("order-1", {}, tenant="acme")])
    found = waiting("order-1", "--task", module(SHARED))
    assert found["place"]["state"] == "ready"
    assert found["now"].endswith("a task that uses pay fetches nothing while its breaker is open")
    assert "ergon provider breaker list --tenant '*' --provider pay" in found["next"]


def test_a_breaker_of_one_tenant_is_no_gate(shop, queue, module):
    acme = shop(FRAGILE, writes=False)
    acme.fails("acme", "acme")
    queue.dispatch([Transaction("order-1", {}, tenant="acme")])
    found = waiting("order-1", "--task", module({}))
    assert (found["place"]["state"], found["providers"]) == ("ready", [])


def test_what_the_queue_has_told_the_journal_does_not_repeat(shop, dsn):
    acme = shop(FRAGILE)
    acme.fails("acme", "acme")
    acme.takes()
    ask(
        dsn,
        "insert into ergon.journal (at, transaction_id, task, queue, tenant, outcome, attempts, seconds, worker) "
        "values (now(), 'order-1', 'charge', 'orders', 'acme', 'deferred', 0, 0.1, 'w')",
    )
    found = [one for one in told("order-1")["histories"] if one["kind"] == "transaction"]
    assert [(one["place"]["state"], len(one["providers"])) for one in found] == [("delayed", 1), ("queued", 0)]


def test_on_a_terminal_the_provider_stands_below_the_table(shop, monkeypatch, capsys):
    acme = shop(FRAGILE)
    acme.fails("acme", "acme")
    acme.takes()
    capsys.readouterr()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        app(["why", "order-1"])
    table, _, rest = capsys.readouterr().out.partition("  provider: pay (charging) of tenant acme: ")
    assert "┃" in table
    assert "charge was not called (circuit_open)" in " ".join(rest.split())


# -- a call that failed for good ------------------------------------------------------------------------


def test_a_dead_letter_says_how_its_provider_is_now(shop):
    acme = shop(FRAGILE)
    acme.fails("acme")
    acme.fails("acme", error=ProviderAuthError("who are you"))
    acme.takes()
    found = waiting("order-1")
    assert found["place"]["state"] == "dead letter"
    one = the_provider(found)
    assert (one["known"], one["operation"], one["reason"]) == ("failure", "charge", "auth_failed")
    assert one["failures"] == {"auth_failed": 2, "connection_error": 1}
    assert one["holds"] == []
    assert found["next"].startswith("look at the provider: ergon provider health --tenant acme; mend the cause, ")
    assert found["next"].endswith("ergon dlq replay MODULE:NAME --id=order-1")


def test_a_dead_letter_whose_provider_is_still_held_back_says_until_when(shop):
    acme = shop(FRAGILE)
    acme.fails("acme")
    acme.takes(max_deferral=0)
    found = waiting("order-1")
    one = the_provider(found)
    assert (one["reason"], [hold["cause"] for hold in one["holds"]]) == ("connection_error", ["breaker"])
    assert "charge failed (connection_error); the breaker is open until 20" in one["words"]
    assert found["next"].startswith("look at the provider: ergon provider breaker list --tenant acme --provider pay; ")


# -- whose it is ----------------------------------------------------------------------------------------


def test_nothing_of_another_tenant_is_told(shop, dsn):
    one = shop(FRAGILE)
    one.fails("beta", "beta", error=ConnectionResetError())
    one.pay.raises = ProviderAuthError("who are you")
    one.takes(correlation="c-7")
    writer = MetricsWriter(dsn)
    theirs = {"tenant_id": "beta", "correlation_id": "c-7", "outcome": Outcome.FAILED}
    writer.record(attempt(provider_name="pay", **theirs, reason_code=ReasonCode.TIMEOUT))
    assert writer.close(20)
    ask(
        dsn,
        "insert into ergon.provider_dead_letters (tenant_id, task_name, correlation_id, reason_code, error_type, "
        "error_message, attempts, task_id) values ('beta', 'bill', 'c-7', 'timeout', 'E', 'late', 1, 'order-1')",
    )
    done = why("order-1", "--json").stdout
    assert "beta" not in done
    assert the_provider(waiting("order-1"))["failures"] == {"auth_failed": 1}
    assert "beta" in why("c-7", "--json").stdout  # asked for by itself, a correlation is nobody's


def test_of_what_all_tenants_share_no_count_is_told(shop):
    everybody = shop(FRAGILE.model_copy(update={**SHARED, "quota": QuotaPolicy(month=3)}))
    everybody.fails("beta")
    everybody.takes("order-0")
    found = waiting("order-0")
    [hold] = the_provider(found)["holds"]
    assert (hold["cause"], hold["shared"]) == ("breaker", True)
    assert hold["words"].startswith("the breaker of all tenants is open until ")
    assert "faults" not in hold["words"]
    assert the_provider(found)["failures"] == {"connection_error": 1}
    call = told("order-0")["histories"][-1]
    assert "faults" not in call["about"]["breaker of all tenants"]
    assert call["events"][-1]["values"]["quota per month of all tenants"] == "not spent"


def test_a_shared_quota_is_spent_without_a_count(shop):
    everybody = shop(METERED.model_copy(update=SHARED))
    everybody.pay.call("charge", {}, tenant="beta")
    everybody.takes()
    found = waiting("order-1")
    [hold] = the_provider(found)["holds"]
    assert hold["words"].startswith("the quota of all tenants per month is spent until ")
    assert "used" not in hold["words"]
    assert "ergon provider quota list --tenant '*' --provider pay" in found["next"]


# -- when the books do not answer -----------------------------------------------------------------------


def test_without_the_tables_of_providers_the_rest_is_told(shop, dsn):
    acme = shop(FRAGILE)
    acme.fails("acme")
    acme.takes(max_deferral=0)
    ask(dsn, "alter table ergon.provider_breakers rename to elsewhere")
    try:
        done = why("order-1")
        found = told("order-1")
    finally:
        ask(dsn, "alter table ergon.elsewhere rename to provider_breakers")
    one = the_provider(found["histories"][0])
    assert (one["holds"], one["failures"]) == (None, None)
    assert one["words"].endswith("charge failed (connection_error); how it is now is not known")
    assert found["histories"][0]["next"].startswith("look at the provider: ergon provider health --tenant acme; ")
    lost = {answer["source"]: answer["error"] for answer in found["asked"] if answer["error"]}
    assert "ergon db upgrade" in lost["providers of the database"]
    assert "providers of the database did not answer: " in done.stderr


LETTER = """
from ergon_framework import consumer
from ergon_framework.connectors.base import DeadLetter
from ergon_framework.connectors.memory import MemoryConnector
from tests.integration.test_why_providers import buried

other = buried(MemoryConnector("other"))
"""


def buried(connector):
    """*connector* with the dead letter of a call."""
    connector.dispatch([Transaction("odd", {"card": SECRET}, tenant="acme")])
    [delivery] = connector.fetch_transactions(1)
    failure = Failure(
        task_name="charge",
        reason_code="timeout",
        error_type="ProviderTimeoutError",
        attempts=1,
        occurred_at=1_700_000_000.0,
        transaction_id="odd",
        category=Category.SYSTEM,
        provider_name="pay",
        capability="charging",
        operation="charge",
    )
    connector.settle([(delivery, DeadLetter("timeout", failure))])
    return connector


@pytest.mark.parametrize("database", ["none", "away"])
def test_without_a_database_the_record_of_the_failure_is_told(tmp_path, monkeypatch, database):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    if database == "away":
        monkeypatch.setenv("ERGON_POSTGRES__DSN", f"postgresql://owner:{SECRET}@127.0.0.1:{free_port()}/none")
    name = f"letter_{time.monotonic_ns()}"
    (tmp_path / f"{name}.py").write_text(LETTER)
    monkeypatch.syspath_prepend(tmp_path)
    found = waiting("odd", "--queue", f"{name}:other")
    sys.modules.pop(name)
    one = the_provider(found)
    assert one["words"] == ("pay (charging) of tenant acme: charge failed (timeout); how it is now is not known")
    assert "ergon provider health --tenant acme" in found["next"]


# -- what it costs --------------------------------------------------------------------------------------


def test_failures_are_counted_by_an_index(dsn):
    ask(
        dsn,
        "insert into ergon.provider_execution_metrics (tenant_id, provider_name, capability, operation, "
        "correlation_id, attempt_number, max_attempts, duration_ms, timeout_budget_ms, outcome, reason_code, "
        "retryable, created_at) select 't' || n % 500, 'pay', 'charging', 'o', 'x', 1, 1, 1, 1, 'failed', 'timeout', "
        "false, now() from generate_series(1, 20000) n",
    )
    ask(dsn, "analyze ergon.provider_execution_metrics")
    given = {"tenant": "t7", "provider": "pay", "capability": "charging", "not_called": ["circuit_open"], "most": 1000}
    with psycopg.connect(dsn) as connection:
        plan = [line for (line,) in connection.execute(f"explain {standings.FAILURES}", given)]
    assert any("Index" in line for line in plan), plan
    assert not [line for line in plan if "Seq Scan" in line], plan
