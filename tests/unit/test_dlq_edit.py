"""``ergon dlq edit``: one payload corrected and replayed under its id, and who did what travels with it."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.cli.dlq_change import differences
from ergon_framework.cli.dlq_exits import DlqExit
from ergon_framework.connectors.base import Connector, DeadLetter
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery, ReplayResult
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.failure import EDITED, Attempt, latest
from ergon_framework.history import tried
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.transaction import Transaction

APP = """
from pydantic import BaseModel
from ergon_framework import BusinessError, MemoryConnector, consumer
from ergon_framework.connectors.memory_log import MemoryLog

class Order(BaseModel):
    total: int
    customer: dict
    token: str = ""

orders = MemoryConnector("orders")
log = MemoryLog("log")

@consumer(orders, payload=Order)
def charge(order):
    if order.total > 100:
        raise BusinessError(f"too much for {order.customer['name']}")
"""
PAYLOAD = {"total": 450, "customer": {"name": "Ada", "zip": [1, 2]}, "token": "open-sesame"}


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """The module, with one dead letter."""
    (tmp_path / "editapp.py").write_text(APP, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("EDITOR", "VISUAL"):
        monkeypatch.delenv(name, raising=False)
    import editapp  # noqa: PLC0415 - written above

    editapp.orders.dispatch([Transaction("order-1", PAYLOAD, correlation="basket", key="ada", tenant="acme")])
    editapp.charge.run(ConsumerPolicy())
    yield editapp
    sys.modules.pop("editapp")


def edit(*words, code=DlqExit.OK, where="editapp:charge", name="order-1"):
    done = CliRunner().invoke(app, ["dlq", "edit", where, name, *words])
    assert done.exit_code == code, done.output
    return done


def dead(connector):
    return connector.list_dead(DeadLetterQuery())


def only(connector):
    [delivery] = connector.fetch_transactions(9)
    return delivery


def test_the_corrected_payload_is_replayed_under_the_same_id_and_says_who_changed_what(shop):
    told = json.loads(edit("--set", "total=45", "--actor", "kim", "--json").stdout)
    assert (told["id"], told["changed"], told["by"], told["replayed"]) == ("order-1", ["total"], "kim", True)
    assert dead(shop.orders) == []
    delivery = only(shop.orders)
    got = delivery.transaction
    assert (got.id, got.source, got.correlation, got.key, got.tenant) == ("order-1", "orders", "basket", "ada", "acme")
    assert got.payload == PAYLOAD | {"total": 45}
    assert (got.attempts, delivery.deliveries) == (0, 1)
    [note] = got.history
    assert (note.code, note.error) == (EDITED, "by kim: total")
    assert note.at > 1_700_000_000


@pytest.mark.spec("DX-45")
def test_the_environment_names_who_acts(shop, monkeypatch):
    monkeypatch.setenv("ERGON_ACTOR", "lee")
    assert json.loads(edit("--set", "total=45", "--json").stdout)["by"] == "lee"


def test_the_difference_is_in_the_history_of_a_letter_that_dies_again(shop):
    edit("--set", "total=200", "--actor", "kim")
    shop.charge.run(ConsumerPolicy())
    edit("--set", "total=300", "--actor", "lee", "--values")
    shop.charge.run(ConsumerPolicy())
    [record] = dead(shop.orders)
    notes = [past.error for past in record.failure.history if past.code == EDITED]
    assert notes == ["by kim: total", "by lee: total: 200 -> 300"]
    shown = CliRunner().invoke(app, ["dlq", "show", "editapp:orders", "order-1"]).stdout
    assert "by lee: total: 200 -> 300" in shown
    events = [(event.what, event.verdict) for event in tried(record.failure.history)]
    assert events == [("edited", ""), ("edited", ""), ("attempt 1", "BUSINESS")]


def test_attempts_do_not_crowd_a_correction_out():
    note = Attempt(attempt=0, category="BUSINESS", code=EDITED, error="by kim: total")
    tries = tuple(Attempt(attempt=number, category="SYSTEM", error=str(number)) for number in range(20))
    kept = latest((note, *tries), 10)
    assert [past.error for past in kept] == ["by kim: total", *(str(number) for number in range(11, 20))]
    assert latest(tries, 10) == tries[-10:]


@pytest.mark.parametrize(
    "setting, payload",
    [
        ("customer.zip.1=7", {"customer": {"name": "Ada", "zip": [1, 7]}}),
        ("/customer/zip/1=7", {"customer": {"name": "Ada", "zip": [1, 7]}}),
        ('customer={"name": "Bob"}', {"customer": {"name": "Bob"}}),
        ("token=NaN", {"token": "NaN"}),
        (f"token={'[' * 100_000}", {"token": "[" * 100_000}),
    ],
    ids=["dots", "pointer", "object", "no number", "too deep"],
)
def test_a_value_is_set_by_its_path_as_json_or_as_text(shop, setting, payload):
    edit("--set", "total=1", "--set", setting)
    assert only(shop.orders).transaction.payload == PAYLOAD | {"total": 1} | payload


@pytest.mark.spec("DX-42")
def test_a_json_pointer_names_the_value_that_it_names_everywhere(shop):
    edit("--set", "/total=1")
    assert only(shop.orders).transaction.payload == PAYLOAD | {"total": 1}


@pytest.mark.spec("DX-42")
@pytest.mark.parametrize("path", ["/customer/a~1b~0c", "customer.a/b~c"])
def test_a_new_key_needs_a_flag(shop, path):
    refused = edit("--set", f"{path}=x", code=DlqExit.USAGE).stderr
    assert "the payload has no 'a/b~c'" in refused
    assert "to add a key use --new-keys" in refused
    assert len(dead(shop.orders)) == 1
    edit("--set", f"{path}=x", "--new-keys")
    assert only(shop.orders).transaction.payload["customer"]["a/b~c"] == "x"


@pytest.mark.parametrize(
    "words, said",
    [
        (["--set", "total"], "sets nothing"),
        (["--set", "totl=1"], "the nearest is 'total'; to add a key use --new-keys"),
        (["--set", "customer.zip.9=1"], "has no '9' at 'customer.zip.9': there is a list of 2"),
        (["--set", "address.zip=1"], "has no 'address'"),
        (["--set", "total.net=1"], "there is a plain value"),
        (["--set", "total=450"], "nothing was changed"),
        (["--set", "total=much"], "total: Input should be a valid integer"),
        (["--set", "total=1", "--file", "new.json"], "exclude each other"),
        (["--file", "new.json"], "cannot be read"),
        ([], "set EDITOR"),
    ],
)
def test_what_is_no_correction_changes_nothing(shop, words, said):
    done = edit(*words, code=DlqExit.USAGE)
    assert said in done.stderr
    assert "open-sesame" not in done.output
    assert len(dead(shop.orders)) == 1
    assert shop.orders.depth().ready == 0


def test_a_file_replaces_the_whole_payload(shop):
    Path("new.json").write_text(json.dumps({"total": 3, "customer": {"name": "Bob"}}), encoding="utf-8")
    done = edit("--file", "new.json", "--values")
    assert only(shop.orders).transaction.payload == {"total": 3, "customer": {"name": "Bob"}}
    assert 'customer.name: "Ada" -> "Bob"' in done.stdout
    # What is named like a secret is not kept, whoever asks for values.
    assert "open-sesame" not in done.stdout


def test_an_editor_is_given_the_payload_in_a_file_that_nobody_else_may_read(shop, monkeypatch):
    Path("editor.py").write_text(
        "import json, os, sys\n"
        "print(oct(os.stat(sys.argv[1]).st_mode), sys.argv[1], file=open('seen', 'w'))\n"
        "payload = json.load(open(sys.argv[1]))\n"
        "payload['total'] = 7\n"
        "json.dump(payload, open(sys.argv[1], 'w'))\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("EDITOR", f"{sys.executable} editor.py")
    edit()
    assert only(shop.orders).transaction.payload["total"] == 7
    mode, name = Path("seen").read_text(encoding="utf-8").split()
    assert stat.S_IMODE(int(mode, 8)) == 0o600
    assert not Path(name).exists()


def test_an_editor_that_fails_changes_nothing(shop, monkeypatch):
    monkeypatch.setenv("EDITOR", "false")
    assert "the editor ended with 1" in edit(code=DlqExit.USAGE).stderr
    monkeypatch.setenv("EDITOR", "/nowhere/editor")
    assert "cannot be started" in edit(code=DlqExit.USAGE).stderr
    assert len(dead(shop.orders)) == 1


def test_a_dry_run_says_what_would_be_changed_and_changes_nothing(shop):
    assert "would be replayed" in edit("--set", "total=45", "--dry-run").stdout
    assert len(dead(shop.orders)) == 1


def test_a_queue_without_a_task_takes_any_payload_unless_a_task_is_named(shop):
    edit("--set", "total=much", "--task", "editapp:charge", where="editapp:orders", code=DlqExit.USAGE)
    edit("--set", "total=much", where="editapp:orders")
    assert only(shop.orders).transaction.payload["total"] == "much"


def test_of_several_with_one_id_the_place_says_which(shop):
    shop.orders.dispatch([Transaction("order-1", {"total": 500, "customer": {"name": "Eve"}})])
    shop.charge.run(ConsumerPolicy())
    first, second = dead(shop.orders)
    done = edit("--set", "total=1", code=DlqExit.USAGE)
    assert f"--place: {first.place}, {second.place}" in done.stderr
    edit("--set", "total=1", "--place", second.place)
    assert only(shop.orders).transaction.payload["customer"] == {"name": "Eve"}
    assert [record.place for record in dead(shop.orders)] == [first.place]


def test_one_that_is_not_there_is_told(shop):
    assert "no dead letter of transaction 'order-9'" in edit("--set", "a=1", name="order-9", code=DlqExit.FAILED).stderr


def test_what_could_not_be_read_is_replaced_by_a_file_only(shop):
    shop.orders.dispatch([Transaction("order-2", b"\xff")])
    [delivery] = shop.orders.fetch_transactions(1)
    shop.orders.settle([(delivery, DeadLetter("undecodable"))])
    assert "give --file FILE" in edit("--set", "total=1", name="order-2", code=DlqExit.USAGE).stderr
    Path("new.json").write_text('{"total": 3, "customer": {}}', encoding="utf-8")
    edit("--file", "new.json", name="order-2")
    assert only(shop.orders).transaction.payload == {"total": 3, "customer": {}}


def test_a_log_is_not_corrected(shop):
    assert "is a log" in edit("--set", "a=1", where="editapp:log", code=DlqExit.USAGE).stderr


@pytest.mark.spec("SEC-21")
@pytest.mark.invariant
def test_of_two_operators_one_succeeds_and_the_other_is_told(shop, monkeypatch):
    """The first edits after the second has read the dead letter for the last time, and before the second writes."""
    stamp = MemoryConnector.stamped
    others = iter([lambda: edit("--set", "total=100", "--actor", "kim")])

    def stamped(self, transaction):
        next(others, lambda: None)()
        return stamp(self, transaction)

    monkeypatch.setattr(MemoryConnector, "stamped", stamped)
    done = edit("--set", "total=200", "--actor", "lee", code=DlqExit.FAILED)
    assert "by another operator in the meantime; this correction was not sent" in done.stderr
    assert only(shop.orders).transaction.payload["total"] == 100
    assert dead(shop.orders) == []


@pytest.mark.spec("SEC-21")
def test_a_correction_that_the_server_refuses_leaves_the_dead_letter(shop, monkeypatch):
    monkeypatch.setattr(
        MemoryConnector, "replace_dead", lambda _self, place, _: ReplayResult(place, Became.FAILED, "no memory")
    )
    done = edit("--set", "total=45", code=DlqExit.FAILED)
    assert "the correction was not sent: no memory; the dead letter is unchanged" in done.stderr
    assert len(dead(shop.orders)) == 1


@pytest.mark.spec("SEC-21")
def test_a_connector_without_replace_dead_is_refused_before_anything_is_sent(shop, monkeypatch):
    monkeypatch.setattr(MemoryConnector, "replace_dead", Connector.replace_dead)
    assert "it has no replace_dead" in edit("--set", "total=45", code=DlqExit.USAGE).stderr
    assert len(dead(shop.orders)) == 1


def test_numbers_and_truth_values_differ():
    assert [each.path for each in differences({"a": 1}, {"a": True})] == ["a"]
    assert [each.path for each in differences([1], [1, 2])] == [""]
