"""``ergon dlq edit``: one payload is corrected and replayed under its id, with the actor and the change."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.cli.dlq_edit import differences
from ergon_framework.cli.dlq_view import DlqExit
from ergon_framework.connectors.base import Connector, DeadLetter
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterResult, ReplayResult
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.failure import EDITED_CODE, Attempt, trim_history
from ergon_framework.history import attempt_events
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy

APP = """
from pydantic import BaseModel
from ergon_framework import BusinessError, MemoryConnector, consumer
from ergon_framework.testing.memory_log import MemoryLog

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
    """Return the module, with one dead letter."""
    (tmp_path / "editapp.py").write_text(APP, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("EDITOR", "VISUAL"):
        monkeypatch.delenv(name, raising=False)
    import editapp  # noqa: PLC0415 - written above

    editapp.orders.dispatch([Transaction(PAYLOAD, id="order-1", correlation="basket", key="ada", tenant="acme")])
    editapp.charge.run(ConsumerPolicy())
    yield editapp
    sys.modules.pop("editapp")


def edit(*arguments, code=DlqExit.OK, target="editapp:charge", name="order-1"):
    result = CliRunner().invoke(app, ["dlq", "edit", target, name, *arguments])
    assert result.exit_code == code, result.output
    return result


def list_dead_letters(connector):
    return connector.list_dead(DeadLetterQuery())


def fetch_only(connector):
    [delivery] = connector.fetch_transactions(9)
    return delivery


def test_the_corrected_payload_is_replayed_under_the_same_id_and_says_who_changed_what(shop):
    summary = json.loads(edit("--set", "total=45", "--actor", "kim", "--json").stdout)
    assert (summary["id"], summary["changed"], summary["actor"], summary["replayed"]) == (
        "order-1",
        ["total"],
        "kim",
        True,
    )
    assert list_dead_letters(shop.orders) == []
    delivery = fetch_only(shop.orders)
    transaction = delivery.transaction
    assert (transaction.id, transaction.source, transaction.correlation, transaction.key, transaction.tenant) == (
        "order-1",
        "orders",
        "basket",
        "ada",
        "acme",
    )
    assert transaction.payload == PAYLOAD | {"total": 45}
    assert (transaction.attempts, delivery.deliveries) == (0, 1)
    [correction] = transaction.history
    assert (correction.code, correction.error) == (EDITED_CODE, "by kim: total")
    assert correction.at > 1_700_000_000


@pytest.mark.spec("DX-45")
def test_the_environment_sets_the_actor(shop, monkeypatch):
    monkeypatch.setenv("ERGON_ACTOR", "lee")
    assert json.loads(edit("--set", "total=45", "--json").stdout)["actor"] == "lee"


def test_the_difference_is_in_the_history_of_a_letter_that_is_dead_lettered_again(shop):
    edit("--set", "total=200", "--actor", "kim")
    shop.charge.run(ConsumerPolicy())
    edit("--set", "total=300", "--actor", "lee", "--show-values")
    shop.charge.run(ConsumerPolicy())
    [record] = list_dead_letters(shop.orders)
    notes = [entry.error for entry in record.failure.history if entry.code == EDITED_CODE]
    assert notes == ["by kim: total", "by lee: total: 200 -> 300"]
    output = CliRunner().invoke(app, ["dlq", "show", "editapp:orders", "order-1"]).stdout
    assert "by lee: total: 200 -> 300" in output
    events = [(event.event, event.result) for event in attempt_events(record.failure.history)]
    assert events == [("edited", ""), ("edited", ""), ("attempt 1", "BUSINESS")]


def test_attempts_do_not_crowd_a_correction_out():
    correction = Attempt(attempt=0, category="BUSINESS", code=EDITED_CODE, error="by kim: total")
    attempts = tuple(Attempt(attempt=number, category="SYSTEM", error=str(number)) for number in range(20))
    trimmed = trim_history((correction, *attempts), 10)
    assert [attempt.error for attempt in trimmed] == ["by kim: total", *(str(number) for number in range(11, 20))]
    assert trim_history(attempts, 10) == attempts[-10:]


@pytest.mark.parametrize(
    "setting, payload",
    [
        ("customer.zip.1=7", {"customer": {"name": "Ada", "zip": [1, 7]}}),
        ("/customer/zip/1=7", {"customer": {"name": "Ada", "zip": [1, 7]}}),
        ('customer={"name": "Bob"}', {"customer": {"name": "Bob"}}),
        ("token=NaN", {"token": "NaN"}),
        (f"token={'[' * 100_000}", {"token": "[" * 100_000}),
    ],
    ids=["dots", "pointer", "object", "not a JSON number; omit", "too deep"],
)
def test_a_value_is_set_by_its_path_as_json_or_as_text(shop, setting, payload):
    edit("--set", "total=1", "--set", setting)
    assert fetch_only(shop.orders).transaction.payload == PAYLOAD | {"total": 1} | payload


@pytest.mark.spec("DX-42")
def test_a_json_pointer_selects_a_value(shop):
    edit("--set", "/total=1")
    assert fetch_only(shop.orders).transaction.payload == PAYLOAD | {"total": 1}


@pytest.mark.spec("DX-42")
@pytest.mark.parametrize("path", ["/customer/a~1b~0c", "customer.a/b~c"])
def test_a_new_key_needs_a_flag(shop, path):
    error_output = edit("--set", f"{path}=x", code=DlqExit.USAGE).stderr
    assert "the payload has no 'a/b~c'" in error_output
    assert "to add a key, pass --allow-new-keys" in error_output
    assert len(list_dead_letters(shop.orders)) == 1
    edit("--set", f"{path}=x", "--allow-new-keys")
    assert fetch_only(shop.orders).transaction.payload["customer"]["a/b~c"] == "x"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--set", "total"], "is not an assignment"),
        (["--set", "totl=1"], "the nearest is 'total'; to add a key, pass --allow-new-keys"),
        (["--set", "customer.zip.9=1"], "has no '9' at 'customer.zip.9': there is a list of 2"),
        (["--set", "address.zip=1"], "has no 'address'"),
        (["--set", "total.net=1"], "a scalar value"),
        (["--set", "total=450"], "the payload is unchanged"),
        (["--set", "total=much"], "total: Input should be a valid integer"),
        (["--set", "total=1", "--file", "new.json"], "exclude each other"),
        (["--file", "new.json"], "cannot be read"),
        ([], "set EDITOR"),
    ],
)
def test_an_invalid_correction_changes_nothing(shop, arguments, message):
    result = edit(*arguments, code=DlqExit.USAGE)
    assert message in result.stderr
    assert "open-sesame" not in result.output
    assert len(list_dead_letters(shop.orders)) == 1
    assert shop.orders.depth().ready == 0


