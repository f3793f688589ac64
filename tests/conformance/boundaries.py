"""The in-memory boundary store under the conformance suite, and the damage that tests do to it."""

from __future__ import annotations

from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.testing.conformance.boundary.suite import BoundaryUnderTest


class MemoryBoundaryUnderTest(BoundaryUnderTest):
    durable = False
    bounded = True
    resumes = True

    def __init__(self, make=MemoryBoundary):
        self._make = make
        self._stores = {}

    def client(self, store, *, side="inner", max_facts=None):
        if store not in self._stores:
            self._stores[store] = self._make(side=side, max_facts=max_facts)
        return self._stores[store]

    def backup(self, store):
        snapshot = self._stores[store].as_restored_backup()

        def restore():
            self._stores[store] = snapshot

        return restore

    def lose(self, store, bucket, key):
        artifacts = self._stores[store]._artifacts
        del artifacts._contents[artifacts._names["", bucket, key][0].digest]
        return True

    def damage(self, store, bucket, key):
        artifacts = self._stores[store]._artifacts
        digest = artifacts._names["", bucket, key][0].digest
        artifacts._contents[digest] = b"X" + artifacts._contents[digest][1:]
        return True
