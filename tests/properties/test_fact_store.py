"""The store in PostgreSQL compared with the store in memory: both answer every call alike."""

from __future__ import annotations

from dataclasses import replace

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import ArtifactReference, Cursor, Envelope, Fact, FactConfirmation, ZonePair
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.facts.stores.memory_contents import MemoryContentStore
from ergon_framework.facts.stores.postgres.store import PostgresBoundary

pytestmark = [
    pytest.mark.invariant,
    pytest.mark.spec("FAC-03", "FAC-10", "FAC-13", "FAC-14", "FAC-15", "FAC-16", "FAC-23"),
]

PAIRS = (ZonePair("A", "B"), ZonePair("A", "C"), ZonePair("Werk Süd", "B"))
READERS = ("one", "two")
KEYS = ("k1", "k2")
CONTENTS = (b"", b"first", b"second")
TABLES = (
    "fact_object_uses, fact_objects, fact_contents, fact_readers, fact_reader_audit, facts, fact_ids, fact_log, "
    "fact_usage, fact_store, fact_epochs"
)

ids = st.integers(1, 12).map("m-{}".format)
pairs = st.sampled_from(PAIRS)


def make_artifact_fact(key, content):
    stored = MemoryBoundary().put_object("b", key, [content])
    return Fact.create(
        "s", "p", ArtifactReference(bucket="b", key=key, digest=stored.digest, size=stored.size).to_object()
    )


plain_facts = st.integers(1, 2).map(lambda number: Fact.create("s", "p", {"number": number, "text": "ü" * number}))
facts = st.one_of(
    plain_facts, plain_facts, st.builds(make_artifact_fact, st.sampled_from(KEYS), st.sampled_from(CONTENTS))
)


@st.composite
def append_arguments(draw):
    pair = draw(pairs)
    envelope = Envelope(message_id=draw(ids), from_zone=pair.from_zone, to_zone=pair.to_zone, produced_at_unix_ms=1)
    return envelope, draw(facts)


