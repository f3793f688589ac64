"""Facts and artifacts: what one zone, a site with its own store, states and another zone reads, once and in order."""

from typing import TYPE_CHECKING

from ergon_framework._util.exports import lazy_exports

if TYPE_CHECKING:
    from ergon_framework.facts.append import AsyncFacts, Blob, Facts, Upload
    from ergon_framework.facts.boundary import AsyncBoundary, Boundary
    from ergon_framework.facts.capacity import CapacityMonitor, disk_usage, store_usage
    from ergon_framework.facts.connector import AsyncFactConnector, FactConnector
    from ergon_framework.facts.errors import BufferFull, FactConflict, FactError, InvalidFactError
    from ergon_framework.facts.identity import business_id, canonical_json, digest_parts, event_id, uuid5_id
    from ergon_framework.facts.model import (
        BoundarySide,
        Buffer,
        Cursor,
        Envelope,
        Fact,
        ObjectName,
        StoredFact,
        ZonePair,
    )
    from ergon_framework.facts.policy import ReplicationPolicy, RetentionPolicy
    from ergon_framework.facts.producer import AsyncFactProducer, FactProducer
    from ergon_framework.facts.replica_state import ReplicaStatus
    from ergon_framework.facts.replicator import AsyncReplicator, Replicator
    from ergon_framework.facts.retention import FactRetention
    from ergon_framework.facts.stores.files import FileContentStore
    from ergon_framework.facts.stores.memory import MemoryBoundary
    from ergon_framework.facts.stores.memory_contents import MemoryContentStore
    from ergon_framework.facts.stores.postgres.store import PostgresBoundary
    from ergon_framework.facts.stores.s3 import S3ContentStore
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "append": ("AsyncFacts", "Blob", "Facts", "Upload"),
            "boundary": ("AsyncBoundary", "Boundary"),
            "capacity": ("CapacityMonitor", "disk_usage", "store_usage"),
            "connector": ("AsyncFactConnector", "FactConnector"),
            "errors": ("BufferFull", "FactConflict", "FactError", "InvalidFactError"),
            "identity": ("business_id", "canonical_json", "digest_parts", "event_id", "uuid5_id"),
            "model": ("BoundarySide", "Buffer", "Cursor", "Envelope", "Fact", "ObjectName", "StoredFact", "ZonePair"),
            "policy": ("ReplicationPolicy", "RetentionPolicy"),
            "producer": ("AsyncFactProducer", "FactProducer"),
            "replica_state": ("ReplicaStatus",),
            "replicator": ("AsyncReplicator", "Replicator"),
            "retention": ("FactRetention",),
            "stores.files": ("FileContentStore",),
            "stores.memory": ("MemoryBoundary",),
            "stores.memory_contents": ("MemoryContentStore",),
            "stores.postgres.store": ("PostgresBoundary",),
            "stores.s3": ("S3ContentStore",),
        },
        extras={
            "stores.postgres.store": ("postgres", "psycopg"),
        },
    )

__all__ = [
    "AsyncBoundary",
    "AsyncFactConnector",
    "AsyncFactProducer",
    "AsyncFacts",
    "AsyncReplicator",
    "Blob",
    "Boundary",
    "BoundarySide",
    "Buffer",
    "BufferFull",
    "CapacityMonitor",
    "Cursor",
    "Envelope",
    "Fact",
    "FactConflict",
    "FactConnector",
    "FactError",
    "FactProducer",
    "FactRetention",
    "Facts",
    "FileContentStore",
    "InvalidFactError",
    "MemoryBoundary",
    "MemoryContentStore",
    "ObjectName",
    "PostgresBoundary",
    "ReplicaStatus",
    "ReplicationPolicy",
    "Replicator",
    "RetentionPolicy",
    "S3ContentStore",
    "StoredFact",
    "Upload",
    "ZonePair",
    "business_id",
    "canonical_json",
    "digest_parts",
    "disk_usage",
    "event_id",
    "store_usage",
    "uuid5_id",
]
