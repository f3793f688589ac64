"""Somebody who calls a facts service once, in a process of his own, and says what he was told, as JSON.

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
from ergon_framework.facts.boundary import Boundary, confirmed
from ergon_framework.facts.model import Cursor, Envelope, Fact, Pair, Stored
from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.files import TlsFiles

PAIR = Pair("Plant A", "HQ")
#: Facts that are there before anybody is killed, and how many come together.
BEFORE = 3
TOGETHER = 10
PIECE = 1024 * 1024
CONTENT = random.Random(17).randbytes(3 * PIECE + 5)
STORED = Stored(f"sha256:{hashlib.sha256(CONTENT).hexdigest()}", len(CONTENT))
PLACE = ("papers", "2026/17.pdf")
READER = "ledger"


def stated(number: int) -> tuple[Envelope, Fact]:
    envelope = Envelope(message_id=f"m-{number}", from_zone=PAIR.from_zone, to_zone=PAIR.to_zone, produced_at_unix_ms=1)
    return envelope, Fact.of(f"order:{number}", "paid", {"number": number})


def pieces(begin: int = 0) -> list[bytes]:
    return [CONTENT[start : start + PIECE] for start in range(begin, len(CONTENT), PIECE)]


def called(boundary: Boundary, call: str) -> Any:
    """What *call* has to say; the same call again has to say the same."""
    if call == "append":
        return boundary.append_fact(*stated(BEFORE + 1)).offset
    if call == "batch":
        facts = [stated(BEFORE + number) for number in range(1, TOGETHER + 1)]
        return [confirmed(answer).offset for answer in boundary.append_facts(facts)]
    if call == "put":
        begin = boundary.received(*PLACE, STORED)
        return list(boundary.put_object(*PLACE, pieces(begin), expected=STORED, begin=begin))
    if call == "get":
        return hashlib.sha256(b"".join(boundary.get_object(*PLACE))).hexdigest()
    if call == "fetch":
        return [[each.envelope.message_id, each.offset] for each in boundary.fetch_facts(READER, PAIR, 100)]
    boundary.confirm_receipt(READER, PAIR, Cursor(boundary.epoch, 2))
    cursor = boundary.cursor_of(READER, PAIR)
    return None if cursor is None else cursor.offset


def client_of(host: str, tls: list[str]) -> BoundaryClient:
    return BoundaryClient(Address(host=host, files=TlsFiles(*map(Path, tls)), deadline=20.0))


def main() -> None:
    given = json.loads(sys.argv[1])
    with client_of(given["host"], given["tls"]) as client:
        try:
            told = {"told": called(client, given["call"])}
        except ErgonError as error:
            told = {"error": type(error).__name__}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
