"""The thread driver: bodies on real threads."""

from __future__ import annotations

from contextvars import copy_context
from typing import Any

from ergon_framework import scope
from ergon_framework.engine.drivers.bodies import checked
from ergon_framework.engine.drivers.daemons import DaemonExecutor, ShutDownError
from ergon_framework.engine.drivers.waiting import RealTime, Waiting
from ergon_framework.engine.effects import NEVER, Call, R, Script
from ergon_framework.engine.outcome import Answer, Err, Ok
from ergon_framework.engine.slots import Mailbox, Slot, Slots


class Threads(Slots):
    """Runs scripts on threads: *concurrency* of them for the counted ones, and aides.

    An aide runs what concurrency does not bound (fetching, settling), and the continuation of a
    script whose own thread is still occupied by a body that will not leave. Threads are abandoned,
    never killed.
    """

    def __init__(self, concurrency: int, *, name: str = "ergon", waiting: Waiting | None = None) -> None:
        waiting = waiting or RealTime()
        super().__init__(waiting.senses)
        self._context = copy_context()
        self._workers = DaemonExecutor(concurrency, name=f"{name}-worker", waiting=waiting)
        self._aides = DaemonExecutor(name=f"{name}-aide", waiting=waiting)
        self._alarm = waiting.alarm()
        self._over = waiting.alarm()
        self._result: tuple[Any, BaseException | None] | None = None

    def run(self, script: Script[R]) -> R:
        """Perform *script* to its end. Ctrl-C stops it as ``stop`` does, and is raised when it has ended.

        The caller's thread only waits: an interrupt that struck it in the middle of a decision
        would leave that decision half made.
        """
        try:
            interrupted = self._run(script)
        finally:
            # Whatever struck this thread: nothing may go on behind the caller's back.
            self._close()
        if interrupted is not None:
            raise interrupted
        value: Any
        value, failure = self._result or (None, None)
        if failure is not None:
            raise failure
        result: R = value
        return result

    def _run(self, script: Script[Any]) -> KeyboardInterrupt | None:
        interrupted: KeyboardInterrupt | None = None
        self._aides.execute(self._watch)
        self.start(script)
        while self._result is None:
            try:
                self._over.wait(None)
            except KeyboardInterrupt as error:
                if interrupted is not None:
                    raise
                interrupted = error
                self.halt()
        return interrupted

    def stop(self) -> None:
        self.halt()

    def signal(self, mailbox: Mailbox, item: Any) -> None:
        mailbox.put(item, urgent=True)

    def resume(self, slot: Slot, answer: Any) -> None:
        if self._closed:
            return
        # The slot's own thread is free unless one of its bodies still occupies it.
        executor = self._workers if slot.counted and not slot.bodies else self._aides
        try:
            executor.execute(self._drive, slot, answer)
        except ShutDownError:
            return  # closed just now
        except RuntimeError as error:
            # The machine gives no thread at all: there is nobody to go on with, and the caller must know.
            self._finish(None, error)

    def _drive(self, slot: Slot, answer: Any) -> None:
        call = self.advance(slot, answer)
        while call is not None:
            told = self.returned(slot, call, self._made(call))
            if told is None:
                return
            call = self.advance(slot, told)

    def _made(self, call: Call) -> Answer:
        context = call.context or self._context.copy()
        try:
            return Ok(context.run(_body, call))
        except BaseException as error:  # noqa: BLE001 - an answer is data; the script classifies it
            return Err(error)

    def _watch(self) -> None:
        while not self._closed:
            due = self.watcher.look(self)
            self._alarm.wait(None if due == NEVER else max(0.0, due - self.clock()))

    def _poke(self, until: float) -> None:  # noqa: ARG002 - the alarm has no time of its own
        self._alarm.ring()

    def _finish(self, value: Any, error: BaseException | None) -> None:
        with self.lock:
            if self._result is None:
                self._result = value, error
        self._over.ring()

    def _close(self) -> None:
        self.close()
        self._alarm.ring()
        self._workers.shutdown(wait=False)
        self._aides.shutdown(wait=False)


def _body(call: Call) -> Any:
    scope.enter(call.scope)
    return checked(call.fn(*call.args))
