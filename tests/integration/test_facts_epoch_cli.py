"""``ergon facts epoch``: what an operator does after a restore, and what is kept of it."""

from __future__ import annotations

import json

import psycopg
import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.cli.facts_work import FactsExit
from ergon_framework.connectors.base import Later
from ergon_framework.facts.boundary import confirmed
from ergon_framework.facts.connector import FactConnector
from ergon_framework.facts.errors import EpochChanged
from ergon_framework.facts.model import Cursor, Envelope, Fact, Pair, Side
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.facts.stores.postgres import PostgresBoundary

pytestmark = pytest.mark.spec("FAC-17")

PAIR = Pair("Plant A", "HQ")


@pytest.fixture
def run(database):
    def ran(*words, code=FactsExit.OK, stdin=None, actor="ada"):
        environment = {"ERGON_POSTGRES__DSN": database, "ERGON_ACTOR": actor, "USER": None}
        done = CliRunner().invoke(
            app, ["facts", "epoch", *map(str, words), "--accept-loss"], env=environment, input=stdin
        )
        assert done.exit_code == code, (done.output, done.stderr, done.exception)
        return done

    return ran


def stated(number):
    envelope = Envelope(message_id=f"m-{number}", from_zone=PAIR.from_zone, to_zone=PAIR.to_zone, produced_at_unix_ms=1)
    return envelope, Fact.of("s", "p", number)


def kept(dsn, epoch):
    with psycopg.connect(dsn) as connection:
        return connection.execute("select why, by_whom from ergon.fact_epochs where epoch = %s", [epoch]).fetchone()


def test_a_new_epoch_is_begun_with_a_name_and_a_reason(run, database):
    with PostgresBoundary(database, accept_loss=True) as store:
        store.append_fact(*stated(1))
        before, cursor = store.epoch, store.end_of(PAIR)
        said = run("new", "--reason", "disk of Tuesday", stdin="n\n", code=FactsExit.NOT)
        assert before in said.stderr
        assert "nothing was changed" in said.stderr
        assert store.epoch == before
        told = json.loads(run("new", "--reason", "disk of Tuesday", "--yes", "--json").stdout)
        assert (told["was"], told["epoch"] != before) == (before, True)
        # Whoever had the store open notices, and cursors of before are refused.
        with pytest.raises(EpochChanged):
            store.fetch_facts("ledger", PAIR, 10, after=cursor)
    assert kept(database, told["epoch"]) == ("disk of Tuesday", "ada")
    listed = [json.loads(line) for line in run("list", "--json").stdout.splitlines()]
    assert [(each["epoch"], each["present"]) for each in listed] == [(told["epoch"], True), (before, False)]
    assert f"* {told['epoch']}" in run("list").stdout


@pytest.fixture
def forwarded(database):
    """The hub's store with two facts of the plant, and the plant's."""
    plant = MemoryBoundary()
    for number in (1, 2):
        plant.append_fact(*stated(number))
    with PostgresBoundary(database, side=Side.OUTER, accept_loss=True) as hub:
        for answer in hub.forward_facts(plant.fetch_facts("hub", PAIR, 10)):
            confirmed(answer)
        yield hub, plant


def test_an_epoch_of_another_zone_is_taken_over_where_both_have_the_same(run, database, forwarded):
    hub, plant = forwarded
    words = ("adopt", "after-restore", "--from", PAIR.from_zone, "--to", PAIR.to_zone, "--side", "outer")
    refused = run(*words, "--offset", 1, "--yes", code=FactsExit.NOT)
    assert "2" in refused.stderr
    asked = run(*words, "--offset", 2, stdin="n\n", code=FactsExit.NOT)
    assert plant.epoch in asked.stderr
    assert hub.end_of(PAIR) == Cursor(plant.epoch, 2)
    told = json.loads(run(*words, "--offset", 2, "--json", stdin="y\n").stdout.splitlines()[-1])
    assert told == {"epoch": "after-restore", "was": plant.epoch, "offset": 2}
    assert hub.end_of(PAIR) == Cursor("after-restore", 2)
    assert kept(database, "after-restore") == ("adopted for Plant A to HQ at offset 2", "ada")


def test_an_epoch_that_is_taken_over_twice_keeps_both(run, database, forwarded):
    words = ("--from", PAIR.from_zone, "--to", PAIR.to_zone, "--side", "outer", "--offset", 2, "--yes")
    run("adopt", "one", *words)
    run("adopt", "two", *words)
    run("adopt", "one", *words, actor="bob")
    told = "adopted for Plant A to HQ at offset 2"
    assert kept(database, "one") == (f"{told}; {told}", "ada; bob")


@pytest.mark.parametrize("words", [("new", "--reason", "w"), ("adopt", "e", "--from", "a", "--to", "b", "--offset", 1)])
def test_nobody_does_it_without_a_name(run, words):
    assert "--actor" in run(*words, "--yes", actor="", code=FactsExit.FAILED).stderr


def test_a_store_of_the_other_side_is_told(run, forwarded):
    done = run("list", code=FactsExit.FAILED)
    assert "Side.OUTER" in done.stderr


def test_a_database_that_is_away_is_told():
    environment = {"ERGON_POSTGRES__DSN": "postgresql://nobody:secret@127.0.0.1:1/none"}
    done = CliRunner().invoke(app, ["facts", "epoch", "list", "--json"], env=environment)
    assert done.exit_code == FactsExit.UNREACHED
    assert json.loads(done.stdout)["exit_code"] == int(FactsExit.UNREACHED)
    assert "secret" not in done.output


@pytest.mark.spec("FAC-15")
def test_a_consumer_that_stands_still_goes_on_when_an_operator_accepts_the_epoch(run, database):
    where = {**PAIR._asdict(), "reader": "ledger"}
    zones = ("--from", PAIR.from_zone, "--to", PAIR.to_zone, "--reader", "ledger")
    with PostgresBoundary(database, accept_loss=True) as store:
        store.append_fact(*stated(1))
        store.append_fact(*stated(2))
        before = FactConnector(store, **where)
        (delivery, _) = before.fetch_transactions(2)
        before.settle([(delivery, Later(600.0))])
        epoch = store.new_epoch(by="ada", why="a test")
    with PostgresBoundary(database, accept_loss=True) as store:
        heir = FactConnector(store, **where)
        with pytest.raises(EpochChanged, match="ergon facts epoch accept"):
            heir.fetch_transactions(1)
        assert "nothing was changed" in run("accept", *zones, stdin="n\n", code=FactsExit.NOT).stderr
        told = json.loads(run("accept", *zones, "--yes", "--json").stdout)
        assert told == {"reader": "ledger", "epoch": epoch, "dead_letters": 1}
        assert len(heir.fetch_transactions(5)) == 1
        assert heir.depth().dead == 1
