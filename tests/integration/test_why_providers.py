"""Check ``ergon why``: the provider a transaction waits for or failed by, until when, and what to do about it."""

from __future__ import annotations

import sys
import time

import psycopg
import pytest

from ergon_framework import ConsumerPolicy, consumer
from ergon_framework.cli.app import app
from ergon_framework.connectors.base import DeadLetter, Defer
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt, Failure
from ergon_framework.providers.base import ProviderBase
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.errors import ProviderAuthError, ProviderError, ReasonCode
from ergon_framework.providers.health import AttemptOutcome
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.postgres import admin
from ergon_framework.providers.postgres.attempt_writer import MetricsWriter
from ergon_framework.providers.postgres.state import PostgresProviderState
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.providers.state import ProviderScope
from ergon_framework.transaction import Transaction
from tests.integration.metering import make_attempt, query
from tests.integration.test_why import SECRET, run_why, run_why_json
from tests.servers.postgres import free_port

pytestmark = pytest.mark.spec("RUN-06")

FRAGILE_POLICY = ProviderPolicy(
    timeout=5,
    retry=RetryPolicy(max_attempts=1),
    breaker=BreakerPolicy(failure_threshold=2, open_cooldown_seconds=600),
)
METERED_POLICY = ProviderPolicy(timeout=5, quota=QuotaPolicy(month=1))
SHARED_OPTIONS = {"scope": "provider"}


class Pay(ProviderBase):
    """A provider that charges cards, or raises the configured error."""

    provider_name = "pay"
    capability = "charging"
    raises: BaseException | None = None

    def _execute_impl(self, **_):
        if self.raises is not None:
            raise self.raises
        return {"paid": True}


class PaymentSetup:
    """A queue, a provider, and a task that calls it for each transaction."""

    def __init__(self, dsn, queue, policy, *, has_metrics):
        self.dsn, self.queue = dsn, queue
        self.provider_state = PostgresProviderState(dsn, metrics=has_metrics)
        self.pay = Pay(state_store=self.provider_state, policy=policy)

        @consumer(queue, uses=[self.pay])
        def charge(order):
            self.pay.call("charge", order)

        self.charge = charge

    def fail_calls(self, *tenants, error=None):
        """Make a call of each of *tenants* fail."""
        self.pay.raises = ConnectionResetError(SECRET) if error is None else error
        for tenant in tenants:
            with pytest.raises(ProviderError):
                self.pay.call("charge", {"card": SECRET}, tenant=tenant)

    def run_transaction(self, name="order-1", *, max_deferral=3600, **fields):
        """Run one transaction and flush what is to be written."""
        self.queue.dispatch([Transaction({"card": SECRET}, id=name, **{"tenant": "acme"} | fields)])
        self.charge.run(ConsumerPolicy.load({"loop": {"max_deferral": max_deferral}}))
        self.provider_state.close()


@pytest.fixture
def dsn(database, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)
    return database


@pytest.fixture
def queue(dsn):
    queue = PostgresQueue("orders", dsn=dsn)
    queue.open()
    yield queue
    queue.close()


@pytest.fixture
def make_setup(dsn, queue):
    setups = []

    def make(policy, *, has_metrics=True):
        setups.append(PaymentSetup(dsn, queue, policy, has_metrics=has_metrics))
        return setups[-1]

    yield make
    for setup in setups:
        setup.provider_state.close()


@pytest.fixture
def write_task_module(tmp_path, monkeypatch):
    """Return a function that writes a task where the command line finds it."""
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


def read_history(*arguments):
    """Return the history of the transaction, which is the first one."""
    history = run_why_json(*arguments)["histories"][0]
    assert history["kind"] == "transaction"
    return history


def get_provider(history):
    [provider] = history["providers"]
    assert (provider["provider"], provider["capability"]) == ("pay", "charging")
    return provider


# -- a call that was not made ---------------------------------------------------------------------------


def test_an_open_breaker_is_why_a_transaction_waits(make_setup):
    setup = make_setup(FRAGILE_POLICY)
    setup.fail_calls("acme", "acme")
    setup.run_transaction()
    history = read_history("order-1")
    provider = get_provider(history)
    assert (provider["tenant"], provider["operation"], provider["evidence"], provider["reason"]) == (
        "acme",
        "charge",
        "call",
        "circuit_open",
    )
    [block] = provider["blocks"]
    assert (block["cause"], block["shared"]) == ("breaker", False)
    assert block["until"] == pytest.approx(history["location"]["until"], abs=5)
    assert block["description"].startswith("breaker open until 20")
    assert block["description"].endswith(", 2 consecutive faults")
    assert provider["failures"] == {"connection_error": 2}
    assert history["status"].endswith("because pay.charge was not called (circuit_open)")
    assert history["remedy"].startswith("nothing, redelivery is automatic; ")
    assert history["remedy"].endswith("ergon provider breaker list --tenant acme --provider pay")
    output = run_why("order-1").stdout
    assert "\n  provider: pay (charging) of tenant acme: charge was not called (circuit_open); breaker open " in output
    assert "; failed in the last hour: connection_error 2\n" in output


