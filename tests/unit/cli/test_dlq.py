"""``ergon dlq`` from the outside: its output, its moves and its exit codes."""

from __future__ import annotations

import importlib
import json
import signal
import sys
import threading
from contextlib import contextmanager

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ergon_framework import ConsumerPolicy
from ergon_framework.cli import dlq_view
from ergon_framework.cli.app import app
from ergon_framework.cli.dlq_view import DlqExit
from ergon_framework.connectors.base import Ack, DeadLetter
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterResult, ReplayResult
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import ConnectionLostError
from ergon_framework.failure import Attempt, Failure
from ergon_framework.testing.memory_log import MemoryLog
from ergon_framework.transaction import Transaction
from tests.unit.object_codec import ObjectCodec

APP = """
from ergon_framework import BusinessError, MemoryConnector, Transaction, consumer

orders = MemoryConnector("orders")
orders.dispatch([
    Transaction({"card": "secret-1"}, id="order-1", type="order", tenant="acme", correlation="basket", key="c1"),
    Transaction({"card": "secret-2"}, id="order-2", type="refund"),
    Transaction({"card": "secret-3"}, id="order-3", type="order"),
])

@consumer(orders)
def charge(order, transaction):
    if transaction.type == "order":
        raise BusinessError("declined", code="declined")
    raise OSError("no line")

number = 7
"""


class Shop:
    """The command, and the connector that it works on."""

    def __init__(self, connector):
        self.connector = connector

    def run(self, command, *arguments, where="dlqapp:orders", **options):
        return CliRunner().invoke(app, ["dlq", command, where, *arguments], **options)

    def json(self, command, *arguments, **options):
        return [json.loads(line) for line in self.run(command, *arguments, "--json", **options).stdout.splitlines()]

    @property
    def dead(self):
        return [record.id for record in self.connector.dead_letters]


def register_app(connector):
    module = type(sys)("dlqapp")
    module.orders = connector
    sys.modules["dlqapp"] = module
    return Shop(connector)


@pytest.fixture
def app_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("dlqapp", None)


@pytest.fixture
def shop(app_folder):
    (app_folder / "dlqapp.py").write_text(APP, encoding="utf-8")
    sys.path.insert(0, str(app_folder))
    module = importlib.import_module("dlqapp")
    # One at a time, so that the dead letters are in the order of arrival.
    policy = {"loop": {"concurrency": {"value": 1}}, "steps": {"process": {"retry": {"max_attempts": 1}}}}
    module.charge.run(ConsumerPolicy.load(policy))
    return Shop(module.orders)


def add_dead_letters(connector, *transactions, reason="bad"):
    connector.dispatch(transactions)
    connector.settle([(delivery, DeadLetter(reason)) for delivery in connector.fetch_transactions(len(transactions))])


def make_transactions(count):
    return [Transaction("good", id=f"t-{number}") for number in range(count)]


@contextmanager
def running_worker(connector, *, fetch_wait=10.0):
    """Settle every delivery: a payload of "bad" is dead-lettered again."""
    stop = threading.Event()

    def consume():
        while not stop.is_set():
            for delivery in connector.fetch_transactions(10, wait=fetch_wait):
                bad = delivery.transaction.payload == "bad"
                connector.settle([(delivery, DeadLetter("again") if bad else Ack())])

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        while thread.is_alive():
            connector.interrupt()
            thread.join(0.01)


# -- list and show ------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-08")
def test_a_list_names_each_dead_letter_and_no_payload(shop):
    result = shop.run("list")
    assert result.exit_code == 0
    head, *lines = result.stdout.splitlines()
    assert head.split() == ["entry", "failed", "at", "id", "reason", "type", "attempts", "error"]
    assert [line.split()[2:6] for line in lines] == [
        ["order-1", "declined", "order", "1"],
        ["order-2", "system", "refund", "1"],
        ["order-3", "declined", "order", "1"],
    ]
    assert "BusinessError: declined" in lines[0]
    assert "secret" not in result.output
    assert "secret-1" in shop.run("list", "--payload").stdout


