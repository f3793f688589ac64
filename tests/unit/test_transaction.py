"""Transaction: frozen, low overhead, and the source of every id created while handling it."""

from __future__ import annotations

import contextvars
import copy
import doctest
import pickle
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from ergon_framework import scope, transaction
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.failure import Attempt, Deferral
from ergon_framework.transaction import MAX_DELAY_SECONDS, Transaction

FULL_TRANSACTION = Transaction(
    {"total": 12},
    id="order-7",
    source="shop",
    type="order.placed",
    schema_version=2,
    key="customer-1",
    tenant="acme",
    correlation="basket-3",
    causation="click-9",
    created_at=1.0,
    expires_at=2.0,
    attempts=4,
    history=(Attempt(attempt=3, category=Category.SYSTEM, error="busy"),),
    trace={"traceparent": "00-1-2-01"},
    not_before=3.0,
    priority=5,
)
FIELDS = [
    name for name in dir(FULL_TRANSACTION) if not name.startswith("_") and not callable(getattr(FULL_TRANSACTION, name))
]


def run_in_handler(function, handled=FULL_TRANSACTION):
    """Run *function* as if inside the handler of *handled*, without changing this test's context."""

    def call():
        scope.set_scope(scope.Scope(handled, step="process", attempt=0))
        return function()

    return contextvars.copy_context().run(call)


# -- the envelope ---------------------------------------------------------------------------------


def test_the_envelope_has_seventeen_fields():
    assert len(FIELDS) == 17


def test_only_the_id_is_needed():
    bare = Transaction(id="order-7")
    assert {name: getattr(bare, name) for name in FIELDS} == {
        "id": "order-7",
        "payload": None,
        "source": "",
        "type": "",
        "schema_version": 1,
        "key": None,
        "tenant": None,
        "correlation": None,
        "causation": None,
        "created_at": None,
        "expires_at": None,
        "attempts": 0,
        "history": (),
        "deferral": None,
        "trace": {},
        "not_before": None,
        "priority": 0,
    }


def test_a_transaction_without_an_id_is_rejected():
    with pytest.raises(ValueError, match="id is empty; pass an id that stays the same"):
        Transaction(id="")


@pytest.mark.parametrize("name", FIELDS)
def test_no_field_can_be_changed_or_deleted(name):
    with pytest.raises(AttributeError, match=rf"frozen; use replace\({name}="):
        setattr(FULL_TRANSACTION, name, None)
    with pytest.raises(AttributeError, match=f"frozen; '{name}' cannot be deleted"):
        delattr(FULL_TRANSACTION, name)


def test_no_field_can_be_added():
    with pytest.raises(AttributeError, match="frozen"):
        FULL_TRANSACTION.note = "x"
    assert not hasattr(FULL_TRANSACTION, "__dict__")


def test_the_empty_trace_carrier_that_transactions_share_cannot_be_written():
    with pytest.raises(TypeError):
        Transaction(id="a").trace["traceparent"] = "00-1-2-01"
    assert Transaction(id="b").trace == {}


def make_other_value(name):
    """Return another value for a field."""
    if name == "priority":
        return 99
    return 99.0 if name.endswith("_at") or name == "not_before" else "other"


@pytest.mark.parametrize("name", FIELDS)
def test_a_copy_differs_only_in_the_named_field(name):
    changed = FULL_TRANSACTION.replace(**{name: make_other_value(name)})
    assert getattr(changed, name) == make_other_value(name)
    assert {n: getattr(changed, n) for n in FIELDS if n != name} == {
        n: getattr(FULL_TRANSACTION, n) for n in FIELDS if n != name
    }
    assert changed != FULL_TRANSACTION
    assert getattr(FULL_TRANSACTION, name) != make_other_value(name)


def test_a_copy_is_checked_like_a_new_one():
    with pytest.raises(ValueError, match="id is empty"):
        FULL_TRANSACTION.replace(id="")
    with pytest.raises(TypeError, match="colour"):
        FULL_TRANSACTION.replace(colour="red")


