"""``ergon facts epoch``: what an operator does after a restore, and what is stored about it."""

from __future__ import annotations

import json

import psycopg
import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.cli.facts_commands import FactsExit
from ergon_framework.connectors.base import Defer
from ergon_framework.facts.boundary import raise_if_error
from ergon_framework.facts.connector import FactConnector
from ergon_framework.facts.errors import EpochChanged
from ergon_framework.facts.model import BoundarySide, Cursor, Envelope, Fact, ZonePair
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.facts.stores.postgres.store import PostgresBoundary

pytestmark = pytest.mark.spec("FAC-17")

PAIR = ZonePair("Plant A", "HQ")


@pytest.fixture
def run_command(database):
    def invoke(*args, code=FactsExit.OK, stdin=None, actor="ada"):
        environment = {"ERGON_POSTGRES__DSN": database, "ERGON_ACTOR": actor, "USER": None, "LOGNAME": "jo"}
        result = CliRunner().invoke(
            app, ["facts", "epoch", *map(str, args), "--accept-loss"], env=environment, input=stdin
        )
        assert result.exit_code == code, (result.output, result.stderr, result.exception)
        return result

    return invoke


def make_fact(number):
    envelope = Envelope(message_id=f"m-{number}", from_zone=PAIR.from_zone, to_zone=PAIR.to_zone, produced_at_unix_ms=1)
    return envelope, Fact.create("s", "p", number)


def fetch_epoch_row(dsn, epoch):
    with psycopg.connect(dsn) as connection:
        return connection.execute("select reason, actor from ergon.fact_epochs where epoch = %s", [epoch]).fetchone()


def test_a_new_epoch_is_started_with_a_name_and_a_reason(run_command, database):
    with PostgresBoundary(database, accept_loss=True) as store:
        store.append_fact(*make_fact(1))
        previous, cursor = store.epoch, store.last_offset(PAIR)
        prompt = run_command("new", "--reason", "snapshot of 2026-01-31", stdin="n\n", code=FactsExit.REJECTED)
        assert previous in prompt.stderr
        assert "nothing was changed" in prompt.stderr
        assert store.epoch == previous
        answer = json.loads(run_command("new", "--reason", "snapshot of 2026-01-31", "--yes", "--json").stdout)
        assert (answer["was"], answer["epoch"] != previous) == (previous, True)
        # A client that had the store open detects the change, and earlier cursors are rejected.
        with pytest.raises(EpochChanged):
            store.fetch_facts("ledger", PAIR, 10, after=cursor)
    assert fetch_epoch_row(database, answer["epoch"]) == ("snapshot of 2026-01-31", "ada")
    epochs = [json.loads(line) for line in run_command("list", "--json").stdout.splitlines()]
    assert [(each["epoch"], each["present"]) for each in epochs] == [(answer["epoch"], True), (previous, False)]
    assert f"* {answer['epoch']}" in run_command("list").stdout


@pytest.fixture
def hub_and_plant(database):
    """The hub's store with two facts of the plant, and the plant's store."""
    plant = MemoryBoundary()
    for number in (1, 2):
        plant.append_fact(*make_fact(number))
    with PostgresBoundary(database, side=BoundarySide.OUTER, accept_loss=True) as hub:
        for answer in hub.forward_facts(plant.fetch_facts("hub", PAIR, 10)):
            raise_if_error(answer)
        yield hub, plant


def test_an_epoch_of_another_zone_is_adopted_where_both_stores_agree(run_command, database, hub_and_plant):
    hub, plant = hub_and_plant
    args = ("adopt", "after-restore", "--from", PAIR.from_zone, "--to", PAIR.to_zone, "--side", "outer")
    rejection = run_command(*args, "--offset", 1, "--yes", code=FactsExit.REJECTED)
    assert "2" in rejection.stderr
    prompt = run_command(*args, "--offset", 2, stdin="n\n", code=FactsExit.REJECTED)
    assert plant.epoch in prompt.stderr
    assert hub.last_offset(PAIR) == Cursor(plant.epoch, 2)
    answer = json.loads(run_command(*args, "--offset", 2, "--json", stdin="y\n").stdout.splitlines()[-1])
    assert answer == {"epoch": "after-restore", "was": plant.epoch, "offset": 2}
    assert hub.last_offset(PAIR) == Cursor("after-restore", 2)
    assert fetch_epoch_row(database, "after-restore") == ("adopted for Plant A to HQ at offset 2", "ada")


def test_adopting_an_epoch_twice_keeps_both_records(run_command, database, hub_and_plant):
    args = ("--from", PAIR.from_zone, "--to", PAIR.to_zone, "--side", "outer", "--offset", 2, "--yes")
    run_command("adopt", "one", *args)
    run_command("adopt", "two", *args)
    run_command("adopt", "one", *args, actor="bob")
    reason = "adopted for Plant A to HQ at offset 2"
    assert fetch_epoch_row(database, "one") == (f"{reason}; {reason}", "ada; bob")


def test_an_epoch_change_without_a_given_actor_records_the_os_user(run_command, database):
    run_command("new", "--reason", "w", "--yes", actor="")
    with psycopg.connect(database) as connection:
        assert connection.execute("select count(*) from ergon.fact_epochs where actor = 'jo'").fetchone() == (1,)


def test_a_store_of_the_other_side_is_rejected(run_command, hub_and_plant):
    result = run_command("list", code=FactsExit.FAILED)
    assert "BoundarySide.OUTER" in result.stderr


def test_an_unavailable_database_is_reported():
    environment = {"ERGON_POSTGRES__DSN": "postgresql://unknown:secret@127.0.0.1:1/none"}
    result = CliRunner().invoke(app, ["facts", "epoch", "list", "--json"], env=environment)
    assert result.exit_code == FactsExit.UNAVAILABLE
    assert json.loads(result.stdout)["exit_code"] == int(FactsExit.UNAVAILABLE)
    assert "secret" not in result.output


@pytest.mark.spec("FAC-15")
def test_a_stopped_consumer_continues_after_an_operator_accepts_the_epoch(run_command, database):
    options = {**PAIR._asdict(), "reader": "ledger"}
    zones = ("--from", PAIR.from_zone, "--to", PAIR.to_zone, "--reader", "ledger")
    with PostgresBoundary(database, accept_loss=True) as store:
        store.append_fact(*make_fact(1))
        store.append_fact(*make_fact(2))
        previous = FactConnector(store, **options)
        (delivery, _) = previous.fetch_transactions(2)
        previous.settle([(delivery, Defer(600.0))])
        epoch = store.new_epoch(by="ada", why="a test")
    with PostgresBoundary(database, accept_loss=True) as store:
        successor = FactConnector(store, **options)
        with pytest.raises(EpochChanged, match="ergon facts epoch accept"):
            successor.fetch_transactions(1)
        assert "nothing was changed" in run_command("accept", *zones, stdin="n\n", code=FactsExit.REJECTED).stderr
        answer = json.loads(run_command("accept", *zones, "--yes", "--json").stdout)
        assert answer == {"reader": "ledger", "epoch": epoch, "dead_letters": 1}
        assert len(successor.fetch_transactions(5)) == 1
        assert successor.depth().dead == 1