@pytest.mark.spec("CNN-08")
def test_json_is_one_record_per_line_with_the_payload_only_on_request(shop):
    first, *_ = records = shop.json("list")
    assert len(records) == 3
    assert (first["envelope"]["id"], first["envelope"]["correlation"], first["entry"]) == ("order-1", "basket", "1")
    assert (first["failure"]["error_type"], first["failure"]["attempts"]) == ("BusinessError", 1)
    assert not {"payload", "raw", "headers"} & set(first)
    assert shop.json("list", "--payload")[0]["payload"] == {"card": "secret-1"}


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("--dead-letter-reason", "declined"), ["order-1", "order-3"]),
        (("--type", "refund"), ["order-2"]),
        (("--id", "order-3"), ["order-3"]),
        (("--key", "c1"), ["order-1"]),
        (("--tenant", "acme"), ["order-1"]),
        (("--correlation", "basket"), ["order-1"]),
        (("--task", "charge"), ["order-1", "order-2", "order-3"]),
        (("--task", "other"), []),
        (("--error-type", "OSError"), ["order-2"]),
        (("--category", "business"), ["order-1", "order-3"]),
        (("--since", "1h"), ["order-1", "order-2", "order-3"]),
        (("--until", "1h"), []),
        (("--since", "2001-01-01T00:00+02:00", "--until", "2002-01-01"), []),
        (("--category", "BUSINESS", "--id", "order-2"), []),
        (("--limit", "2"), ["order-1", "order-2"]),
    ],
)
def test_filters_select_dead_letters(shop, arguments, expected):
    assert [record["envelope"]["id"] for record in shop.json("list", *arguments)] == expected


def test_a_truncated_list_is_marked(shop):
    assert "there are more" in shop.run("list", "--limit", "2").stderr
    assert "there are more" not in shop.run("list", "--limit", "3").stderr


def test_an_empty_list_prints_a_message(shop):
    assert shop.run("list", "--id", "none").stdout == "orders has no dead letters that match the filters\n"
    shop.run("discard", "--all", "--yes")
    assert shop.run("list").stdout == "orders has no dead letters\n"
    assert shop.json("list") == []


def test_a_list_is_longer_than_one_page(app_folder):
    shop = register_app(MemoryConnector("orders"))
    add_dead_letters(shop.connector, *make_transactions(250))
    assert len(shop.json("list", "--limit", "1000")) == 250


def test_a_task_selects_its_connector(shop):
    assert len(shop.json("list", where="dlqapp:charge")) == 3


@pytest.mark.spec("CNN-08")
def test_show_prints_every_field_and_the_payload_only_on_request(app_folder):
    shop = register_app(MemoryConnector("orders", codec=ObjectCodec()))
    earlier = Attempt(attempt=0, category="SYSTEM", code="busy", error="no line", at=1.0)
    failure = Failure(
        task_name="charge", reason_code="x", error_type="OSError", error_message="gone", attempts=2, occurred_at=1.0,
        transaction_id="a", category="SYSTEM", trace_id="f" * 32, history=(earlier,), step="process",
    )  # fmt: skip
    shop.connector.dispatch([Transaction("secret", id="a", tenant="acme", created_at=0.0, expires_at=1e99)])
    (delivery,) = shop.connector.fetch_transactions(1)
    shop.connector.settle([(delivery, DeadLetter("x", failure))])
    output = shop.run("show", "a").stdout
    rows = dict(line.strip().split("  ", 1) for line in output.splitlines()[1:])
    assert {name: rows[name].strip() for name in ("task", "step", "category", "error", "attempts", "deliveries")} == {
        "task": "charge",
        "step": "process",
        "category": "SYSTEM",
        "error": "OSError: gone",
        "attempts": "2",
        "deliveries": "1",
    }
    assert (rows["tenant"].strip(), rows["trace"].strip(), rows["expires"].strip()) == ("acme", "f" * 32, "1e+99")
    assert rows["created"].strip() == "1970-01-01T00:00:00Z"
    assert rows["attempt 1"].strip() == "1970-01-01T00:00:01Z SYSTEM busy no line"
    assert "secret" not in output
    assert "secret" in shop.run("show", "a", "--payload").stdout
    assert [record["entry"] for record in shop.json("show", "a")] == ["1"]