def test_equal_transactions_are_equal_and_hash_alike():
    copied = FULL_TRANSACTION.replace()
    assert copied == FULL_TRANSACTION
    assert copied is not FULL_TRANSACTION
    assert hash(copied) == hash(FULL_TRANSACTION)
    assert FULL_TRANSACTION != "order-7"
    assert len({FULL_TRANSACTION, copied, FULL_TRANSACTION.replace(source="other")}) == 2


def test_a_payload_that_cannot_be_hashed_does_not_matter():
    assert hash(Transaction({"x": []}, id="a")) == hash(Transaction(id="a"))


def test_the_payload_is_not_shown():
    text = f"{Transaction('card 4242', id='a')!r} {Transaction('card 4242', id='a')}"
    assert "4242" not in text
    assert "id='a'" in text


@pytest.mark.parametrize("original", [FULL_TRANSACTION, Transaction(id="a")], ids=["full", "bare"])
@pytest.mark.parametrize("move", [lambda t: pickle.loads(pickle.dumps(t)), copy.copy, copy.deepcopy])
def test_a_transaction_can_be_pickled_and_copied(original, move):
    restored = move(original)
    assert restored == original
    assert type(restored) is Transaction


# -- derived ids ----------------------------------------------------------------------------------


@pytest.mark.spec("CON-48")
def test_a_derived_id_is_known_beforehand():
    # A changed value would make every effect in flight happen twice at the next upgrade.
    assert Transaction(id="order-7", source="shop").derive("payments.charge") == "54f91bcc4ace439188677154d913d596"


@pytest.mark.spec("CON-48")
@pytest.mark.parametrize("name", [name for name in FIELDS if name not in {"id", "source"}])
def test_a_derived_id_depends_on_nothing_but_source_id_and_name(name):
    assert FULL_TRANSACTION.replace(**{name: make_other_value(name)}).derive("x") == FULL_TRANSACTION.derive("x")


@pytest.mark.spec("CON-48")
def test_a_derived_id_is_the_same_in_another_process():
    program = "from ergon_framework.transaction import Transaction as T; print(T(id='ü', source='s').derive('n'))"
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdout.strip() == Transaction(id="ü", source="s").derive("n")


parts = st.tuples(st.text(max_size=3), st.text(min_size=1, max_size=3), st.text(max_size=3))


@pytest.mark.spec("CON-48")
@given(parts, parts)
def test_different_sources_ids_or_names_never_share_an_id(one, other):
    ids = [Transaction(id=own_id, source=source).derive(name) for source, own_id, name in (one, other)]
    assert (ids[0] == ids[1]) == (one == other)


@pytest.mark.spec("CON-48")
def test_the_border_between_the_parts_counts():
    spellings = [("a", "bc", "d"), ("ab", "c", "d"), ("a", "b", "cd"), ("", "abc", "d")]
    assert len({Transaction(id=own_id, source=source).derive(name) for source, own_id, name in spellings}) == 4


def test_deriving_one_name_twice_gives_the_same_id():
    assert FULL_TRANSACTION.derive("x") == FULL_TRANSACTION.derive("x")


# -- new transactions -----------------------------------------------------------------------------


def test_outside_of_a_handler_a_new_transaction_has_a_random_id():
    one, other = Transaction.new({"x": 1}, source="shop"), Transaction.new({"x": 1}, source="shop")
    assert one.id != other.id
    assert (one.payload, one.source, one.tenant, one.causation) == ({"x": 1}, "shop", None, None)
    assert one.created_at > 1.6e9


def test_a_new_transaction_keeps_the_given_fields():
    created = Transaction.new(id="mine", created_at=5.0, tenant="acme")
    assert (created.id, created.created_at, created.tenant) == ("mine", 5.0, "acme")


@pytest.mark.spec("CON-48")
def test_inside_a_handler_a_new_transaction_has_an_id_derived_from_the_handled_one():
    def create():
        return Transaction.new(source="mail", type="receipt")

    first, second = run_in_handler(create), run_in_handler(create)
    assert first.id == second.id == FULL_TRANSACTION.derive("mail/receipt")
    assert (first.tenant, first.correlation, first.causation) == ("acme", "basket-3", "order-7")