class StoreMachine(RuleBasedStateMachine):
    dsn = ""
    max_facts: int | None = None

    @initialize()
    def begin(self):
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute("truncate " + ", ".join(f"ergon.{name}" for name in TABLES.split(", ")))
        self.now = 1_000_000.0
        options = {"max_facts": self.max_facts, "identity_retention": 500.0, "wall": lambda: self.now}
        self.model = MemoryBoundary(**options)
        self.contents = MemoryContentStore()
        self.store = PostgresBoundary(self.dsn, contents=self.contents, accept_loss=True, **options)
        #: The source of forwarded facts.
        self.origin = MemoryBoundary(wall=lambda: self.now)

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()

    def call_both(self, call, *args, **options):
        results = [self._call_store(store, call, args, options) for store in (self.model, self.store)]
        assert results[0] == results[1], call
        return results[0]

    def _call_store(self, store, call, args, options):
        args = [self._to_store_value(store, each) for each in args]
        options = {name: self._to_store_value(store, each) for name, each in options.items()}
        try:
            result = getattr(store, call)(*args, **options)
            return self._normalize(store, list(result) if call == "get_object" else result)
        except FactError as error:
            return self._normalize(store, error)

    def _to_store_value(self, store, value):
        return Cursor(store.epoch, value.offset) if isinstance(value, Cursor) and value.epoch == "ours" else value

    def _normalize(self, store, answer):
        """Return an answer without the fields that differ by nature."""
        if isinstance(answer, FactError):
            return type(answer).__name__, getattr(answer, "message_id", None)
        if isinstance(answer, Cursor):
            return Cursor("ours" if answer.epoch == store.epoch else answer.epoch, answer.offset)
        if isinstance(answer, list):
            return [self._normalize(store, each) for each in answer]
        if hasattr(answer, "epoch"):
            return replace(answer, epoch="ours" if answer.epoch == store.epoch else answer.epoch)
        return answer

    # -- actions --------------------------------------------------------------------------------------

    @rule(batch=st.lists(append_arguments(), min_size=1, max_size=6))
    def append(self, batch):
        self.call_both("append_facts", batch)

    @rule(batch=st.lists(append_arguments(), min_size=1, max_size=4))
    def forward(self, batch):
        shifted = [(replace(envelope, from_zone="Far"), fact) for envelope, fact in batch if fact.artifact is None]
        stored = [each for each in self.origin.append_facts(shifted) if isinstance(each, FactConfirmation)]
        for pair in {ZonePair("Far", envelope.to_zone) for envelope, _ in shifted}:
            fetched = self.origin.fetch_facts("peer", pair, 100)
            self.call_both("forward_facts", fetched[-len(stored) - 1 :])

    @rule(back=st.integers(0, 3))
    def forward_all(self, back):
        for pair in (ZonePair("Far", "B"), ZonePair("Far", "C")):
            fetched = self.origin.fetch_facts("peer", pair, 100)
            self.call_both("forward_facts", fetched[: max(0, len(fetched) - back)])

    @rule(batch=st.lists(append_arguments(), min_size=1, max_size=1))
    def append_to_forwarded_pair(self, batch):
        (envelope, fact) = batch[0]
        if self.model.last_offset(ZonePair("Far", envelope.to_zone)) is not None:
            self.call_both("append_facts", [(replace(envelope, from_zone="Far"), fact)])

    @rule(key=st.sampled_from(KEYS), content=st.sampled_from(CONTENTS))
    def put(self, key, content):
        self.call_both("put_object", "b", key, [content[:2], content[2:]])

    @rule(key=st.sampled_from(KEYS))
    def read(self, key):
        self.call_both("get_object", "b", key)

    @rule(reader=st.sampled_from(READERS), pair=pairs, limit=st.integers(0, 5))
    def fetch(self, reader, pair, limit):
        self.call_both("fetch_facts", reader, pair, limit)

    @rule(reader=st.sampled_from(READERS), pair=pairs, offset=st.integers(0, 15))
    def replay(self, reader, pair, offset):
        self.call_both("fetch_facts", reader, pair, 5, after=Cursor("ours", offset))

    @rule(reader=st.sampled_from(READERS), pair=pairs, offset=st.integers(0, 15))
    def confirm(self, reader, pair, offset):
        self.call_both("confirm_receipt", reader, pair, Cursor("ours", offset))

    @rule(reader=st.sampled_from(READERS), pair=pairs)
    def confirm_all(self, reader, pair):
        end = self.model.last_offset(pair)
        if end is not None:
            self.call_both("confirm_receipt", reader, pair, Cursor("ours", end.offset))

    @rule(reader=st.sampled_from(READERS), pair=pairs)
    def retire(self, reader, pair):
        self.call_both("retire_reader", reader, pair, by="operator")

    @rule(age=st.integers(0, 400))
    def prune(self, age):
        self.call_both("prune", int((self.now - age) * 1000))

    @rule(seconds=st.integers(1, 300))
    def wait(self, seconds):
        self.now += seconds

    @rule(pair=pairs, age=st.integers(0, 600))
    def find_cursor(self, pair, age):
        self.call_both("cursor_at_time", pair, int((self.now - age) * 1000))

    @rule(zone=st.sampled_from(("A", "Werk Süd", "Far")), message_id=ids)
    def get(self, zone, message_id):
        self.call_both("get_fact", zone, message_id)

    # -- invariants -----------------------------------------------------------------------------------

    @invariant()
    def compare_logs(self):
        if not hasattr(self, "store"):
            return
        states = [
            {state.pair: self._normalize(store, state) for state in store.list_logs()}
            for store in (self.model, self.store)
        ]
        assert states[0] == states[1]


@pytest.mark.parametrize("max_facts", [None, 6])
def test_the_postgres_store_behaves_like_the_memory_store(database, max_facts):
    machine_class = type("Bounded", (StoreMachine,), {"dsn": database, "max_facts": max_facts})
    run_state_machine_as_test(
        machine_class,
        settings=settings(
            max_examples=settings().max_examples // 5,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