def test_the_type_of_an_error_is_printed_once():
    fields = {"task_name": "charge", "reason_code": "x", "attempts": 1, "occurred_at": 1.0, "transaction_id": "a"}
    for message in ("gone", "OSError: gone"):
        failure = Failure(error_type="OSError", error_message=message, category="SYSTEM", **fields)
        assert dlq_view._format_error(failure) == "OSError: gone"


def test_show_prints_every_dead_letter_of_one_transaction(app_folder):
    shop = register_app(MemoryConnector("orders"))
    add_dead_letters(shop.connector, Transaction(id="a"), Transaction(id="a"), Transaction(id="b"))
    assert [record["entry"] for record in shop.json("show", "a")] == ["1", "2"]


def test_show_of_an_unknown_id_fails_and_names_the_list_command(shop):
    result = shop.run("show", "order-9")
    assert result.exit_code == DlqExit.FAILED
    assert "no dead letter of transaction 'order-9'" in result.stderr
    assert "ergon dlq list dlqapp:orders" in result.stderr


def test_nothing_that_a_terminal_would_obey_is_printed(app_folder):
    shop = register_app(MemoryConnector("orders", codec=ObjectCodec()))
    add_dead_letters(shop.connector, Transaction("\x1b]0;x\x07", id="a\x1b[2J\nb", type="t\r"), reason="r\x9b")
    for arguments in (["list", "--payload"], ["show", "a\x1b[2J\nb", "--payload"], ["replay", "--all", "--dry-run"]):
        output = shop.run(*arguments).output
        assert not {"\x1b", "\x07", "\r", "\x9b"} & set(output)
    assert "\\x1b" in shop.run("list").stdout


def test_on_a_terminal_a_list_is_a_table_and_a_reason_is_no_markup(shop, monkeypatch, capsys):
    add_dead_letters(shop.connector, Transaction(id="order-4"), reason="[bold]late")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(dlq_view, "Console", lambda: Console(force_terminal=True, width=150))
    dlq_view.show_list(shop.connector.dead_letters, payload=False)
    output = capsys.readouterr().out
    assert "[bold]late" in output
    assert "order-1" in output


@pytest.mark.parametrize("payload", [object(), {1: {2}}, float("nan"), {"a": float("inf")}, b"\xff", "\ud800"])
def test_a_payload_that_json_cannot_represent_is_still_shown(app_folder, payload):
    shop = register_app(MemoryConnector("orders", codec=ObjectCodec()))
    add_dead_letters(shop.connector, Transaction(payload, id="a"))
    for command in (["list"], ["show", "a"]):
        assert shop.run(*command, "--payload").exit_code == 0
        (line,) = shop.run(*command, "--payload", "--json").stdout.splitlines()
        record = json.loads(line, parse_constant=pytest.fail)
        assert {"payload", "raw", "headers", "entry"} <= set(record)


def test_a_payload_that_contains_itself_is_still_shown(app_folder):
    shop = register_app(MemoryConnector("orders", codec=ObjectCodec()))
    payload = []
    payload.append(payload)
    add_dead_letters(shop.connector, Transaction(payload, id="a"))
    assert shop.json("list", "--payload")[0]["payload"] == "[[...]]"
    assert "[[...]]" in shop.run("show", "a", "--payload").stdout