@pytest.mark.spec("CON-48")
def test_a_second_new_transaction_of_one_name_needs_a_name_of_its_own():
    def create_twice():
        Transaction.new(source="mail", type="receipt")
        return Transaction.new(source="mail", type="receipt")

    def create_named():
        Transaction.new(source="mail", type="receipt")
        return Transaction.new(source="mail", type="receipt", name="mail/receipt/2")

    with pytest.raises(ConfigurationError, match="effect name 'mail/receipt' is used twice"):
        run_in_handler(create_twice)
    assert run_in_handler(create_named).id == FULL_TRANSACTION.derive("mail/receipt/2")


def test_inside_a_handler_given_fields_override_inherited_ones():
    created = run_in_handler(lambda: Transaction.new(id="mine", tenant="other", correlation="c", causation="d"))
    assert (created.id, created.tenant, created.correlation, created.causation) == ("mine", "other", "c", "d")


def test_the_examples_are_true():
    assert doctest.testmod(transaction, raise_on_error=True).attempted > 0


@pytest.mark.parametrize(
    "fields", [{"id": 42}, {"id": "a", "key": 7}, {"id": "a", "expires_at": "tomorrow"}, {"id": "a", "created_at": []}]
)
def test_a_field_of_the_wrong_type_is_rejected_at_creation(fields):
    with pytest.raises(TypeError):
        Transaction(**fields)


# -- one attempt cannot change what the next one gets ------------------------------------------------------


@dataclass
class Line:
    tags: list[str]


@dataclass(frozen=True)
class FrozenLine:
    tags: list[str]


class Order(BaseModel):
    lines: list[Line]


class FrozenOrder(BaseModel):
    model_config = ConfigDict(frozen=True)
    lines: tuple[int, ...] = ()


class Uncopyable(dict):
    def __deepcopy__(self, memo):
        raise TypeError("no")


@pytest.mark.spec("DX-10")
def test_an_isolated_transaction_differs_in_nothing_but_the_identity_of_its_payload():
    deferral = Deferral(count=1, since=1.0, at=2.0, until=3.0)
    original = FULL_TRANSACTION.replace(payload={"a": [1, {"b": [2]}], "c": "text"}, deferral=deferral)
    isolated = original.isolate()
    assert isolated == original
    assert type(isolated) is Transaction
    isolated.payload["a"][1]["b"].append(3)
    isolated.payload["a"].append(4)
    isolated.payload["d"] = 5
    assert original.payload == {"a": [1, {"b": [2]}], "c": "text"}


@pytest.mark.spec("DX-10")
@pytest.mark.parametrize("payload", [None, "text", 7, 1.5, True, b"bytes"])
def test_an_immutable_payload_is_not_copied(payload):
    original = Transaction(payload, id="a")
    assert original.isolate() is original