def test_a_file_replaces_the_whole_payload(shop):
    Path("new.json").write_text(json.dumps({"total": 3, "customer": {"name": "Bob"}}), encoding="utf-8")
    result = edit("--file", "new.json", "--show-values")
    assert fetch_only(shop.orders).transaction.payload == {"total": 3, "customer": {"name": "Bob"}}
    assert 'customer.name: "Ada" -> "Bob"' in result.stdout
    # Values named like a secret are not kept, also with --show-values.
    assert "open-sesame" not in result.stdout


def test_an_editor_gets_the_payload_in_a_file_that_only_its_user_may_read(shop, monkeypatch):
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
    assert fetch_only(shop.orders).transaction.payload["total"] == 7
    mode, name = Path("seen").read_text(encoding="utf-8").split()
    assert stat.S_IMODE(int(mode, 8)) == 0o600
    assert not Path(name).exists()


def test_an_editor_that_fails_changes_nothing(shop, monkeypatch):
    monkeypatch.setenv("EDITOR", "false")
    assert "the editor exited with code 1" in edit(code=DlqExit.USAGE).stderr
    monkeypatch.setenv("EDITOR", "/nowhere/editor")
    assert "cannot be started" in edit(code=DlqExit.USAGE).stderr
    assert len(list_dead_letters(shop.orders)) == 1


def test_a_dry_run_says_what_would_be_changed_and_changes_nothing(shop):
    assert "would be replayed" in edit("--set", "total=45", "--dry-run").stdout
    assert len(list_dead_letters(shop.orders)) == 1