# -- replay -------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-08")
def test_a_replay_requeues_the_selected_letters_with_fresh_attempts(shop):
    result = shop.run("replay", "--dead-letter-reason", "declined")
    assert (result.exit_code, result.stdout.split()) == (0, ["orders", "replayed", "2"])
    assert shop.dead == ["order-2"]
    first, _ = shop.connector.fetch_transactions(9)
    transaction = first.transaction
    assert (transaction.id, transaction.correlation, transaction.attempts, transaction.history, first.deliveries) == (
        "order-1",
        "basket",
        0,
        (),
        1,
    )


@pytest.mark.parametrize("command", ["replay", "discard"])
def test_nothing_is_moved_without_a_filter_or_all(shop, command):
    result = shop.run(command, *(["--yes"] if command == "discard" else []))
    assert result.exit_code == DlqExit.USAGE
    assert f"this would {command} everything" in result.stderr
    assert "--all" in result.stderr
    both = shop.run(command, "--all", "--dead-letter-reason", "declined")
    assert (both.exit_code, "exclude each other" in both.stderr) == (DlqExit.USAGE, True)
    assert len(shop.dead) == 3


@pytest.mark.parametrize("command", ["replay", "discard"])
def test_a_dry_run_counts_by_reason_and_moves_nothing(shop, command):
    result = shop.run(command, "--all", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.split() == ["orders", "would", command, "3", "declined", "2", "system", "1"]
    (summary,) = shop.json(command, "--all", "--dry-run")
    assert (summary["dry_run"], summary["selected"], summary["reasons"]) == (True, 3, {"declined": 2, "system": 1})
    assert (summary["not_tried"], len(shop.dead), shop.connector.depth().ready) == (3, 3, 0)


def test_json_sums_up_in_one_line(shop):
    (summary,) = shop.json("replay", "--all")
    assert summary == {
        "queue": "orders",
        "command": "replay",
        "dry_run": False,
        "exit_code": 0,
        "selected": 3,
        "reasons": {"declined": 2, "system": 1},
        "replayed": 3,
        "gone": 0,
        "failed": 0,
        "not_tried": 0,
        "stop_reason": None,
        "failures": [],
    }


def test_a_limit_takes_the_oldest(shop):
    assert shop.json("replay", "--all", "--limit", "2", "--batch", "1")[0]["replayed"] == 2
    assert shop.dead == ["order-3"]


def test_a_replay_without_matches_succeeds(shop):
    result = shop.run("replay", "--dead-letter-reason", "other", "--canary", "3")
    assert (result.exit_code, result.stdout.split()) == (0, ["orders", "replayed", "0"])
    assert (
        "orders has no dead letter that matches all filters; to list its dead letters, run: "
        "ergon dlq list dlqapp:orders" in result.stderr
    )


class HookedConnector(MemoryConnector):
    """A queue that calls a function between two batches."""

    def __init__(self, *, between=lambda: None, at=1):
        super().__init__("orders")
        self.sizes = []
        self.between = between
        self.at = at

    def replay_dead(self, handles):
        if len(self.sizes) == self.at:
            self.between()
        self.sizes.append(len(handles))
        return super().replay_dead(handles)


def test_letters_moved_by_another_process_are_reported_and_are_no_failure(app_folder):
    shop = register_app(HookedConnector(between=lambda: shop.connector.discard_dead(["3"])))
    add_dead_letters(shop.connector, *make_transactions(4))
    result = shop.run("replay", "--all", "--batch", "2")
    assert result.exit_code == 0
    assert "replayed  3" in result.stdout
    assert "gone      1, moved by another operator" in result.stdout


def test_a_letter_that_is_dead_lettered_again_meanwhile_is_not_replayed_again(app_folder):
    shop = register_app(HookedConnector())
    add_dead_letters(shop.connector, Transaction("bad", id="a"), Transaction("bad", id="b"), Transaction("bad", id="c"))

    def dead_letter_again():
        batch = shop.connector.fetch_transactions(9)
        shop.connector.settle([(delivery, DeadLetter("again")) for delivery in batch])

    shop.connector.between = dead_letter_again
    (summary,) = shop.json("replay", "--all", "--batch", "1")
    assert (summary["selected"], summary["replayed"]) == (3, 3)
    assert shop.dead == ["a"]


@pytest.mark.spec("CNN-08")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_between_two_batches_and_a_second_run_continues(app_folder, number):
    shop = register_app(HookedConnector(between=lambda: signal.raise_signal(number)))
    add_dead_letters(shop.connector, *make_transactions(10))
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    result = shop.run("replay", "--all", "--batch", "3")
    assert result.exit_code == DlqExit.STOPPED
    assert "stopped by a signal: 6 of 10 replayed, 4 not tried; run the same command again to continue" in result.stderr
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    until = result.stderr.split("--until ")[1].split()[0]
    # With --until, new dead letters are not tried.
    batch = shop.connector.fetch_transactions(99)
    shop.connector.settle(
        [(delivery, DeadLetter("again") if delivery.transaction.id == "t-0" else Ack()) for delivery in batch]
    )
    assert shop.json("replay", "--until", until)[0]["replayed"] == 4
    assert shop.dead == ["t-0"]
    assert (
        len(
            {delivery.transaction.id for delivery in batch}
            | set(shop.connector.find_queued(f"t-{n}" for n in range(10)))
        )
        == 10
    )


def test_the_hint_about_until_is_omitted_if_until_was_set(app_folder):
    shop = register_app(HookedConnector(between=lambda: signal.raise_signal(signal.SIGINT)))
    add_dead_letters(shop.connector, *make_transactions(3))
    result = shop.run("replay", "--until", "0s", "--batch", "1")
    assert "to continue" in result.stderr
    assert "--until" not in result.stderr


def test_a_signal_before_anything_moved_moves_nothing(app_folder):
    class SignalOnListConnector(MemoryConnector):
        def list_dead(self, query, **more):
            signal.raise_signal(signal.SIGINT)
            return super().list_dead(query, **more)

    shop = register_app(SignalOnListConnector("orders"))
    add_dead_letters(shop.connector, *make_transactions(3))
    result = shop.run("replay", "--all")
    assert (result.exit_code, len(shop.dead)) == (DlqExit.STOPPED, 3)
    assert "run the same command again" in result.stderr


def raise_connection_lost():
    raise ConnectionLostError("the broker is away")


def test_a_lost_broker_stops_the_replay_and_the_progress_is_reported(app_folder):
    shop = register_app(HookedConnector(between=raise_connection_lost))
    add_dead_letters(shop.connector, *make_transactions(5))
    result = shop.run("replay", "--all", "--batch", "2", "--json")
    summary = json.loads(result.stdout)
    assert (result.exit_code, summary["exit_code"]) == (DlqExit.FAILED, 1)
    assert (summary["stop_reason"], summary["replayed"], summary["not_tried"]) == ("error", 2, 3)
    assert summary["error"] == "the broker is away"
    assert "the broker is away. 2 of 5 replayed, 3 not tried" in result.stderr
    assert "run the same command again to continue" in result.stderr


class RejectingConnector(MemoryConnector):
    def replay_dead(self, handles):
        results = super().replay_dead([handle for handle in handles if handle != "1"])
        rejected = [ReplayResult(handle, DeadLetterResult.FAILED, "too\nlarge") for handle in handles if handle == "1"]
        return [*rejected, *results]


def test_one_failed_letter_is_named_and_affects_no_other(app_folder):
    shop = register_app(RejectingConnector("orders"))
    add_dead_letters(shop.connector, *make_transactions(3))
    (summary,) = shop.json("replay", "--all")
    assert (summary["replayed"], summary["failed"], summary["exit_code"]) == (2, 1, DlqExit.FAILED)
    assert summary["failures"] == [{"entry": "1", "id": "t-0", "message": "too\nlarge"}]
    output = shop.run("replay", "--all").stdout
    assert "failed    1, still dead letters" in output
    assert "t-0       too\\nlarge" in output


def test_a_replay_of_a_log_appends_and_opens_nothing(app_folder):
    class GuardedLog(MemoryLog):
        def open(self):
            pytest.fail("opening takes the partitions over")

        def depth(self):
            pytest.fail("asking for the depth takes the partitions over")

    shop = register_app(GuardedLog("facts"))
    add_dead_letters(shop.connector, *make_transactions(3))
    (summary,) = shop.json("replay", "--all", "--canary", "1", "--canary-wait", "0s")
    assert (summary["replayed"], summary["canary"]) == (3, {"succeeded": 1, "failed": 0, "waiting": 0})
    assert [len(part) for part in shop.connector.records.partitions] == [6]


# -- the canary ---------------------------------------------------------------------------------------


def test_a_successful_canary_releases_the_rest(app_folder):
    shop = register_app(MemoryConnector("orders"))
    add_dead_letters(shop.connector, *make_transactions(6))
    with running_worker(shop.connector):
        result = shop.run("replay", "--all", "--canary", "2", "--json")
    summary = json.loads(result.stdout)
    assert (result.exit_code, summary["replayed"], summary["gone"]) == (0, 6, 0)
    assert summary["canary"] == {"succeeded": 2, "failed": 0, "waiting": 0}
    assert "waiting up to 60 s for the canary" in result.stderr


@pytest.mark.parametrize(
    "max_failed, code, replayed", [(0, DlqExit.CANARY, 3), (1, DlqExit.CANARY, 3), (2, DlqExit.OK, 6)]
)
def test_a_canary_with_too_many_failures_stops_the_rest(app_folder, max_failed, code, replayed):
    shop = register_app(MemoryConnector("orders"))
    add_dead_letters(
        shop.connector,
        Transaction("bad", id="a"),
        Transaction("good", id="b"),
        Transaction("bad", id="c"),
        *make_transactions(3),
    )
    with running_worker(shop.connector):
        result = shop.run("replay", "--all", "--canary", "3", "--max-failed", str(max_failed), "--json")
    summary = json.loads(result.stdout)
    assert (result.exit_code, summary["replayed"]) == (code, replayed)
    assert summary["canary"] == {"succeeded": 1, "failed": 2, "waiting": 0}
    if code is DlqExit.CANARY:
        assert "stopped by the canary: 3 of 6 replayed, 3 not tried" in result.stderr
        assert "List the new dead letters with: ergon dlq list dlqapp:orders; fix the cause" in result.stderr


def test_a_canary_that_does_not_end_in_time_stops_the_rest_and_the_error_suggests_a_worker(app_folder):
    shop = register_app(MemoryConnector("orders"))
    add_dead_letters(shop.connector, *make_transactions(3))
    result = shop.run("replay", "--all", "--canary", "1", "--canary-wait", "0s")
    assert result.exit_code == DlqExit.CANARY
    assert "canary     0 succeeded, 0 failed, 1 waiting" in result.stdout
    assert "1 canary transactions have not ended after 0 s; is a worker running?" in result.stderr
    assert shop.dead == ["t-1", "t-2"]


def test_a_canary_that_could_not_even_be_moved_has_failed(app_folder):
    shop = register_app(RejectingConnector("orders"))
    add_dead_letters(shop.connector, *make_transactions(3))
    result = shop.run("replay", "--all", "--canary", "1")
    assert (result.exit_code, len(shop.dead)) == (DlqExit.CANARY, 3)
    assert "1 dead letters could not be replayed: fix the reported errors" in result.stderr
    assert "new dead letters" not in result.stderr


def test_an_earlier_second_dead_letter_is_no_failure_of_the_canary(app_folder):
    shop = register_app(MemoryConnector("orders"))
    add_dead_letters(shop.connector, Transaction("good", id="a"), Transaction("good", id="a"))
    with running_worker(shop.connector):
        (summary,) = shop.json("replay", "--all", "--canary", "1")
    assert summary["canary"] == {"succeeded": 1, "failed": 0, "waiting": 0}
    assert summary["replayed"] == 2


def test_a_signal_ends_the_wait_for_the_canary(app_folder):
    class SignalOnQueuedConnector(MemoryConnector):
        def find_queued(self, ids):
            signal.raise_signal(signal.SIGINT)
            return super().find_queued(ids)

    shop = register_app(SignalOnQueuedConnector("orders"))
    add_dead_letters(shop.connector, *make_transactions(3))
    result = shop.run("replay", "--all", "--canary", "1", "--canary-wait", "3600s")
    assert result.exit_code == DlqExit.STOPPED
    assert "stopped by a signal: 1 of 3 replayed" in result.stderr


def test_a_signal_between_two_batches_of_the_canary_skips_the_wait(app_folder):
    shop = register_app(HookedConnector(between=lambda: signal.raise_signal(signal.SIGINT), at=0))
    add_dead_letters(shop.connector, *make_transactions(3))
    (summary,) = shop.json("replay", "--all", "--canary", "2", "--batch", "1", "--canary-wait", "3600s")
    assert (summary["stop_reason"], summary["replayed"], "canary" in summary) == ("signal", 1, False)


def test_a_replay_can_be_called_from_any_thread(app_folder):
    shop = register_app(MemoryConnector("orders"))
    add_dead_letters(shop.connector, *make_transactions(3))
    thread = threading.Thread(target=shop.run, args=("replay", "--all"))
    thread.start()
    thread.join()
    assert shop.dead == []


def test_a_broker_lost_during_the_canary_stops_the_replay(app_folder):
    class LostOnQueuedConnector(MemoryConnector):
        def find_queued(self, ids):
            raise_connection_lost()

    shop = register_app(LostOnQueuedConnector("orders"))
    add_dead_letters(shop.connector, *make_transactions(3))
    (summary,) = shop.json("replay", "--all", "--canary", "1")
    assert (summary["stop_reason"], summary["replayed"], summary["not_tried"]) == ("error", 1, 2)


class CountOnlyConnector(MemoryConnector):
    """A broker that knows the number of queued transactions but not their ids."""

    def find_queued(self, ids):
        return None


@pytest.mark.parametrize("payload, code", [("good", DlqExit.OK), ("bad", DlqExit.CANARY)])
def test_an_empty_queue_shows_that_the_canary_has_ended(app_folder, payload, code):
    shop = register_app(CountOnlyConnector("orders"))
    add_dead_letters(shop.connector, Transaction(payload, id="a"), Transaction("good", id="b"))
    with running_worker(shop.connector):
        result = shop.run("replay", "--all", "--canary", "1", "--canary-wait", "3600s")
    assert result.exit_code == code


# -- discard ------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-08")
def test_a_discard_deletes_only_the_selected_letters(shop):
    result = shop.run("discard", "--dead-letter-reason", "declined", "--yes")
    assert (result.exit_code, result.stdout.split()) == (0, ["orders", "discarded", "2"])
    assert (shop.dead, shop.connector.depth().ready) == (["order-2"], 0)
    (summary,) = shop.json("discard", "--all", "--yes")
    assert (summary["command"], summary["discarded"]) == ("discard", 1)


def test_a_discard_without_a_terminal_or_yes_is_rejected(shop):
    result = shop.run("discard", "--all")
    assert result.exit_code == DlqExit.USAGE
    assert "3 dead letters would be deleted permanently; check" in result.stderr
    assert "--yes" in result.stderr
    assert len(shop.dead) == 3


@pytest.mark.parametrize("answer, remaining", [("y\n", 0), ("n\n", 3)])
def test_on_a_terminal_a_discard_asks_for_confirmation(shop, monkeypatch, answer, remaining):
    monkeypatch.setattr("ergon_framework.cli.dlq_commands.is_interactive", lambda: True)
    result = shop.run("discard", "--all", input=answer)
    assert "Discard 3 dead letters of orders permanently?" in result.output
    assert result.exit_code == (DlqExit.USAGE if remaining else DlqExit.OK)
    assert len(shop.dead) == remaining


# -- general behaviour --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--since", "yesterday"), "invalid time"),
        (("--since", "9" * 400), "invalid time"),
        (("--limit", "0"), "--limit"),
        (("--category", "odd"), "--category"),
        (("--id", "x" * 1001), "id: String should have at most 1000 characters"),
    ],
)
def test_an_invalid_option_is_a_usage_error_that_names_it(shop, arguments, message):
    result = shop.run("list", *arguments)
    assert result.exit_code == DlqExit.USAGE
    assert message in result.stderr


