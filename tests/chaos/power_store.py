"""The half of power loss with facts: a store in PostgreSQL, whose server is frozen while threads append.

Some facts name an artifact, some go alone and some in company: each way of appending has a statement of its own. After
the power came back each confirmed fact is there with the offset that was confirmed, appending it again is answered with
that offset, offsets are dense, and each artifact that a fact names is whole.

The same with synchronous_commit off shows that the rig sees losses: there the store refuses to work until it is told to
accept them.
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

from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.facts.boundary import confirmed
from ergon_framework.facts.model import Envelope, Fact, FactConfirmation, Pair, StoredFact, digest_of
from ergon_framework.facts.stores.files import FileContents
from ergon_framework.facts.stores.postgres import PostgresBoundary
from ergon_framework.schema.migrate import upgrade
from tests.chaos.power import freeze
from tests.servers.postgres import PrivatePostgres

PAIR = Pair("Plant A", "HQ")
WRITERS = 8
#: How many go together, and how often one names an artifact.
TOGETHER = (1, 1, 1, 20)
ARTIFACT_EACH = 40
#: The server writes by itself as late as it may: what it has not synced is then surely not on the device.
SETTINGS = {"wal_writer_delay": "10s", "max_wal_size": "96MB", "min_wal_size": "32MB", "shared_buffers": "32MB"}


def content(number: str) -> bytes:
    return number.encode() + random.Random(number).randbytes(5_000)


def stated(number: str, *, artifact: bool) -> tuple[Envelope, Fact]:
    """The same statement for the same number, whenever it is made."""
    envelope = Envelope(
        message_id=f"m-{number}", from_zone=PAIR.from_zone, to_zone=PAIR.to_zone, produced_at_unix_ms=1_700_000_000_000
    )
    value: dict[str, Any] = {"number": number}
    if artifact:
        data = content(number)
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        value = {"bucket": "papers", "key": number, "digest": digest, "size": len(data)}
    return envelope, Fact.of(f"order:{number}", "paid", value)


class Facts:
    """Facts in a store on the disk, and the artifacts that they name."""

    commit = "on"
    accept_loss = False

    def __init__(self, disk: Path) -> None:
        self._server = self._server_on(disk)
        self._contents = disk / f"papers-{self.commit}"
        self._boundary: PostgresBoundary | None = None
        self._open = contextlib.ExitStack()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._append, args=(n,), daemon=True) for n in range(WRITERS)]
        self._refused = False
        self._confirmed: dict[str, FactConfirmation] = {}
        self.durable: bool | None = None

    def _server_on(self, disk: Path) -> PrivatePostgres:
        settings = {"synchronous_commit": self.commit, **SETTINGS}
        return PrivatePostgres(disk / f"server-{self.commit}", settings=settings)

    def _opened(self, server: PrivatePostgres, folder: Path) -> PostgresBoundary:
        """The store, until ``_open`` is closed: a folder that is held open keeps its disk from being taken away."""
        contents = self._open.enter_context(contextlib.closing(FileContents(folder)))
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
            self._refused = True
        # initdb does not sync, and a power loss before the beginning is not the question.
        os.sync()
        self._boundary = self._opened(self._server, self._contents)
        self.durable = self._boundary.capabilities.durable
        for thread in self._threads:
            thread.start()

    def _append(self, writer: int) -> None:
        dice, number = random.Random(writer), 0
        while not self._over.is_set():
            count = dice.choice(TOGETHER)
            numbers = [f"{writer}-{number + place}" for place in range(count)]
            number += count
            with contextlib.suppress(ErgonError):
                self._append_all(numbers)

    def _append_all(self, numbers: Sequence[str]) -> None:
        assert self._boundary is not None
        if len(numbers) > 1:
            told = [
                confirmed(each)
                for each in self._boundary.append_facts([stated(number, artifact=False) for number in numbers])
            ]
        else:
            artifact = int(numbers[0].partition("-")[2]) % ARTIFACT_EACH == 0
            if artifact:
                self._boundary.put_object("papers", numbers[0], [content(numbers[0])])
            told = [self._boundary.append_fact(*stated(numbers[0], artifact=artifact))]
        self._confirmed.update(zip(numbers, told, strict=True))

    def enough(self, count: int) -> bool:
        return len(self._confirmed) >= count

    def freeze(self) -> None:
        freeze(self._server.pid)

    def end(self) -> None:
        self._over.set()
        self._server.kill()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._open.close()

    # -- after ----------------------------------------------------------------------------------------

    def left(self, disk: Path) -> dict[str, Any]:
        """What there is after the power came back."""
        server = self._server_on(disk)
        (disk / server.folder.name / "data" / "postmaster.pid").unlink(missing_ok=True)
        # Whatever was heard after the freeze had been on its way before it.
        known = {told.message_id: told for told in dict(self._confirmed).values()}
        try:
            server.start()
            with self._open:
                boundary = self._opened(server, disk / self._contents.name)
                facts = _all_of(boundary)
                found = {each.envelope.message_id: each.offset for each in facts}
                lost = [name for name, told in known.items() if found.get(name) != told.offset]
                return {
                    "durable": self.durable,
                    "refused unless told": self._refused,
                    "confirmed": len(known),
                    "found": len(facts),
                    "lost": len(lost),
                    "dense": [each.offset for each in facts] == list(range(1, len(facts) + 1)),
                    "named": sum(each.fact.artifact is not None for each in facts),
                    "damaged": sum(not _is_whole(boundary, each) for each in facts),
                    "answered otherwise": self._answered_otherwise(boundary, known, set(lost)),
                }
        finally:
            server.kill()

    def _answered_otherwise(
        self, boundary: PostgresBoundary, known: Mapping[str, FactConfirmation], lost: set[str]
    ) -> int:
        """How many of those that are there are not answered as they were when they are appended again."""
        kept = [told for name, told in known.items() if name not in lost]
        wrong = 0
        for begin in range(0, len(kept), 500):
            some = kept[begin : begin + 500]
            answers = boundary.append_facts([self._again(told) for told in some])
            for told, answer in zip(some, answers, strict=True):
                again = confirmed(answer)
                wrong += not again.duplicate or (again.offset, again.digest) != (told.offset, told.digest)
        return wrong

    def _again(self, told: FactConfirmation) -> tuple[Envelope, Fact]:
        number = told.message_id.removeprefix("m-")
        plain = stated(number, artifact=False)
        with_artifact = stated(number, artifact=True)
        # Which of the two it was is in its digest, and nowhere else.
        return plain if digest_of(*plain) == told.digest else with_artifact

    def wrong(self, left: Mapping[str, Any], enough: int) -> list[str]:
        found = []
        if left["confirmed"] < enough:
            found.append(f"only {left['confirmed']} facts were confirmed")
        if not left["dense"]:
            found.append("offsets have gaps")
        if not left["named"]:
            found.append("no fact names an artifact")
        if left["damaged"]:
            found.append(f"{left['damaged']} facts name an artifact that is missing or damaged")
        if left["answered otherwise"]:
            found.append(f"{left['answered otherwise']} facts are answered otherwise when they are appended again")
        return found + self._wrong_here(left)

    def _wrong_here(self, left: Mapping[str, Any]) -> list[str]:
        found = []
        if left["lost"]:
            found.append(f"{left['lost']} confirmed facts are lost")
        if left["durable"] is not True or left["refused unless told"]:
            found.append("a durable store was not called so")
        return found


class UndurableFacts(Facts):
    """The same where commits are not waited for: losses are what it is there for."""

    commit = "off"
    accept_loss = True

    def _wrong_here(self, left: Mapping[str, Any]) -> list[str]:
        found = []
        if not left["lost"]:
            found.append("nothing was lost with synchronous_commit off: the rig is blind")
        if left["durable"] is not False or not left["refused unless told"]:
            found.append("a store that loses facts was not refused, or not called so")
        return found


def _all_of(boundary: PostgresBoundary) -> list[StoredFact]:
    found: list[StoredFact] = []
    while some := boundary.fetch_facts("look", PAIR, 1000, after=found[-1].cursor if found else None):
        found += some
    return found


def _is_whole(boundary: PostgresBoundary, each: StoredFact) -> bool:
    named = each.fact.artifact
    if named is None:
        return True
    try:
        data = b"".join(boundary.get_object(named.bucket, named.key))
    except ErgonError:
        return False
    return data == content(named.key)