def test_an_exhausted_quota_is_why_a_transaction_waits(make_setup):
    setup = make_setup(METERED_POLICY)
    setup.pay.call("charge", {}, tenant="acme")
    setup.run_transaction()
    history = read_history("order-1")
    provider = get_provider(history)
    assert provider["reason"] == "quota_exhausted"
    [block] = provider["blocks"]
    assert (block["cause"], block["until"] % 86_400) == ("quota", 0)
    assert block["description"].startswith("quota per month exhausted until ")
    assert block["description"].endswith(", 1 of 1 used")
    assert "ergon provider quota list --tenant acme --provider pay; " in history["remedy"]
    assert "ergon provider quota extend pay charging --tenant acme --calls N" in history["remedy"]


def test_an_override_by_an_operator_is_why_a_transaction_waits(make_setup, dsn):
    setup = make_setup(FRAGILE_POLICY)
    admin.force_open(dsn, ProviderScope("acme", "pay", "charging"), seconds=600, actor="jo", reason=SECRET)
    setup.run_transaction()
    history = read_history("order-1")
    [block] = get_provider(history)["blocks"]
    assert block["cause"] == "operator"
    assert block["description"].startswith("breaker forced open by an operator until ")
    assert history["remedy"].endswith(
        "to clear it: ergon provider breaker lift pay charging --tenant acme --reason WHY"
    )


def test_an_override_that_was_cleared_is_reported_as_over(make_setup, dsn):
    setup = make_setup(FRAGILE_POLICY)
    admin.force_open(dsn, ProviderScope("acme", "pay", "charging"), seconds=600, actor="jo", reason="INC-7")
    setup.run_transaction()
    admin.clear_override(dsn, ProviderScope("acme", "pay", "charging"), actor="jo", reason="over")
    history = read_history("order-1")
    provider = get_provider(history)
    assert provider["blocks"] == []
    assert "calls are not blocked" in provider["description"]
    assert history["remedy"] == "check the provider: ergon provider health --tenant acme"


# -- attempts without a record --------------------------------------------------------------------------


def test_without_attempts_the_providers_of_the_task_are_reported(make_setup, write_task_module):
    setup = make_setup(FRAGILE_POLICY, has_metrics=False)
    setup.fail_calls("acme", "acme")
    setup.run_transaction()
    history = read_history("order-1", "--task", write_task_module({}))
    provider = get_provider(history)
    assert (provider["evidence"], [block["cause"] for block in provider["blocks"]]) == ("uses", ["breaker"])
    assert "last error connection_error at 20" in provider["description"]
    assert "ergon provider breaker list --tenant acme --provider pay" in history["remedy"]


def test_without_a_task_a_block_with_the_same_end_is_reported_as_a_guess(make_setup, dsn):
    setup = make_setup(FRAGILE_POLICY, has_metrics=False)
    setup.fail_calls("acme", "acme")
    setup.run_transaction()
    admin.force_open(dsn, ProviderScope("acme", "mail", "sending"), seconds=9_000, actor="jo", reason="another end")
    history = read_history("order-1")
    provider = get_provider(history)
    assert provider["evidence"] == "timing"
    assert provider["description"].startswith("perhaps pay (charging) of tenant acme: breaker open until ")
    assert "because" not in history["status"]


def test_a_delay_that_an_attempt_requested_names_no_provider(make_setup, queue):
    setup = make_setup(FRAGILE_POLICY, has_metrics=False)
    setup.fail_calls("acme", "acme")
    queue.dispatch([Transaction({}, id="order-1", tenant="acme")])
    [delivery] = queue.fetch_transactions(1, wait=5.0)
    past = Attempt(attempt=0, category=Category.SYSTEM, error="no line", at=time.time(), delay=600.0)
    queue.settle([(delivery, Defer(600.0, attempts=1, history=(past,)))])
    assert read_history("order-1")["providers"] == []


def test_a_closed_gate_is_why_a_ready_transaction_is_not_fetched(make_setup, queue, write_task_module):
    setup = make_setup(FRAGILE_POLICY.model_copy(update=SHARED_OPTIONS), has_metrics=False)
    setup.fail_calls("acme", "beta")
    queue.dispatch([Transaction({}, id="order-1", tenant="acme")])
    history = read_history("order-1", "--task", write_task_module(SHARED_OPTIONS))
    assert history["location"]["state"] == "ready"
    assert history["status"].endswith("; tasks that use pay fetch nothing while its breaker is open")
    assert "ergon provider breaker list --tenant '*' --provider pay" in history["remedy"]