@pytest.mark.parametrize("text", ["fast", "0", "0/s", "5/d", "-1", "1e400", ""])
def test_a_wrong_rate_is_a_usage_error(shop, text):
    result = shop.run("replay", "--all", "--rate", text)
    assert result.exit_code == DlqExit.USAGE
    assert "invalid rate" in result.stderr
    assert len(shop.dead) == 3


@pytest.mark.parametrize(
    "where, message",
    [
        ("dlqapp:order", "did you mean 'orders'?"),
        ("dlqapp:zzz", "its connectors and tasks are: orders, charge"),
        ("dlqapp:number", "is not a connector but a int; name a connector, or a task that has one"),
        ("dlqapp:MemoryConnector", "create an instance of it"),
        ("dlqapp", "write MODULE:CONNECTOR, for example app:orders"),
    ],
)
def test_an_object_that_is_not_a_connector_is_rejected_with_a_remedy(shop, where, message):
    result = shop.run("list", where=where)
    assert result.exit_code == DlqExit.USAGE
    assert message in result.stderr


def test_a_module_without_a_connector_or_task_is_reported(app_folder):
    (app_folder / "dlqapp.py").write_text("", encoding="utf-8")
    result = Shop(None).run("list")
    assert "it has neither a connector nor a task" in result.stderr


