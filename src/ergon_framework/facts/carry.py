"""Carrying: the script that copies artifacts from one store to another, several at a time. It never acts.

What is there is not copied again, and what is there in part is gone on with. A large artifact may take hours:
a copy is given up when nothing of it has moved for the policy's timeout, not when it is slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ergon_framework.engine.effects import Call, Script, call, gone, interrupt, spawn, wait
from ergon_framework.engine.outcome import Answer, Err, Expired, Ok, Stopped
from ergon_framework.errors import ErgonError
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.model import ArtifactReference, Stored
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replica import FaultyError, SilenceError

if TYPE_CHECKING:
    from ergon_framework.engine.slots import Slot, Slots


class LeftError(ErgonError):
    """Nobody waits for this copy any more."""

    code = "left"


class Progress:
    """How far a copy is, written by whoever makes it; and whether anybody still waits for it."""

    def __init__(self) -> None:
        self.bytes = 0
        self.left = False
        #: Whether whoever makes the copy has come back.
        self.over = False
        #: What reading has failed with: an error of the source, whatever the destination makes of it.
        self.unread: Exception | None = None

    def moved(self, piece: bytes) -> bytes:
        """*piece* goes to the destination."""
        if self.left:
            raise LeftError("nobody waits for this copy any more; what has come of it is kept to go on with")
        self.bytes += len(piece)
        return piece

    def through(self, pieces: Iterable[bytes]) -> Generator[bytes, None, None]:
        """*pieces*, watched."""
        try:
            for piece in pieces:
                yield self.moved(piece)
        except Exception as error:
            self.unread = error
            raise


class Name(NamedTuple):
    """By what an artifact is known in a store."""

    bucket: str
    key: str

    @classmethod
    def of(cls, reference: ArtifactReference) -> Name:
        return cls(reference.bucket, reference.key)


class Failed(NamedTuple):
    """An artifact is not here, and why."""

    error: BaseException
    at_source: bool


@dataclass(frozen=True, slots=True)
class CopyMeans:
    """By what artifacts are copied, of either flavour."""

    #: Bucket, key and what is expected: bytes that are here.
    received: Callable[[str, str, Stored], Any]
    #: The artifact, the byte to begin at, and where to tell how far it is.
    copy: Callable[[ArtifactReference, int, Progress], Any]


@dataclass(slots=True, eq=False)
class _Copy:
    reference: ArtifactReference
    #: When it was last seen to move, and at which byte.
    seen: float
    at: int = 0
    progress: Progress = field(default_factory=Progress)

    @property
    def expected(self) -> Stored:
        return Stored(self.reference.digest, self.reference.size)


class Carrying:
    """Copies artifacts between two stores, one call of ``run`` at a time."""

    def __init__(self, means: CopyMeans, *, policy: ReplicationPolicy, slots: Slots) -> None:
        self._means = means
        self._policy = policy
        self._slots = slots
        self._running: dict[Slot, _Copy] = {}
        self._left: list[Progress] = []
        #: Those that the store has said are here, and then was found not to have.
        self._doubted: set[Name] = set()
        #: Artifacts that were copied, and bytes that went over the line.
        self.copied = 0
        self.bytes = 0

    @property
    def held(self) -> int:
        """Copies that were given up and have not come back."""
        self._left = [progress for progress in self._left if not progress.over]
        return len(self._left)

    def doubt(self, name: Name) -> None:
        """The store says that it has it, and refuses the fact that names it: it is to be put there once more."""
        self._doubted.add(name)

    def run(self, references: Iterable[ArtifactReference]) -> Script[Mapping[Name, Failed]]:
        """Copy all; those that are not here afterwards. After the first failure no further one is begun."""
        told = self._slots.mailbox()
        todo = deque({Name.of(reference): reference for reference in references}.values())
        failed: dict[Name, Failed] = {}
        while todo or self._running:
            while todo and not failed and len(self._running) < self._policy.copies:
                copy = _Copy(todo.popleft(), self._slots.clock())
                self._running[(yield from spawn(self._copied(copy), told=told, counted=False))] = copy
            while todo and failed:
                failed[Name.of(todo.popleft())] = next(iter(failed.values()))
            if not self._running:
                break
            came = yield from wait(told, until=self._slots.clock() + self._policy.timeout / 4)
            if isinstance(came, Stopped):
                failed.update(self._not_begun(todo))
                yield from self._give_up(list(self._running))
                continue
            for done in came:
                # A body that leaves later is told of as well; it is no copy of ours any more.
                ended = self._running.pop(done.slot, None)
                if ended is not None and done.value is not None:
                    failed[Name.of(ended.reference)] = done.value
            yield from self._give_up([slot for slot, copy in self._running.items() if self._stalled(copy)])
        return failed

    @staticmethod
    def _not_begun(todo: deque[ArtifactReference]) -> dict[Name, Failed]:
        left = {Name.of(reference): Failed(LeftError("it was not begun"), at_source=True) for reference in todo}
        todo.clear()
        return left

    def _stalled(self, copy: _Copy) -> bool:
        now, progress = self._slots.clock(), copy.progress
        if progress.bytes != copy.at:
            copy.at, copy.seen = progress.bytes, now
        return not progress.left and now - copy.seen >= self._policy.timeout

    def _give_up(self, slots: Iterable[Slot]) -> Script[None]:
        for slot in slots:
            progress = self._running[slot].progress
            if not progress.left:
                progress.left = True
                self._left.append(progress)
                yield from interrupt(slot)

    def _copied(self, copy: _Copy) -> Script[Failed | None]:
        reference, name = copy.reference, Name.of(copy.reference)
        asked = Call(
            "received",
            self._means.received,
            (reference.bucket, reference.key, copy.expected),
            self._slots.clock() + self._policy.timeout,
        )
        answer = yield from self._asked(asked)
        if not isinstance(answer, Ok):
            copy.progress.over = True
            return Failed(_error(answer, self._policy.timeout), at_source=False)
        # None of the bytes of an empty one are missing, stored or not.
        begin = min(answer.value, reference.size)
        if name not in self._doubted and begin == reference.size > 0:
            copy.progress.over = True
            return None
        answer = yield from self._asked(Call("copy", self._means.copy, (reference, begin, copy.progress)))
        self.bytes += copy.progress.bytes
        if isinstance(answer, Ok):
            self._doubted.discard(name)
            self.copied += 1
            return None
        error = _error(answer, self._policy.timeout)
        if begin and isinstance(error, InvalidFactError):
            # Somebody else has gone on with this upload between our question and now.
            error = FaultyError(f"{reference.bucket}/{reference.key} could not be gone on with at byte {begin}")
        return Failed(error, at_source=error is copy.progress.unread or isinstance(error, SilenceError))

    def _asked(self, asked: Call) -> Script[Answer]:
        answer = yield from call(asked)
        if isinstance(answer, Stopped | Expired) and answer.body is not None:
            # Asked to leave, where that is possible; nobody waits for it.
            yield from gone(answer.body, self._slots.clock())
        return answer


def _error(answer: Answer, timeout: float) -> BaseException:
    if isinstance(answer, Err):
        return answer.error
    return SilenceError(f"nothing has come for {timeout:g} s, and it was given up")