def test_a_breaker_of_one_tenant_closes_no_gate(make_setup, queue, write_task_module):
    setup = make_setup(FRAGILE_POLICY, has_metrics=False)
    setup.fail_calls("acme", "acme")
    queue.dispatch([Transaction({}, id="order-1", tenant="acme")])
    history = read_history("order-1", "--task", write_task_module({}))
    assert (history["location"]["state"], history["providers"]) == ("ready", [])


def test_the_journal_does_not_repeat_what_the_queue_reports(make_setup, dsn):
    setup = make_setup(FRAGILE_POLICY)
    setup.fail_calls("acme", "acme")
    setup.run_transaction()
    query(
        dsn,
        "insert into ergon.journal (at, transaction_id, task, queue, tenant, outcome, attempts, seconds, worker) "
        "values (now(), 'order-1', 'charge', 'orders', 'acme', 'deferred', 0, 0.1, 'w')",
    )
    histories = [history for history in run_why_json("order-1")["histories"] if history["kind"] == "transaction"]
    assert [(history["location"]["state"], len(history["providers"])) for history in histories] == [
        ("delayed", 1),
        ("queued", 0),
    ]


def test_on_a_terminal_the_provider_is_below_the_table(make_setup, monkeypatch, capsys):
    setup = make_setup(FRAGILE_POLICY)
    setup.fail_calls("acme", "acme")
    setup.run_transaction()
    capsys.readouterr()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        app(["why", "order-1"])
    table, _, rest = capsys.readouterr().out.partition("  provider: pay (charging) of tenant acme: ")
    assert "┃" in table
    assert "charge was not called (circuit_open)" in " ".join(rest.split())


# -- a call that failed permanently ---------------------------------------------------------------------


def test_a_dead_letter_reports_the_current_state_of_its_provider(make_setup):
    setup = make_setup(FRAGILE_POLICY)
    setup.fail_calls("acme")
    setup.fail_calls("acme", error=ProviderAuthError("who are you"))
    setup.run_transaction()
    history = read_history("order-1")
    assert history["location"]["state"] == "dead letter"
    provider = get_provider(history)
    assert (provider["evidence"], provider["operation"], provider["reason"]) == ("failure", "charge", "auth_failed")
    assert provider["failures"] == {"auth_failed": 2, "connection_error": 1}
    assert provider["blocks"] == []
    assert history["remedy"].startswith("check the provider: ergon provider health --tenant acme; fix the cause, ")
    assert history["remedy"].endswith("ergon dlq replay MODULE:NAME --id=order-1")


def test_a_dead_letter_whose_provider_is_still_blocked_reports_until_when(make_setup):
    setup = make_setup(FRAGILE_POLICY)
    setup.fail_calls("acme")
    setup.run_transaction(max_deferral=0)
    history = read_history("order-1")
    provider = get_provider(history)
    assert (provider["reason"], [block["cause"] for block in provider["blocks"]]) == ("connection_error", ["breaker"])
    assert "charge failed (connection_error); breaker open until 20" in provider["description"]
    assert history["remedy"].startswith(
        "check the provider: ergon provider breaker list --tenant acme --provider pay; "
    )


# -- tenants --------------------------------------------------------------------------------------------


def test_data_of_other_tenants_is_not_reported(make_setup, dsn):
    setup = make_setup(FRAGILE_POLICY)
    setup.fail_calls("beta", "beta", error=ConnectionResetError())
    setup.pay.raises = ProviderAuthError("who are you")
    setup.run_transaction(correlation="c-7")
    writer = MetricsWriter(dsn)
    other_fields = {"tenant_id": "beta", "correlation_id": "c-7", "outcome": AttemptOutcome.FAILED}
    writer.record(make_attempt(provider_name="pay", **other_fields, reason_code=ReasonCode.TIMEOUT))
    assert writer.close(20)
    query(
        dsn,
        "insert into ergon.provider_dead_letters (tenant_id, task_name, correlation_id, reason_code, error_type, "
        "error_message, attempts, task_id) values ('beta', 'bill', 'c-7', 'timeout', 'E', 'late', 1, 'order-1')",
    )
    output = run_why("order-1", "--json").stdout
    assert "beta" not in output
    assert get_provider(read_history("order-1"))["failures"] == {"auth_failed": 1}
    assert "beta" in run_why("c-7", "--json").stdout  # queried directly, a correlation belongs to no tenant