def test_a_queue_without_a_task_takes_any_payload_unless_a_task_is_named(shop):
    edit("--set", "total=much", "--task", "editapp:charge", target="editapp:orders", code=DlqExit.USAGE)
    edit("--set", "total=much", target="editapp:orders")
    assert fetch_only(shop.orders).transaction.payload["total"] == "much"


def test_the_place_selects_among_letters_with_one_id(shop):
    shop.orders.dispatch([Transaction({"total": 500, "customer": {"name": "Eve"}}, id="order-1")])
    shop.charge.run(ConsumerPolicy())
    first, second = list_dead_letters(shop.orders)
    result = edit("--set", "total=1", code=DlqExit.USAGE)
    assert f"--entry: {first.handle}, {second.handle}" in result.stderr
    edit("--set", "total=1", "--entry", second.handle)
    assert fetch_only(shop.orders).transaction.payload["customer"] == {"name": "Eve"}
    assert [record.handle for record in list_dead_letters(shop.orders)] == [first.handle]


def test_an_unknown_id_is_reported(shop):
    assert "no dead letter of transaction 'order-9'" in edit("--set", "a=1", name="order-9", code=DlqExit.FAILED).stderr


def test_an_undecodable_payload_is_replaced_only_by_a_file(shop):
    shop.orders.dispatch([Transaction(b"\xff", id="order-2")])
    [delivery] = shop.orders.fetch_transactions(1)
    shop.orders.settle([(delivery, DeadLetter("undecodable"))])
    assert "pass --file FILE" in edit("--set", "total=1", name="order-2", code=DlqExit.USAGE).stderr
    Path("new.json").write_text('{"total": 3, "customer": {}}', encoding="utf-8")
    edit("--file", "new.json", name="order-2")
    assert fetch_only(shop.orders).transaction.payload == {"total": 3, "customer": {}}


def test_a_letter_of_a_log_cannot_be_edited(shop):
    assert "is a log" in edit("--set", "a=1", target="editapp:log", code=DlqExit.USAGE).stderr


@pytest.mark.spec("SEC-21")
@pytest.mark.invariant
def test_of_two_operators_one_succeeds_and_the_other_gets_an_error(shop, monkeypatch):
    """The first edit happens after the second has last read the dead letter, and before the second writes."""
    original = MemoryConnector.prepare
    competing_edits = iter([lambda: edit("--set", "total=100", "--actor", "kim")])

    def edit_before_stamp(self, transaction):
        next(competing_edits, lambda: None)()
        return original(self, transaction)

    monkeypatch.setattr(MemoryConnector, "prepare", edit_before_stamp)
    result = edit("--set", "total=200", "--actor", "lee", code=DlqExit.FAILED)
    assert "by another operator in the meantime; this correction was not sent" in result.stderr
    assert fetch_only(shop.orders).transaction.payload["total"] == 100
    assert list_dead_letters(shop.orders) == []


@pytest.mark.spec("SEC-21")
def test_a_correction_that_the_server_refuses_leaves_the_dead_letter(shop, monkeypatch):
    monkeypatch.setattr(
        MemoryConnector,
        "replace_dead",
        lambda _self, place, _: ReplayResult(place, DeadLetterResult.FAILED, "no memory"),
    )
    result = edit("--set", "total=45", code=DlqExit.FAILED)
    assert "the correction was not sent: no memory; the dead letter is unchanged" in result.stderr
    assert len(list_dead_letters(shop.orders)) == 1


@pytest.mark.spec("SEC-21")
def test_a_connector_without_replace_dead_is_rejected_before_anything_is_sent(shop, monkeypatch):
    monkeypatch.setattr(MemoryConnector, "replace_dead", Connector.replace_dead)
    assert "it has no replace_dead" in edit("--set", "total=45", code=DlqExit.USAGE).stderr
    assert len(list_dead_letters(shop.orders)) == 1


def test_numbers_and_booleans_differ():
    assert [each.path for each in differences({"a": 1}, {"a": True})] == ["a"]
    assert [each.path for each in differences([1], [1, 2])] == [""]