@pytest.mark.spec("DX-10")
@pytest.mark.parametrize(
    "payload, change",
    [
        ([[1]], lambda payload: payload[0].append(2)),
        (([1],), lambda payload: payload[0].append(2)),
        ({1}, lambda payload: payload.add(2)),
        (bytearray(b"a"), lambda payload: payload.append(2)),
        (OrderedDict(a=[1]), lambda payload: payload["a"].append(2)),
        (Line(["a"]), lambda payload: payload.tags.append("b")),
        (Order(lines=[Line(["a"])]), lambda payload: payload.lines[0].tags.append("b")),
        ({"order": Order(lines=[])}, lambda payload: payload["order"].lines.append(Line([]))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_dataclasses_and_models_are_copied(payload, change):
    original = Transaction(payload, id="a")
    before = copy.deepcopy(payload)
    isolated = original.isolate()
    assert type(isolated.payload) is type(payload)
    change(isolated.payload)
    assert original.payload == before != isolated.payload


@pytest.mark.spec("DX-10")
@pytest.mark.parametrize(
    "payload", [FrozenLine([]), FrozenOrder(), object(), Uncopyable(), Line, Decimal(1)], ids=lambda p: type(p).__name__
)
def test_frozen_third_party_and_uncopyable_objects_are_shared(payload):
    original = Transaction(payload, id="a")
    assert original.isolate() is original
    assert Transaction([payload], id="a").isolate().payload[0] is payload or isinstance(payload, Uncopyable)


@pytest.mark.spec("DX-10")
def test_a_payload_that_is_nested_too_deep_to_be_copied_is_shared():
    payload = []
    for _ in range(100_000):
        payload = [payload]
    original = Transaction(payload, id="a")
    assert original.isolate() is original


# -- delays and priority ----------------------------------------------------------------------------

NOW = 1_700_000_000.0


@pytest.fixture
def stopped_clock(monkeypatch):
    monkeypatch.setattr(transaction.time, "time", lambda: NOW)


@pytest.mark.parametrize(
    "options, not_before",
    [
        ({}, None),
        ({"delay": 60}, NOW + 60),
        ({"delay": 0.5}, NOW + 0.5),
        ({"delay": 0}, NOW),
        ({"delay": timedelta(minutes=5)}, NOW + 300),
        ({"delay": MAX_DELAY_SECONDS}, NOW + MAX_DELAY_SECONDS),
        ({"at": NOW + 60}, NOW + 60),
        ({"at": datetime.fromtimestamp(NOW + 60, UTC)}, NOW + 60),
        ({"at": datetime.fromtimestamp(NOW + 60, timezone(timedelta(hours=5)))}, NOW + 60),
        ({"at": NOW - 1}, NOW - 1),
        ({"not_before": NOW + 7}, NOW + 7),
    ],
)
@pytest.mark.usefixtures("stopped_clock")
def test_a_delay_or_a_time_becomes_the_earliest_start(options, not_before):
    assert Transaction.new({}, **options).not_before == not_before


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"delay": -1}, ValueError, "finite number of seconds >= 0, not -1"),
        ({"delay": timedelta(seconds=-1)}, ValueError, ">= 0, not -1"),
        ({"delay": float("nan")}, ValueError, "not nan"),
        ({"delay": float("inf")}, ValueError, "not inf"),
        ({"delay": MAX_DELAY_SECONDS + 1}, ValueError, r"longer than 2592000 s \(30 days\)"),
        ({"delay": "60"}, TypeError, "a number of seconds or a timedelta, not a str"),
        ({"delay": True}, TypeError, "not a bool"),
        ({"at": NOW + MAX_DELAY_SECONDS + 1}, ValueError, "30 days"),
        ({"at": float("nan")}, ValueError, "finite number"),
        ({"at": datetime(2030, 1, 1)}, ValueError, "has no time zone: pass an aware datetime"),  # noqa: DTZ001
        ({"at": "tomorrow"}, TypeError, "an aware datetime or seconds since the epoch, not a str"),
        ({"at": True}, TypeError, "not a bool"),
        ({"delay": 1, "at": NOW}, ValueError, "exclude each other"),
        ({"delay": 1, "not_before": NOW}, ValueError, "exclude each other"),
        ({"not_before": "later"}, TypeError, "not_before must be a number"),
        ({"priority": 1.5}, TypeError, "priority an int"),
        ({"priority": True}, TypeError, "priority an int"),
    ],
)
@pytest.mark.usefixtures("stopped_clock")
def test_an_invalid_delay_time_or_priority_is_rejected(options, error, text):
    with pytest.raises(error, match=text):
        Transaction.new({}, **options)


def test_the_remaining_delay_is_computed_when_it_is_needed():
    delayed = Transaction(id="order-7", not_before=NOW)
    assert delayed.compute_delay(NOW - 60) == 60.0
    assert delayed.compute_delay(NOW) == delayed.compute_delay(NOW + 60) == 0.0
    assert Transaction(id="order-7").compute_delay(NOW) == 0.0
    with pytest.raises(ValueError, match="30 days"):
        delayed.compute_delay(NOW - MAX_DELAY_SECONDS - 100)
    with pytest.raises(ValueError, match="not inf"):
        Transaction(id="order-7", not_before=float("inf")).compute_delay(NOW)


def test_a_transaction_that_starts_again_is_due_at_once_and_keeps_its_priority():
    again = Transaction(id="order-7", not_before=NOW, priority=3).reset()
    assert (again.not_before, again.priority) == (None, 3)