def test_no_count_is_reported_of_a_state_shared_by_all_tenants(make_setup):
    setup = make_setup(FRAGILE_POLICY.model_copy(update={**SHARED_OPTIONS, "quota": QuotaPolicy(month=3)}))
    setup.fail_calls("beta")
    setup.run_transaction("order-0")
    history = read_history("order-0")
    [block] = get_provider(history)["blocks"]
    assert (block["cause"], block["shared"]) == ("breaker", True)
    assert block["description"].startswith("breaker of all tenants open until ")
    assert "faults" not in block["description"]
    assert get_provider(history)["failures"] == {"connection_error": 1}
    call = run_why_json("order-0")["histories"][-1]
    assert "faults" not in call["attributes"]["breaker of all tenants"]
    assert call["events"][-1]["values"]["quota per month of all tenants"] == "not exhausted"


def test_a_shared_quota_is_reported_as_exhausted_without_a_count(make_setup):
    setup = make_setup(METERED_POLICY.model_copy(update=SHARED_OPTIONS))
    setup.pay.call("charge", {}, tenant="beta")
    setup.run_transaction()
    history = read_history("order-1")
    [block] = get_provider(history)["blocks"]
    assert block["description"].startswith("quota of all tenants per month exhausted until ")
    assert "used" not in block["description"]
    assert "ergon provider quota list --tenant '*' --provider pay" in history["remedy"]


# -- when the provider state does not respond -----------------------------------------------------------


def test_without_the_provider_tables_the_rest_is_reported(make_setup, dsn):
    setup = make_setup(FRAGILE_POLICY)
    setup.fail_calls("acme")
    setup.run_transaction(max_deferral=0)
    query(dsn, "alter table ergon.provider_breakers rename to elsewhere")
    try:
        result = run_why("order-1")
        report = run_why_json("order-1")
    finally:
        query(dsn, "alter table ergon.elsewhere rename to provider_breakers")
    provider = get_provider(report["histories"][0])
    assert (provider["blocks"], provider["failures"]) == (None, None)
    assert provider["description"].endswith("charge failed (connection_error); availability unknown")
    assert report["histories"][0]["remedy"].startswith("check the provider: ergon provider health --tenant acme; ")
    errors = {answer["source"]: answer["error"] for answer in report["sources"] if answer["error"]}
    assert "ergon db upgrade" in errors["provider state"]
    assert "provider state did not answer: " in result.stderr


DEAD_LETTER_APP = """
from ergon_framework import consumer
from ergon_framework.connectors.base import DeadLetter
from ergon_framework.connectors.memory import MemoryConnector
from tests.integration.test_why_providers import add_dead_letter

other = add_dead_letter(MemoryConnector("other"))
"""


def add_dead_letter(connector):
    """Return *connector* with the dead letter of a call."""
    connector.dispatch([Transaction({"card": SECRET}, id="odd", tenant="acme")])
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
def test_without_a_database_the_record_of_the_failure_is_reported(tmp_path, monkeypatch, database):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    if database == "away":
        monkeypatch.setenv("ERGON_POSTGRES__DSN", f"postgresql://owner:{SECRET}@127.0.0.1:{free_port()}/none")
    name = f"letter_{time.monotonic_ns()}"
    (tmp_path / f"{name}.py").write_text(DEAD_LETTER_APP)
    monkeypatch.syspath_prepend(tmp_path)
    history = read_history("odd", "--queue", f"{name}:other")
    sys.modules.pop(name)
    provider = get_provider(history)
    assert provider["description"] == ("pay (charging) of tenant acme: charge failed (timeout); availability unknown")
    assert "ergon provider health --tenant acme" in history["remedy"]


# -- cost -----------------------------------------------------------------------------------------------


def test_failures_are_counted_by_an_index(dsn):
    query(
        dsn,
        "insert into ergon.provider_execution_metrics (tenant_id, provider_name, capability, operation, "
        "correlation_id, attempt_number, max_attempts, duration_ms, timeout_budget_ms, outcome, reason_code, "
        "retryable, created_at) select 't' || n % 500, 'pay', 'charging', 'o', 'x', 1, 1, 1, 1, 'failed', 'timeout', "
        "false, now() from generate_series(1, 20000) n",
    )
    query(dsn, "analyze ergon.provider_execution_metrics")
    parameters = {
        "tenant": "t7",
        "provider": "pay",
        "capability": "charging",
        "not_called": ["circuit_open"],
        "most": 1000,
    }
    with psycopg.connect(dsn) as connection:
        plan = [line for (line,) in connection.execute(f"explain {admin.SELECT_FAILURES}", parameters)]
    assert any("Index" in line for line in plan), plan
    assert not [line for line in plan if "Seq Scan" in line], plan
