"""``ergon dlq`` from the outside: what it prints, what it moves, how it exits."""

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
from ergon_framework.cli.dlq_exits import DlqExit
from ergon_framework.connectors.base import Ack, DeadLetter
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery, ReplayResult
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.connectors.memory_log import MemoryLog
from ergon_framework.errors import ConnectionLost
from ergon_framework.failure import Attempt, Failure
from ergon_framework.transaction import Transaction

APP = """
from ergon_framework import BusinessError, MemoryConnector, Transaction, consumer

orders = MemoryConnector("orders")
orders.dispatch([
    Transaction("order-1", {"card": "secret-1"}, type="order", tenant="acme", correlation="basket", key="c1"),
    Transaction("order-2", {"card": "secret-2"}, type="refund"),
    Transaction("order-3", {"card": "secret-3"}, type="order"),
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

    def run(self, command, *words, where="dlqapp:orders", **more):
        return CliRunner().invoke(app, ["dlq", command, where, *words], **more)

    def json(self, command, *words, **more):
        return [json.loads(line) for line in self.run(command, *words, "--json", **more).stdout.splitlines()]

    @property
    def dead(self):
        return [record.id for record in self.connector.dead_letters]


def put_in_place(connector):
    module = type(sys)("dlqapp")
    module.orders = connector
    sys.modules["dlqapp"] = module
    return Shop(connector)


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("dlqapp", None)


@pytest.fixture
def shop(at_home):
    (at_home / "dlqapp.py").write_text(APP, encoding="utf-8")
    sys.path.insert(0, str(at_home))
    module = importlib.import_module("dlqapp")
    # One at a time, so that they die in the order in which they came.
    policy = {"loop": {"concurrency": {"value": 1}}, "steps": {"process": {"retry": {"max_attempts": 1}}}}
    module.charge.run(ConsumerPolicy.load(policy))
    return Shop(module.orders)


def bury(connector, *transactions, reason="bad"):
    connector.dispatch(transactions)
    connector.settle([(one, DeadLetter(reason)) for one in connector.fetch_transactions(len(transactions))])


def many(count):
    return [Transaction(f"t-{number}", "good") for number in range(count)]


@contextmanager
def worker(connector, *, until=10.0):
    """Settles whatever comes: a payload of "bad" is dead again."""
    over = threading.Event()

    def work():
        while not over.is_set():
            for delivery in connector.fetch_transactions(10, wait=until):
                bad = delivery.transaction.payload == "bad"
                connector.settle([(delivery, DeadLetter("again") if bad else Ack())])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        while thread.is_alive():
            connector.interrupt()
            thread.join(0.01)


# -- list and show ------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-08")
def test_a_list_names_each_dead_letter_and_no_payload(shop):
    done = shop.run("list")
    assert done.exit_code == 0
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["place", "died", "id", "reason", "type", "attempts", "error"]
    assert [line.split()[2:6] for line in lines] == [
        ["order-1", "declined", "order", "1"],
        ["order-2", "system", "refund", "1"],
        ["order-3", "declined", "order", "1"],
    ]
    assert "BusinessError: declined" in lines[0]
    assert "secret" not in done.output
    assert "secret-1" in shop.run("list", "--payload").stdout


@pytest.mark.spec("CNN-08")
def test_json_is_one_record_per_line_with_its_payload_only_if_asked(shop):
    first, *_ = records = shop.json("list")
    assert len(records) == 3
    assert (first["envelope"]["id"], first["envelope"]["correlation"], first["place"]) == ("order-1", "basket", "1")
    assert (first["failure"]["error_type"], first["failure"]["attempts"]) == ("BusinessError", 1)
    assert not {"payload", "raw", "headers"} & set(first)
    assert shop.json("list", "--payload")[0]["payload"] == {"card": "secret-1"}


@pytest.mark.parametrize(
    "words, found",
    [
        (("--reason", "declined"), ["order-1", "order-3"]),
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
def test_filters_choose(shop, words, found):
    assert [record["envelope"]["id"] for record in shop.json("list", *words)] == found


def test_a_list_that_ends_early_says_so(shop):
    assert "there are more" in shop.run("list", "--limit", "2").stderr
    assert "there are more" not in shop.run("list", "--limit", "3").stderr


def test_an_empty_list_says_so(shop):
    assert shop.run("list", "--id", "none").stdout == "orders has no dead letters of that kind\n"
    shop.run("discard", "--all", "--yes")
    assert shop.run("list").stdout == "orders has no dead letters\n"
    assert shop.json("list") == []


def test_a_list_is_longer_than_one_page(at_home):
    shop = put_in_place(MemoryConnector("orders"))
    bury(shop.connector, *many(250))
    assert len(shop.json("list", "--limit", "1000")) == 250


def test_a_task_stands_for_its_connector(shop):
    assert len(shop.json("list", where="dlqapp:charge")) == 3


@pytest.mark.spec("CNN-08")
def test_show_tells_everything_about_one_and_its_payload_only_if_asked(at_home):
    shop = put_in_place(MemoryConnector("orders"))
    past = Attempt(attempt=0, category="SYSTEM", code="busy", error="no line", at=1.0)
    failure = Failure(
        task_name="charge", reason_code="x", error_type="OSError", error_message="gone", attempts=2, occurred_at=1.0,
        transaction_id="a", category="SYSTEM", trace_id="f" * 32, history=(past,), step="process",
    )  # fmt: skip
    shop.connector.dispatch([Transaction("a", "secret", tenant="acme", created_at=0.0, expires_at=1e99)])
    (delivery,) = shop.connector.fetch_transactions(1)
    shop.connector.settle([(delivery, DeadLetter("x", failure))])
    shown = shop.run("show", "a").stdout
    rows = dict(line.strip().split("  ", 1) for line in shown.splitlines()[1:])
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
    assert "secret" not in shown
    assert "secret" in shop.run("show", "a", "--payload").stdout
    assert [record["place"] for record in shop.json("show", "a")] == ["1"]


def test_the_type_of_an_error_is_told_once():
    said = {"task_name": "charge", "reason_code": "x", "attempts": 1, "occurred_at": 1.0, "transaction_id": "a"}
    for message in ("gone", "OSError: gone"):
        failure = Failure(error_type="OSError", error_message=message, category="SYSTEM", **said)
        assert dlq_view._error(failure) == "OSError: gone"


def test_show_shows_each_of_a_transaction_that_is_dead_twice(at_home):
    shop = put_in_place(MemoryConnector("orders"))
    bury(shop.connector, Transaction("a"), Transaction("a"), Transaction("b"))
    assert [record["place"] for record in shop.json("show", "a")] == ["1", "2"]


def test_showing_what_is_not_there_fails_and_says_where_to_look(shop):
    done = shop.run("show", "order-9")
    assert done.exit_code == DlqExit.FAILED
    assert "no dead letter of transaction 'order-9'" in done.stderr
    assert "ergon dlq list dlqapp:orders" in done.stderr


def test_nothing_that_a_terminal_would_obey_is_printed(at_home):
    shop = put_in_place(MemoryConnector("orders"))
    bury(shop.connector, Transaction("a\x1b[2J\nb", "\x1b]0;x\x07", type="t\r"), reason="r\x9b")
    for words in (["list", "--payload"], ["show", "a\x1b[2J\nb", "--payload"], ["replay", "--all", "--dry-run"]):
        shown = shop.run(*words).output
        assert not {"\x1b", "\x07", "\r", "\x9b"} & set(shown)
    assert "\\x1b" in shop.run("list").stdout


def test_on_a_terminal_a_list_is_a_table_and_a_reason_is_no_markup(shop, monkeypatch, capsys):
    bury(shop.connector, Transaction("order-4"), reason="[bold]late")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(dlq_view, "Console", lambda: Console(force_terminal=True, width=150))
    dlq_view.show_list(shop.connector.dead_letters, payload=False)
    shown = capsys.readouterr().out
    assert "[bold]late" in shown
    assert "order-1" in shown


@pytest.mark.parametrize("payload", [object(), {1: {2}}, float("nan"), {"a": float("inf")}, b"\xff", "\ud800"])
def test_a_payload_that_json_has_no_words_for_is_shown_all_the_same(at_home, payload):
    shop = put_in_place(MemoryConnector("orders"))
    bury(shop.connector, Transaction("a", payload))
    for command in (["list"], ["show", "a"]):
        assert shop.run(*command, "--payload").exit_code == 0
        (line,) = shop.run(*command, "--payload", "--json").stdout.splitlines()
        record = json.loads(line, parse_constant=pytest.fail)
        assert {"payload", "raw", "headers", "place"} <= set(record)


def test_a_payload_that_contains_itself_is_shown_all_the_same(at_home):
    shop = put_in_place(MemoryConnector("orders"))
    payload = []
    payload.append(payload)
    bury(shop.connector, Transaction("a", payload))
    assert shop.json("list", "--payload")[0]["payload"] == "[[...]]"
    assert "[[...]]" in shop.run("show", "a", "--payload").stdout


# -- replay -------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-08")
def test_a_replay_puts_back_what_the_filters_choose_with_fresh_attempts(shop):
    done = shop.run("replay", "--reason", "declined")
    assert (done.exit_code, done.stdout.split()) == (0, ["orders", "replayed", "2"])
    assert shop.dead == ["order-2"]
    first, _ = shop.connector.fetch_transactions(9)
    got = first.transaction
    assert (got.id, got.correlation, got.attempts, got.history, first.deliveries) == ("order-1", "basket", 0, (), 1)


@pytest.mark.parametrize("command", ["replay", "discard"])
def test_nothing_is_moved_without_a_filter_or_all(shop, command):
    done = shop.run(command, *(["--yes"] if command == "discard" else []))
    assert done.exit_code == DlqExit.USAGE
    assert f"this would {command} everything" in done.stderr
    assert "--all" in done.stderr
    both = shop.run(command, "--all", "--reason", "declined")
    assert (both.exit_code, "exclude each other" in both.stderr) == (DlqExit.USAGE, True)
    assert len(shop.dead) == 3


@pytest.mark.parametrize("command", ["replay", "discard"])
def test_a_dry_run_counts_by_reason_and_moves_nothing(shop, command):
    done = shop.run(command, "--all", "--dry-run")
    assert done.exit_code == 0
    assert done.stdout.split() == ["orders", "would", command, "3", "declined", "2", "system", "1"]
    (told,) = shop.json(command, "--all", "--dry-run")
    assert (told["dry_run"], told["chosen"], told["reasons"]) == (True, 3, {"declined": 2, "system": 1})
    assert (told["left"], len(shop.dead), shop.connector.depth().ready) == (3, 3, 0)


def test_json_sums_up_in_one_line(shop):
    (told,) = shop.json("replay", "--all")
    assert told == {
        "queue": "orders",
        "command": "replay",
        "dry_run": False,
        "exit_code": 0,
        "chosen": 3,
        "reasons": {"declined": 2, "system": 1},
        "replayed": 3,
        "gone": 0,
        "failed": 0,
        "left": 0,
        "stopped": None,
        "failures": [],
    }


def test_a_limit_takes_the_oldest(shop):
    assert shop.json("replay", "--all", "--limit", "2", "--batch", "1")[0]["replayed"] == 2
    assert shop.dead == ["order-3"]


def test_with_nothing_to_do_all_is_well(shop):
    done = shop.run("replay", "--reason", "other", "--canary", "3")
    assert (done.exit_code, done.stdout.split()) == (0, ["orders", "replayed", "0"])
    assert "orders has no dead letter that fits all filters; those it has are listed by ergon dlq list" in done.stderr


class Odd(MemoryConnector):
    """Does something between two parts."""

    def __init__(self, *, between=lambda: None, at=1):
        super().__init__("orders")
        self.sizes = []
        self.between = between
        self.at = at

    def replay_dead(self, places):
        if len(self.sizes) == self.at:
            self.between()
        self.sizes.append(len(places))
        return super().replay_dead(places)


def test_what_somebody_else_moved_is_told_and_is_no_failure(at_home):
    shop = put_in_place(Odd(between=lambda: shop.connector.discard_dead(["3"])))
    bury(shop.connector, *many(4))
    done = shop.run("replay", "--all", "--batch", "2")
    assert done.exit_code == 0
    assert "replayed  3" in done.stdout
    assert "gone      1, moved by somebody else" in done.stdout


def test_what_dies_again_meanwhile_is_not_replayed_again(at_home):
    shop = put_in_place(Odd())
    bury(shop.connector, Transaction("a", "bad"), Transaction("b", "bad"), Transaction("c", "bad"))

    def die():
        batch = shop.connector.fetch_transactions(9)
        shop.connector.settle([(one, DeadLetter("again")) for one in batch])

    shop.connector.between = die
    (told,) = shop.json("replay", "--all", "--batch", "1")
    assert (told["chosen"], told["replayed"]) == (3, 3)
    assert shop.dead == ["a"]


@pytest.mark.spec("CNN-08")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_between_two_parts_and_a_second_run_goes_on(at_home, number):
    shop = put_in_place(Odd(between=lambda: signal.raise_signal(number)))
    bury(shop.connector, *many(10))
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    done = shop.run("replay", "--all", "--batch", "3")
    assert done.exit_code == DlqExit.STOPPED
    assert "stopped by a signal: 6 of 10 replayed, 4 not touched; run the same command again to go on" in done.stderr
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    until = done.stderr.split("--until ")[1].split()[0]
    # What has died again since is left alone with --until.
    batch = shop.connector.fetch_transactions(99)
    shop.connector.settle([(one, DeadLetter("again") if one.transaction.id == "t-0" else Ack()) for one in batch])
    assert shop.json("replay", "--until", until)[0]["replayed"] == 4
    assert shop.dead == ["t-0"]
    assert len({one.transaction.id for one in batch} | set(shop.connector.queued(f"t-{n}" for n in range(10)))) == 10


def test_the_hint_about_until_is_not_given_to_who_gave_one(at_home):
    shop = put_in_place(Odd(between=lambda: signal.raise_signal(signal.SIGINT)))
    bury(shop.connector, *many(3))
    done = shop.run("replay", "--until", "0s", "--batch", "1")
    assert "to go on" in done.stderr
    assert "--until" not in done.stderr


def test_a_signal_before_anything_moved_moves_nothing(at_home):
    class Early(MemoryConnector):
        def list_dead(self, query, **more):
            signal.raise_signal(signal.SIGINT)
            return super().list_dead(query, **more)

    shop = put_in_place(Early("orders"))
    bury(shop.connector, *many(3))
    done = shop.run("replay", "--all")
    assert (done.exit_code, len(shop.dead)) == (DlqExit.STOPPED, 3)
    assert "run the same command again" in done.stderr


def lose():
    raise ConnectionLost("the broker is away")


def test_a_broker_that_goes_away_stops_it_and_it_says_how_far_it_got(at_home):
    shop = put_in_place(Odd(between=lose))
    bury(shop.connector, *many(5))
    done = shop.run("replay", "--all", "--batch", "2", "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["exit_code"]) == (DlqExit.FAILED, 1)
    assert (told["stopped"], told["replayed"], told["left"]) == ("error", 2, 3)
    assert told["error"] == "the broker is away"
    assert "the broker is away. 2 of 5 replayed, 3 not touched" in done.stderr
    assert "run the same command again to go on" in done.stderr


class Refusing(MemoryConnector):
    def replay_dead(self, places):
        results = super().replay_dead([place for place in places if place != "1"])
        refused = [ReplayResult(place, Became.FAILED, "too\nlarge") for place in places if place == "1"]
        return [*refused, *results]


def test_one_that_fails_spoils_no_other_and_is_named(at_home):
    shop = put_in_place(Refusing("orders"))
    bury(shop.connector, *many(3))
    (told,) = shop.json("replay", "--all")
    assert (told["replayed"], told["failed"], told["exit_code"]) == (2, 1, DlqExit.FAILED)
    assert told["failures"] == [{"place": "1", "id": "t-0", "words": "too\nlarge"}]
    shown = shop.run("replay", "--all").stdout
    assert "failed    1, still dead letters" in shown
    assert "t-0       too\\nlarge" in shown


def test_a_replay_of_a_log_appends_and_opens_nothing(at_home):
    class Watched(MemoryLog):
        def open(self):
            pytest.fail("opening takes the partitions over")

        def depth(self):
            pytest.fail("asking for the depth takes the partitions over")

    shop = put_in_place(Watched("facts"))
    bury(shop.connector, *many(3))
    (told,) = shop.json("replay", "--all", "--canary", "1", "--canary-wait", "0")
    assert (told["replayed"], told["canary"]) == (3, {"succeeded": 1, "failed": 0, "waiting": 0})
    assert [len(part) for part in shop.connector.records.partitions] == [6]


# -- the canary ---------------------------------------------------------------------------------------


def test_a_canary_that_ends_well_lets_the_rest_go(at_home):
    shop = put_in_place(MemoryConnector("orders"))
    bury(shop.connector, *many(6))
    with worker(shop.connector):
        done = shop.run("replay", "--all", "--canary", "2", "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["replayed"], told["gone"]) == (0, 6, 0)
    assert told["canary"] == {"succeeded": 2, "failed": 0, "waiting": 0}
    assert "waiting for the canary" in done.stderr


@pytest.mark.parametrize("most, code, replayed", [(0, DlqExit.CANARY, 3), (1, DlqExit.CANARY, 3), (2, DlqExit.OK, 6)])
def test_a_canary_with_too_many_failures_stops_the_rest(at_home, most, code, replayed):
    shop = put_in_place(MemoryConnector("orders"))
    bury(shop.connector, Transaction("a", "bad"), Transaction("b", "good"), Transaction("c", "bad"), *many(3))
    with worker(shop.connector):
        done = shop.run("replay", "--all", "--canary", "3", "--max-failed", str(most), "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["replayed"]) == (code, replayed)
    assert told["canary"] == {"succeeded": 1, "failed": 2, "waiting": 0}
    if code is DlqExit.CANARY:
        assert "stopped by the canary: 3 of 6 replayed, 3 not touched" in done.stderr
        assert "mend the cause" in done.stderr


def test_a_canary_that_does_not_end_in_time_stops_the_rest_and_asks_for_a_worker(at_home):
    shop = put_in_place(MemoryConnector("orders"))
    bury(shop.connector, *many(3))
    done = shop.run("replay", "--all", "--canary", "1", "--canary-wait", "0")
    assert done.exit_code == DlqExit.CANARY
    assert "canary       0 succeeded, 0 failed, 1 have not ended" in done.stdout
    assert "1 of the canary have not ended in 0 s; is a worker running?" in done.stderr
    assert shop.dead == ["t-1", "t-2"]


def test_a_canary_that_could_not_even_be_moved_has_failed(at_home):
    shop = put_in_place(Refusing("orders"))
    bury(shop.connector, *many(3))
    done = shop.run("replay", "--all", "--canary", "1")
    assert (done.exit_code, len(shop.dead)) == (DlqExit.CANARY, 3)


def test_who_was_dead_twice_before_is_not_taken_for_dead_again(at_home):
    shop = put_in_place(MemoryConnector("orders"))
    bury(shop.connector, Transaction("a", "good"), Transaction("a", "good"))
    with worker(shop.connector):
        (told,) = shop.json("replay", "--all", "--canary", "1")
    assert told["canary"] == {"succeeded": 1, "failed": 0, "waiting": 0}
    assert told["replayed"] == 2


def test_a_signal_ends_the_wait_for_the_canary(at_home):
    class Interrupted(MemoryConnector):
        def queued(self, ids):
            signal.raise_signal(signal.SIGINT)
            return super().queued(ids)

    shop = put_in_place(Interrupted("orders"))
    bury(shop.connector, *many(3))
    done = shop.run("replay", "--all", "--canary", "1", "--canary-wait", "3600")
    assert done.exit_code == DlqExit.STOPPED
    assert "stopped by a signal: 1 of 3 replayed" in done.stderr


def test_a_signal_between_two_parts_of_the_canary_watches_nobody(at_home):
    shop = put_in_place(Odd(between=lambda: signal.raise_signal(signal.SIGINT), at=0))
    bury(shop.connector, *many(3))
    (told,) = shop.json("replay", "--all", "--canary", "2", "--batch", "1", "--canary-wait", "3600")
    assert (told["stopped"], told["replayed"], "canary" in told) == ("signal", 1, False)


def test_a_program_may_call_it_from_any_thread(at_home):
    shop = put_in_place(MemoryConnector("orders"))
    bury(shop.connector, *many(3))
    thread = threading.Thread(target=shop.run, args=("replay", "--all"))
    thread.start()
    thread.join()
    assert shop.dead == []


def test_a_broker_that_goes_away_during_the_canary_stops_it(at_home):
    class Away(MemoryConnector):
        def queued(self, ids):
            lose()

    shop = put_in_place(Away("orders"))
    bury(shop.connector, *many(3))
    (told,) = shop.json("replay", "--all", "--canary", "1")
    assert (told["stopped"], told["replayed"], told["left"]) == ("error", 1, 2)


class Silent(MemoryConnector):
    """A broker that cannot say who is in the queue, but how many."""

    def queued(self, ids):
        return None


@pytest.mark.parametrize("payload, code", [("good", DlqExit.OK), ("bad", DlqExit.CANARY)])
def test_an_empty_queue_tells_that_the_canary_has_ended(at_home, payload, code):
    shop = put_in_place(Silent("orders"))
    bury(shop.connector, Transaction("a", payload), Transaction("b", "good"))
    with worker(shop.connector):
        done = shop.run("replay", "--all", "--canary", "1", "--canary-wait", "3600")
    assert done.exit_code == code


# -- discard ------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-08")
def test_a_discard_throws_away_what_the_filters_choose(shop):
    done = shop.run("discard", "--reason", "declined", "--yes")
    assert (done.exit_code, done.stdout.split()) == (0, ["orders", "discarded", "2"])
    assert (shop.dead, shop.connector.depth().ready) == (["order-2"], 0)
    (told,) = shop.json("discard", "--all", "--yes")
    assert (told["command"], told["discarded"]) == ("discard", 1)


def test_a_discard_that_nobody_can_confirm_is_refused(shop):
    done = shop.run("discard", "--all")
    assert done.exit_code == DlqExit.USAGE
    assert "3 dead letters would be gone for good" in done.stderr
    assert "--yes" in done.stderr
    assert len(shop.dead) == 3


@pytest.mark.parametrize("answer, left", [("y\n", 0), ("n\n", 3)])
def test_on_a_terminal_a_discard_asks(shop, monkeypatch, answer, left):
    monkeypatch.setattr("ergon_framework.cli.dlq_work.terminal", lambda: True)
    done = shop.run("discard", "--all", input=answer)
    assert "Discard 3 dead letters of orders for good?" in done.output
    assert done.exit_code == (DlqExit.USAGE if left else DlqExit.OK)
    assert len(shop.dead) == left


# -- around it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, said",
    [
        (("--since", "yesterday"), "no time"),
        (("--since", "9" * 400), "no time"),
        (("--limit", "0"), "--limit"),
        (("--category", "odd"), "--category"),
        (("--id", "x" * 1001), "id: String should have at most 1000 characters"),
    ],
)
def test_a_wrong_option_is_a_usage_error_that_says_so(shop, words, said):
    done = shop.run("list", *words)
    assert done.exit_code == DlqExit.USAGE
    assert said in done.stderr


@pytest.mark.parametrize("text", ["fast", "0", "0/s", "5/d", "-1", "1e400", ""])
def test_a_wrong_rate_is_a_usage_error(shop, text):
    done = shop.run("replay", "--all", "--rate", text)
    assert done.exit_code == DlqExit.USAGE
    assert "no rate" in done.stderr
    assert len(shop.dead) == 3


@pytest.mark.parametrize(
    "where, said",
    [
        ("dlqapp:order", "did you mean 'orders'?"),
        ("dlqapp:zzz", "its connectors and tasks are: orders, charge"),
        ("dlqapp:number", "is no connector but a int; name a connector, or a task that has one"),
        ("dlqapp:MemoryConnector", "make an instance of it"),
        ("dlqapp", "write MODULE:CONNECTOR, for example app:orders"),
    ],
)
def test_what_is_no_connector_is_refused_with_the_way_out(shop, where, said):
    done = shop.run("list", where=where)
    assert done.exit_code == DlqExit.USAGE
    assert said in done.stderr


def test_a_module_without_any_says_so(at_home):
    (at_home / "dlqapp.py").write_text("", encoding="utf-8")
    done = Shop(None).run("list")
    assert "it holds neither a connector nor a task" in done.stderr


def test_an_id_that_is_too_long_is_refused(shop):
    done = shop.run("show", "x" * 2000)
    assert (done.exit_code, "at most 1000 characters" in done.stderr) == (DlqExit.USAGE, True)


def test_a_broker_that_does_not_answer_is_told(at_home):
    class Away(MemoryConnector):
        def list_dead(self, query, **more):
            lose()

    shop = put_in_place(Away("orders"))
    done = shop.run("list")
    assert done.exit_code == DlqExit.FAILED
    assert done.stderr == "ergon: the broker is away -- to see which setting names it, and what to do: ergon doctor\n"


@pytest.mark.parametrize("command", ["list", "show", "replay", "discard"])
def test_every_command_has_help_with_an_example_and_its_exit_codes(command):
    shown = " ".join(CliRunner().invoke(app, ["dlq", command, "--help"]).stdout.split())
    assert f"Example: ergon dlq {command} app:orders" in shown
    assert "Exit codes: 0 " in shown
    assert "dlq" in CliRunner().invoke(app, ["--help"]).stdout


def test_the_connector_is_opened_and_closed(at_home):
    steps = []

    class Watched(MemoryConnector):
        def open(self):
            steps.append("open")

        def close(self):
            steps.append("close")

        def list_dead(self, query, **more):
            assert query == DeadLetterQuery()
            steps.append("list")
            return super().list_dead(query, **more)

    put_in_place(Watched("orders")).run("list")
    assert steps == ["open", "list", "close"]
