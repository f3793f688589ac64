"""The thread driver: it runs scripts, and the handler calls that they request, on real threads.

A script is a generator that decides and yields effects (a call, a wait); the driver performs them. A slot is one script
in progress, and a mailbox is a queue of events for one script. The base class Scheduler decides when a script
continues.
"""

from __future__ import annotations

from contextvars import copy_context
from typing import Any

from ergon_framework import scope
from ergon_framework.clock import RealTime, ThreadClock
from ergon_framework.engine.daemon_executor import DaemonExecutor, ShutDownError
from ergon_framework.engine.effects import NEVER, Call, CallResult, Err, Ok, R, Script, reject_unstarted_coroutine
from ergon_framework.engine.scheduler import Mailbox, Scheduler, Slot


class ThreadDriver(Scheduler):
    """Runs scripts on threads: *concurrency* worker threads for counted scripts, and helper threads.

    A counted script is the lifecycle of one transaction. A helper thread runs scripts outside the concurrency limit
    (fetching, settling), and continues a script whose own thread is still occupied by a call after its timeout. Threads
    are abandoned, never killed. *waiting* starts the threads and creates what they wait on; tests pass virtual time.
    """

    def __init__(self, concurrency: int, *, name: str = "ergon", waiting: ThreadClock | None = None) -> None:
        waiting = waiting or RealTime()
        super().__init__(waiting.time_source)
        self._context = copy_context()
        self._workers = DaemonExecutor(concurrency, name=f"{name}-worker", waiting=waiting)
        self._helpers = DaemonExecutor(name=f"{name}-helper", waiting=waiting)
        self._timer_wakeup = waiting.create_wakeup()
        self._end_wakeup = waiting.create_wakeup()
        self._result: tuple[Any, BaseException | None] | None = None

    def run(self, script: Script[R]) -> R:
        """Run *script* to its end. Ctrl-C stops it as ``stop`` does, and is raised when the script has ended.

        The caller's thread only waits: an interrupt in the middle of a decision would leave shared state half
        changed.
        """
        try:
            interrupted = self._run(script)
        finally:
            # After any exception in this thread too, nothing may continue in the background.
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
        self._helpers.submit_nowait(self._run_timer)
        self.start(script)
        while self._result is None:
            try:
                self._end_wakeup.wait(None)
            except KeyboardInterrupt as error:
                if interrupted is not None:
                    raise
                interrupted = error
                self.interrupt_root()
        return interrupted

    def stop(self) -> None:
        self.interrupt_root()

    def put_from_any_thread(self, mailbox: Mailbox, item: Any) -> None:
        mailbox.put(item, urgent=True)

    def resume(self, slot: Slot, answer: Any) -> None:
        if self._closed:
            return
        # The slot's own thread is free unless an abandoned call still occupies it.
        executor = self._workers if slot.counted and not slot.abandoned_calls else self._helpers
        try:
            executor.submit_nowait(self._run_slot, slot, answer)
        except ShutDownError:
            return  # closed concurrently
        except RuntimeError as error:
            # The system cannot start a thread: the run cannot continue, and the caller must get the error.
            self._finish(None, error)

    def _run_slot(self, slot: Slot, answer: Any) -> None:
        call = self.step(slot, answer)
        while call is not None:
            next_answer = self.accept_result(slot, call, self._run_call(call))
            if next_answer is None:
                return
            call = self.step(slot, next_answer)

    def _run_call(self, call: Call) -> CallResult:
        context = call.context or self._context.copy()
        try:
            return Ok(context.run(_run_scoped, call))
        except BaseException as error:  # noqa: BLE001 - a result is data; the script classifies it
            return Err(error)

    def _run_timer(self) -> None:
        while not self._closed:
            due = self.deadline_timer.fire_due(self)
            self._timer_wakeup.wait(None if due == NEVER else max(0.0, due - self.monotonic()))

    def _reschedule_timer(self, until: float) -> None:  # noqa: ARG002 - the timer thread computes the next deadline itself
        self._timer_wakeup.set()

    def _finish(self, value: Any, error: BaseException | None) -> None:
        with self.lock:
            if self._result is None:
                self._result = value, error
        self._end_wakeup.set()

    def _close(self) -> None:
        self.close()
        self._timer_wakeup.set()
        self._workers.shutdown(wait=False)
        self._helpers.shutdown(wait=False)


def _run_scoped(call: Call) -> Any:
    scope.set_scope(call.scope)
    return reject_unstarted_coroutine(call.fn(*call.args))
