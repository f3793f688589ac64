"""The store in PostgreSQL beside the store in memory: whatever is asked of both is answered alike."""

from __future__ import annotations

from dataclasses import replace

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import ArtifactReference, Cursor, Envelope, Fact, FactConfirmation, Pair
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.facts.stores.memory_contents import MemoryContents
from ergon_framework.facts.stores.postgres import PostgresBoundary

pytestmark = [
    pytest.mark.invariant,
    pytest.mark.spec("FAC-03", "FAC-10", "FAC-13", "FAC-14", "FAC-15", "FAC-16", "FAC-23"),
]

PAIRS = (Pair("A", "B"), Pair("A", "C"), Pair("Werk Süd", "B"))
READERS = ("one", "two")
KEYS = ("k1", "k2")
CONTENTS = (b"", b"first", b"second")
TABLES = (
    "fact_object_uses, fact_objects, fact_contents, fact_readers, fact_reader_audit, facts, fact_ids, fact_log, "
    "fact_room, fact_store, fact_epochs"
)

ids = st.integers(1, 12).map("m-{}".format)
pairs = st.sampled_from(PAIRS)


def referring(key, content):
    stored = MemoryBoundary().put_object("b", key, [content])
    return Fact.of("s", "p", ArtifactReference(bucket="b", key=key, digest=stored.digest, size=stored.size).as_object())


plain = st.integers(1, 2).map(lambda number: Fact.of("s", "p", {"number": number, "text": "ü" * number}))
facts = st.one_of(plain, plain, st.builds(referring, st.sampled_from(KEYS), st.sampled_from(CONTENTS)))


@st.composite
def appendings(draw):
    pair = draw(pairs)
    envelope = Envelope(message_id=draw(ids), from_zone=pair.from_zone, to_zone=pair.to_zone, produced_at_unix_ms=1)
    return envelope, draw(facts)


class Stores(RuleBasedStateMachine):
    dsn = ""
    max_facts: int | None = None

    @initialize()
    def begin(self):
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute("truncate " + ", ".join(f"ergon.{name}" for name in TABLES.split(", ")))
        self.now = 1_000_000.0
        given = {"max_facts": self.max_facts, "identity_retention": 500.0, "wall": lambda: self.now}
        self.model = MemoryBoundary(**given)
        self.contents = MemoryContents()
        self.store = PostgresBoundary(self.dsn, contents=self.contents, accept_loss=True, **given)
        #: Where forwarded facts come from.
        self.origin = MemoryBoundary(wall=lambda: self.now)

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()

    def both(self, call, *args, **options):
        answers = [self._asked(store, call, args, options) for store in (self.model, self.store)]
        assert answers[0] == answers[1], call
        return answers[0]

    def _asked(self, store, call, args, options):
        args = [self._for(store, each) for each in args]
        options = {name: self._for(store, each) for name, each in options.items()}
        try:
            found = getattr(store, call)(*args, **options)
            return self._told(store, list(found) if call == "get_object" else found)
        except FactError as error:
            return self._told(store, error)

    def _for(self, store, value):
        return Cursor(store.epoch, value.offset) if isinstance(value, Cursor) and value.epoch == "ours" else value

    def _told(self, store, answer):
        """An answer without what differs by nature."""
        if isinstance(answer, FactError):
            return type(answer).__name__, getattr(answer, "message_id", None)
        if isinstance(answer, Cursor):
            return Cursor("ours" if answer.epoch == store.epoch else answer.epoch, answer.offset)
        if isinstance(answer, list):
            return [self._told(store, each) for each in answer]
        if hasattr(answer, "epoch"):
            return replace(answer, epoch="ours" if answer.epoch == store.epoch else answer.epoch)
        return answer

    # -- what is done ---------------------------------------------------------------------------------

    @rule(batch=st.lists(appendings(), min_size=1, max_size=6))
    def append(self, batch):
        self.both("append_facts", batch)

    @rule(batch=st.lists(appendings(), min_size=1, max_size=4))
    def forward(self, batch):
        shifted = [(replace(envelope, from_zone="Far"), fact) for envelope, fact in batch if fact.artifact is None]
        stored = [each for each in self.origin.append_facts(shifted) if isinstance(each, FactConfirmation)]
        for pair in {Pair("Far", envelope.to_zone) for envelope, _ in shifted}:
            arrived = self.origin.fetch_facts("peer", pair, 100)
            self.both("forward_facts", arrived[-len(stored) - 1 :])

    @rule(back=st.integers(0, 3))
    def forward_all(self, back):
        for pair in (Pair("Far", "B"), Pair("Far", "C")):
            arrived = self.origin.fetch_facts("peer", pair, 100)
            self.both("forward_facts", arrived[: max(0, len(arrived) - back)])

    @rule(batch=st.lists(appendings(), min_size=1, max_size=1))
    def append_where_facts_are_forwarded(self, batch):
        (envelope, fact) = batch[0]
        if self.model.end_of(Pair("Far", envelope.to_zone)) is not None:
            self.both("append_facts", [(replace(envelope, from_zone="Far"), fact)])

    @rule(key=st.sampled_from(KEYS), content=st.sampled_from(CONTENTS))
    def put(self, key, content):
        self.both("put_object", "b", key, [content[:2], content[2:]])

    @rule(key=st.sampled_from(KEYS))
    def read(self, key):
        self.both("get_object", "b", key)

    @rule(reader=st.sampled_from(READERS), pair=pairs, limit=st.integers(0, 5))
    def fetch(self, reader, pair, limit):
        self.both("fetch_facts", reader, pair, limit)

    @rule(reader=st.sampled_from(READERS), pair=pairs, offset=st.integers(0, 15))
    def replay(self, reader, pair, offset):
        self.both("fetch_facts", reader, pair, 5, after=Cursor("ours", offset))

    @rule(reader=st.sampled_from(READERS), pair=pairs, offset=st.integers(0, 15))
    def confirm(self, reader, pair, offset):
        self.both("confirm_receipt", reader, pair, Cursor("ours", offset))

    @rule(reader=st.sampled_from(READERS), pair=pairs)
    def confirm_all(self, reader, pair):
        end = self.model.end_of(pair)
        if end is not None:
            self.both("confirm_receipt", reader, pair, Cursor("ours", end.offset))

    @rule(reader=st.sampled_from(READERS), pair=pairs)
    def retire(self, reader, pair):
        self.both("retire_reader", reader, pair, by="somebody")

    @rule(age=st.integers(0, 400))
    def prune(self, age):
        self.both("prune", int((self.now - age) * 1000))

    @rule(seconds=st.integers(1, 300))
    def wait(self, seconds):
        self.now += seconds

    @rule(pair=pairs, age=st.integers(0, 600))
    def look_back(self, pair, age):
        self.both("cursor_at", pair, int((self.now - age) * 1000))

    @rule(zone=st.sampled_from(("A", "Werk Süd", "Far")), message_id=ids)
    def get(self, zone, message_id):
        self.both("get_fact", zone, message_id)

    # -- what is always so ----------------------------------------------------------------------------

    @invariant()
    def what_is_surveyed_is_the_same(self):
        if not hasattr(self, "store"):
            return
        told = [
            {state.pair: self._told(store, state) for state in store.survey()} for store in (self.model, self.store)
        ]
        assert told[0] == told[1]


@pytest.mark.parametrize("max_facts", [None, 6])
def test_the_store_does_what_the_model_does(database, max_facts):
    kind = type("Bounded", (Stores,), {"dsn": database, "max_facts": max_facts})
    run_state_machine_as_test(
        kind,
        settings=settings(
            max_examples=settings().max_examples // 5,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
