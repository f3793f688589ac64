"""A client that calls a facts service once, in a separate process, and prints the answer as JSON.

python -m tests.servers.facts_caller '{"host": ..., "tls": [...], "call": ..., "reader": ...}'
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

from ergon_framework.errors import ErgonError
from ergon_framework.facts.boundary import Boundary, raise_if_error
from ergon_framework.facts.model import Cursor, Envelope, Fact, StoredArtifact, ZonePair
from ergon_framework.facts.service.channel import ServiceAddress
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.tls import TlsFiles

PAIR = ZonePair("Plant A", "HQ")
#: Facts that exist before any kill, and the size of a batch.
EXISTING_FACT_COUNT = 3
BATCH_SIZE = 10
CHUNK_BYTES = 1024 * 1024
CONTENT = random.Random(17).randbytes(3 * CHUNK_BYTES + 5)
STORED_CONTENT = StoredArtifact(f"sha256:{hashlib.sha256(CONTENT).hexdigest()}", len(CONTENT))
ARTIFACT_NAME = ("papers", "2026/17.pdf")
READER = "ledger"


def make_fact(number: int) -> tuple[Envelope, Fact]:
    envelope = Envelope(message_id=f"m-{number}", from_zone=PAIR.from_zone, to_zone=PAIR.to_zone, produced_at_unix_ms=1)
    return envelope, Fact.create(f"order:{number}", "paid", {"number": number})


def make_chunks(begin: int = 0) -> list[bytes]:
    return [CONTENT[start : start + CHUNK_BYTES] for start in range(begin, len(CONTENT), CHUNK_BYTES)]


def call_boundary(boundary: Boundary, call: str) -> Any:
    """Return the answer to *call*; the same call again must return the same."""
    if call == "append":
        return boundary.append_fact(*make_fact(EXISTING_FACT_COUNT + 1)).offset
    if call == "batch":
        facts = [make_fact(EXISTING_FACT_COUNT + number) for number in range(1, BATCH_SIZE + 1)]
        return [raise_if_error(answer).offset for answer in boundary.append_facts(facts)]
    if call == "put":
        begin = boundary.uploaded_bytes(*ARTIFACT_NAME, STORED_CONTENT)
        return list(boundary.put_object(*ARTIFACT_NAME, make_chunks(begin), expected=STORED_CONTENT, begin=begin))
    if call == "get":
        return hashlib.sha256(b"".join(boundary.get_object(*ARTIFACT_NAME))).hexdigest()
    if call == "fetch":
        return [[each.envelope.message_id, each.offset] for each in boundary.fetch_facts(READER, PAIR, 100)]
    boundary.confirm_receipt(READER, PAIR, Cursor(boundary.epoch, 2))
    cursor = boundary.get_cursor(READER, PAIR)
    return None if cursor is None else cursor.offset


def make_client(host: str, tls: list[str]) -> BoundaryClient:
    return BoundaryClient(ServiceAddress(host=host, files=TlsFiles(*map(Path, tls)), deadline=20.0))


def main() -> None:
    options = json.loads(sys.argv[1])
    with make_client(options["host"], options["tls"]) as client:
        try:
            answer = {"told": call_boundary(client, options["call"])}
        except ErgonError as error:
            answer = {"error": type(error).__name__}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
