"""Asking: calls side by side, at most one of each kind, none of them waited for for ever. It never acts.

Whoever decides what is asked, and what follows from the answers, builds on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from ergon_framework.engine.effects import Call, Script, call, gone, spawn
from ergon_framework.engine.outcome import Answer, Err, Expired, Stopped
from ergon_framework.engine.slots import Done
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replica import SilenceError, Status, Trouble

if TYPE_CHECKING:
    from ergon_framework.engine.slots import Slot, Slots

#: Calls that were given up and have not come back; from so many on, nothing is begun before one of them has.
HELD: Final = 16


class Step(StrEnum):
    """What is asked of the two stores."""

    END = "end_of"
    FETCH = "fetch_facts"
    KNOWN = "get_fact"
    COPY = "copy"
    FORWARD = "forward_facts"
    CONFIRM = "confirm_receipt"
    SURVEY = "survey"

    @property
    def at_source(self) -> bool:
        """Whether it goes over the line."""
        return self in _AT_SOURCE


_AT_SOURCE: Final = frozenset((Step.FETCH, Step.COPY, Step.CONFIRM, Step.SURVEY))


class Course:
    """How one kind of call goes: failures in a row, when it may be made again, and what is in the way."""

    __slots__ = ("attempts", "trouble", "until")

    def __init__(self) -> None:
        self.attempts = 0
        self.until = 0.0
        self.trouble: Trouble | None = None

    @property
    def halted(self) -> bool:
        return self.trouble is not None and self.trouble.status.halted

    def well(self) -> None:
        # What stands still does so until it is started again.
        if not self.halted:
            self.attempts, self.until, self.trouble = 0, 0.0, None


class Asking:
    """Makes calls beside one script, whose mailbox is told what came of them."""

    def __init__(self, *, policy: ReplicationPolicy, slots: Slots) -> None:
        self._policy = policy
        self._slots = slots
        self._clock = slots.clock
        self._mailbox = slots.mailbox()
        self._courses = {step: Course() for step in Step}
        self._busy: dict[Step, Slot] = {}
        #: Calls that were given up and have not come back.
        self._held = 0
        #: How often something failed, by what it means.
        self.troubles: dict[Status, int] = {}

    def _ask(
        self, step: Step, fn: Callable[..., Any], args: tuple[Any, ...], told: Callable[[Any], None]
    ) -> Script[None]:
        """Make one call beside this script, unless one of its kind is under way or has just failed."""
        if self._may(step):
            made = Call(step.value, fn, args, self._clock() + self._policy.timeout)
            yield from self._beside(step, self._asked(step, made, told))

    def _may(self, step: Step) -> bool:
        return step not in self._busy and self._clock() >= self._courses[step].until

    def _beside(self, step: Step, script: Script[tuple[Step, Callable[[Any], None], Answer]]) -> Script[None]:
        self._busy[step] = yield from spawn(script, told=self._mailbox, counted=False)

    def _asked(
        self, step: Step, made: Call, told: Callable[[Any], None]
    ) -> Script[tuple[Step, Callable[[Any], None], Answer]]:
        answer = yield from call(made)
        if isinstance(answer, Stopped | Expired) and answer.body is not None:
            # Asked to leave, where that is possible; nobody waits for it.
            yield from gone(answer.body, self._clock())
        return step, told, answer

    def _returned(self, item: Any) -> tuple[Step, Callable[[Any], None], Answer] | None:
        """What came of a call; None if it is one that was given up before, and has left now."""
        if not isinstance(item, Done):
            self._held -= 1
            return None
        self._held += not item.freed
        step, told, answer = item.value
        if self._busy.get(step) is item.slot:
            del self._busy[step]
        return step, told, answer

    def _any(self, *steps: Step) -> bool:
        """Whether a call of one of these kinds is under way."""
        return not self._busy.keys().isdisjoint(steps)

    def _slots_of(self, steps: Collection[Step]) -> list[Slot]:
        return [slot for step, slot in self._busy.items() if step in steps]

    def _error(self, step: Step, answer: Answer) -> BaseException:
        if isinstance(answer, Err):
            return answer.error
        return SilenceError(
            f"{step.value} has not answered for {self._policy.timeout:g} s, and nobody waits for it any more"
        )

    def _failed(self, step: Step, trouble: Trouble) -> None:
        course = self._courses[step]
        delay = self._policy.delay(course.attempts, self._slots.senses.dice)
        course.until = self._clock() + max(delay, trouble.retry_after)
        course.attempts += 1
        course.trouble = trouble
        self.troubles[trouble.status] = self.troubles.get(trouble.status, 0) + 1

    def _trouble(self) -> Trouble | None:
        found = [course.trouble for course in self._courses.values() if course.trouble is not None]
        # What stands still for ever is said before what may pass.
        return min(found, key=lambda trouble: not trouble.status.halted, default=None)

    @property
    def _halted(self) -> bool:
        return any(course.halted for course in self._courses.values())
