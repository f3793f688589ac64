"""Schedules of tasks as they are declared: their names, functions, options and the transactions of their times."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

import pytest

import ergon_framework
from ergon_framework import Schedule, cron
from ergon_framework.connectors.base import Defer
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import ConfigurationError, MissingExtraError
from ergon_framework.jobs.cron import tick_id
from ergon_framework.runner.loading import is_consumer, load_tasks
from ergon_framework.worker.exceptions import TransactionException

TICK = datetime(2026, 7, 1, 1, 30, tzinfo=UTC)
DAILY = "30 3 * * *"


def test_a_schedule_is_a_consumer_with_the_name_of_its_function_and_can_be_called():
    @cron(DAILY, MemoryConnector("orders"))
    def nightly(at: datetime) -> str:
        """Charge all open orders."""
        return f"at {at.hour}"

    assert isinstance(nightly, Schedule)
    assert is_consumer(nightly)
    assert (nightly.name, nightly.connector.name, nightly.__module__) == ("nightly", "nightly", __name__)
    assert nightly.__doc__ == "Charge all open orders."
    assert nightly(TICK) == "at 1"


@pytest.mark.spec("EXE-27")
def test_the_transaction_of_a_time_has_a_derived_id_and_the_time_is_that_of_the_zone():
    orders = MemoryConnector("orders")

    @cron(DAILY, orders, name="nightly-charge", zone="Europe/Berlin", tenant="acme", type="charge", key="all")
    async def nightly(at):
        return {"at": at.isoformat()}

    transaction = nightly.create_transaction(TICK)
    assert transaction.id == tick_id("nightly-charge", TICK) == "cron:nightly-charge:2026-07-01T01:30:00Z"
    assert transaction.payload == {"at": "2026-07-01T03:30:00+02:00"}
    assert (transaction.tenant, transaction.type, transaction.key) == ("acme", "charge", "all")
    assert transaction.source == "orders"
    assert nightly.create_transaction(TICK).id == transaction.id


def test_a_function_takes_nothing_or_the_time():
    orders = MemoryConnector("orders")

    @cron(DAILY, orders)
    def nothing():
        return 7

    assert nothing.create_transaction(TICK).payload == 7
    for function in (lambda at, order: None, lambda *times: None, lambda *, at: None):
        with pytest.raises(ConfigurationError, match="it can take no parameter, or one: the scheduled time"):
            cron(DAILY, orders, name="nightly")(function)


@pytest.mark.parametrize(
    "expression, options, error",
    [
        ("61 * * * *", {}, "invalid cron expression"),
        (DAILY, {"zone": "Europe/Atlantis"}, "there is no time zone"),
        (DAILY, {"misfire": "twice"}, "a misfire policy is skip, once, all"),
        (DAILY, {"grace": -1}, "a grace is 0 to"),
        (DAILY, {"name": "a\nb"}, "1 to 200 printable characters"),
        (DAILY, {"zones": "UTC"}, "cron has no option 'zones'; did you mean 'zone'"),
    ],
)
def test_an_invalid_schedule_is_refused_where_it_is_declared(expression, options, error):
    with pytest.raises(ConfigurationError, match=error):

        @cron(expression, MemoryConnector("orders"), **options)
        def nightly(): ...


def test_a_target_is_a_connector_or_a_task():
    with pytest.raises(ConfigurationError, match="sends to a connector or to a task, not to a str"):
        cron(DAILY, "orders")


def test_nothing_can_be_sent_to_a_schedule():
    @cron(DAILY, MemoryConnector("orders"))
    def nightly(): ...

    with pytest.raises(ConfigurationError, match="nothing can be sent to schedule 'nightly'; send to queue 'orders'"):
        nightly.connector.dispatch([])


def test_a_failed_time_is_deferred_and_never_a_dead_letter():
    @cron(DAILY, MemoryConnector("orders"))
    def nightly(): ...

    transaction = nightly.create_transaction(TICK)
    assert isinstance(nightly.handle_transaction_exception(transaction, TransactionException("no")), Defer)


def test_without_cronsim_the_error_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(MissingExtraError, match=r"ergon-framework\[cron\]"):
        cron(DAILY, MemoryConnector("orders"))(lambda: None)


def test_a_module_runs_its_schedules_and_tasks_together(tmp_path, monkeypatch):
    (tmp_path / "shop_with_cron.py").write_text(
        "from ergon_framework import MemoryConnector, consumer, cron\n"
        "orders = MemoryConnector('orders')\n"
        "@consumer(orders)\n"
        "def charge(order): ...\n"
        "@cron('*/5 * * * *', charge)\n"
        "def every_five(): ...\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert [task.name for task in load_tasks(["shop_with_cron"])] == ["charge", "every_five"]
    assert [task.name for task in load_tasks(["shop_with_cron:every_five"])] == ["every_five"]


def test_the_package_is_imported_without_the_driver_of_the_database():
    program = "import sys; sys.modules['psycopg'] = None; from ergon_framework import cron"
    assert ergon_framework.cron is cron
    subprocess.run([sys.executable, "-c", program], check=True)
