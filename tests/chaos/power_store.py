"""The half of power loss with facts: a store in PostgreSQL, whose server is frozen while threads append.

Some facts name an artifact, some are appended alone and some in batches: each way of appending has its own statement.
After the power loss each confirmed fact has its confirmed offset, appending it again returns that offset, offsets are
dense, and each artifact that a fact names is complete.

The same with synchronous_commit off shows that the rig sees losses: there the store refuses to work until it is
configured to accept them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ergon_framework.database.migrate import upgrade
from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.facts.boundary import raise_if_error
from ergon_framework.facts.model import Envelope, Fact, FactConfirmation, StoredFact, ZonePair, fact_digest
from ergon_framework.facts.stores.files import FileContentStore
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from tests.chaos.power import freeze
from tests.servers.postgres import PrivatePostgres

PAIR = ZonePair("Plant A", "HQ")
WRITERS = 8
#: Sizes of batches, and how often a fact names an artifact.
BATCH_SIZES = (1, 1, 1, 20)
ARTIFACT_INTERVAL = 40
#: The server writes as late as it may, so unsynced data is certainly not on the device.
SERVER_SETTINGS = {"wal_writer_delay": "10s", "max_wal_size": "96MB", "min_wal_size": "32MB", "shared_buffers": "32MB"}


def make_content(number: str) -> bytes:
    return number.encode() + random.Random(number).randbytes(5_000)


def make_statement(number: str, *, with_artifact: bool) -> tuple[Envelope, Fact]:
    """Return the same statement for the same number, at any time."""
    envelope = Envelope(
        message_id=f"m-{number}", from_zone=PAIR.from_zone, to_zone=PAIR.to_zone, produced_at_unix_ms=1_700_000_000_000
    )
    value: dict[str, Any] = {"number": number}
    if with_artifact:
        data = make_content(number)
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        value = {"bucket": "papers", "key": number, "digest": digest, "size": len(data)}
    return envelope, Fact.create(f"order:{number}", "paid", value)


class Facts:
    """Facts in a store on the disk, and the artifacts that they name."""

    commit = "on"
    accept_loss = False

    def __init__(self, disk: Path) -> None:
        self._server = self._create_server(disk)
        self._contents = disk / f"papers-{self.commit}"
        self._boundary: PostgresBoundary | None = None
        self._open = contextlib.ExitStack()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._append, args=(n,), daemon=True) for n in range(WRITERS)]
        self._was_rejected = False
        self._confirmed: dict[str, FactConfirmation] = {}
        self.durable: bool | None = None

    def _create_server(self, disk: Path) -> PrivatePostgres:
        settings = {"synchronous_commit": self.commit, **SERVER_SETTINGS}
        return PrivatePostgres(disk / f"server-{self.commit}", settings=settings)

    def _open_boundary(self, server: PrivatePostgres, folder: Path) -> PostgresBoundary:
        """Open the store, until ``_open`` is closed: an open folder keeps its disk mounted."""
        contents = self._open.enter_context(contextlib.closing(FileContentStore(folder)))
        boundary = PostgresBoundary(server.dsn(), contents=contents, accept_loss=self.accept_loss)
        return self._open.enter_context(boundary)

    # -- before ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._server.start()
        upgrade(self._server.dsn())
        try:
            with PostgresBoundary(self._server.dsn()):
                pass
        except ConfigurationError:
            self._was_rejected = True
        # initdb does not sync, and a power loss before the start is not tested.
        os.sync()
        self._boundary = self._open_boundary(self._server, self._contents)
        self.durable = self._boundary.capabilities.durable
        for thread in self._threads:
            thread.start()

    def _append(self, writer: int) -> None:
        rng, number = random.Random(writer), 0
        while not self._stopping.is_set():
            count = rng.choice(BATCH_SIZES)
            numbers = [f"{writer}-{number + index}" for index in range(count)]
            number += count
            with contextlib.suppress(ErgonError):
                self._append_all(numbers)

    def _append_all(self, numbers: Sequence[str]) -> None:
        assert self._boundary is not None
        if len(numbers) > 1:
            confirmations = [
                raise_if_error(each)
                for each in self._boundary.append_facts(
                    [make_statement(number, with_artifact=False) for number in numbers]
                )
            ]
        else:
            with_artifact = int(numbers[0].partition("-")[2]) % ARTIFACT_INTERVAL == 0
            if with_artifact:
                self._boundary.put_object("papers", numbers[0], [make_content(numbers[0])])
            confirmations = [self._boundary.append_fact(*make_statement(numbers[0], with_artifact=with_artifact))]
        self._confirmed.update(zip(numbers, confirmations, strict=True))

    def has_enough(self, count: int) -> bool:
        return len(self._confirmed) >= count

    def freeze(self) -> None:
        freeze(self._server.pid)

    def end(self) -> None:
        self._stopping.set()
        self._server.kill()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._open.close()

    # -- after ----------------------------------------------------------------------------------------

    def inspect(self, disk: Path) -> dict[str, Any]:
        """Return what is there after the power loss."""
        server = self._create_server(disk)
        (disk / server.folder.name / "data" / "postmaster.pid").unlink(missing_ok=True)
        # Confirmations that arrived after the freeze had been in flight before it.
        known = {confirmation.message_id: confirmation for confirmation in dict(self._confirmed).values()}
        try:
            server.start()
            with self._open:
                boundary = self._open_boundary(server, disk / self._contents.name)
                facts = _fetch_all(boundary)
                offsets = {each.envelope.message_id: each.offset for each in facts}
                lost = [name for name, confirmation in known.items() if offsets.get(name) != confirmation.offset]
                return {
                    "durable": self.durable,
                    "refused unless told": self._was_rejected,
                    "confirmed": len(known),
                    "found": len(facts),
                    "lost": len(lost),
                    "dense": [each.offset for each in facts] == list(range(1, len(facts) + 1)),
                    "named": sum(each.fact.artifact is not None for each in facts),
                    "damaged": sum(not _is_whole(boundary, each) for each in facts),
                    "answered otherwise": self._count_changed_answers(boundary, known, set(lost)),
                }
        finally:
            server.kill()

    def _count_changed_answers(
        self, boundary: PostgresBoundary, known: Mapping[str, FactConfirmation], lost: set[str]
    ) -> int:
        """Count the known facts whose answer differs when they are appended again."""
        kept = [confirmation for name, confirmation in known.items() if name not in lost]
        mismatches = 0
        for begin in range(0, len(kept), 500):
            page = kept[begin : begin + 500]
            answers = boundary.append_facts([self._remake_statement(confirmation) for confirmation in page])
            for confirmation, answer in zip(page, answers, strict=True):
                repeated = raise_if_error(answer)
                mismatches += not repeated.duplicate or (repeated.offset, repeated.digest) != (
                    confirmation.offset,
                    confirmation.digest,
                )
        return mismatches

    def _remake_statement(self, confirmation: FactConfirmation) -> tuple[Envelope, Fact]:
        number = confirmation.message_id.removeprefix("m-")
        plain = make_statement(number, with_artifact=False)
        with_artifact = make_statement(number, with_artifact=True)
        # Only its digest says which of the two it was.
        return plain if fact_digest(*plain) == confirmation.digest else with_artifact

    def find_problems(self, state: Mapping[str, Any], min_confirmed: int) -> list[str]:
        problems = []
        if state["confirmed"] < min_confirmed:
            problems.append(f"only {state['confirmed']} facts were confirmed")
        if not state["dense"]:
            problems.append("offsets have gaps")
        if not state["named"]:
            problems.append("no fact names an artifact")
        if state["damaged"]:
            problems.append(f"{state['damaged']} facts name an artifact that is missing or damaged")
        if state["answered otherwise"]:
            problems.append(f"{state['answered otherwise']} facts are answered otherwise when they are appended again")
        return problems + self._find_durability_problems(state)

    def _find_durability_problems(self, state: Mapping[str, Any]) -> list[str]:
        problems = []
        if state["lost"]:
            problems.append(f"{state['lost']} confirmed facts are lost")
        if state["durable"] is not True or state["refused unless told"]:
            problems.append("a durable store was not called so")
        return problems


class UndurableFacts(Facts):
    """The same where commits do not wait for the disk: losses are expected."""

    commit = "off"
    accept_loss = True

    def _find_durability_problems(self, state: Mapping[str, Any]) -> list[str]:
        problems = []
        if not state["lost"]:
            problems.append("nothing was lost with synchronous_commit off: the rig is blind")
        if state["durable"] is not False or not state["refused unless told"]:
            problems.append("a store that loses facts was not refused, or not called so")
        return problems


def _fetch_all(boundary: PostgresBoundary) -> list[StoredFact]:
    facts: list[StoredFact] = []
    while page := boundary.fetch_facts("look", PAIR, 1000, after=facts[-1].cursor if facts else None):
        facts += page
    return facts


def _is_whole(boundary: PostgresBoundary, each: StoredFact) -> bool:
    reference = each.fact.artifact
    if reference is None:
        return True
    try:
        data = b"".join(boundary.get_object(reference.bucket, reference.key))
    except ErgonError:
        return False
    return data == make_content(reference.key)