def test_an_id_that_is_too_long_is_rejected(shop):
    result = shop.run("show", "x" * 2000)
    assert (result.exit_code, "at most 1000 characters" in result.stderr) == (DlqExit.USAGE, True)


def test_a_broker_that_does_not_answer_is_reported(app_folder):
    class LostOnListConnector(MemoryConnector):
        def list_dead(self, query, **more):
            raise_connection_lost()

    shop = register_app(LostOnListConnector("orders"))
    result = shop.run("list")
    assert result.exit_code == DlqExit.FAILED
    assert result.stderr == "ergon: the broker is away -- to find its setting and the remedy, run: ergon doctor\n"


@pytest.mark.parametrize("command", ["list", "show", "replay", "discard"])
def test_every_command_has_help_with_an_example_and_its_exit_codes(command):
    output = " ".join(CliRunner().invoke(app, ["dlq", command, "--help"]).stdout.split())
    assert f"Example: ergon dlq {command} app:orders" in output
    assert "Exit codes: 0 " in output
    assert "dlq" in CliRunner().invoke(app, ["--help"]).stdout


def test_the_connector_is_opened_and_closed(app_folder):
    steps = []

    class RecordingConnector(MemoryConnector):
        def open(self):
            steps.append("open")

        def close(self):
            steps.append("close")

        def list_dead(self, query, **more):
            assert query == DeadLetterQuery()
            steps.append("list")
            return super().list_dead(query, **more)

    register_app(RecordingConnector("orders")).run("list")
    assert steps == ["open", "list", "close"]
