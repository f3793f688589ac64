"""What is seen of a loop: spans, metrics and log events, made of what the loop tells."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any

from ergon_framework.connectors.base import Later, MissingKeyError
from ergon_framework.connectors.outage import OutageLog, outage_log
from ergon_framework.errors import Category, ConnectionLost
from ergon_framework.failure import error_type_of
from ergon_framework.task.outline import Outline, StepOutline, consuming, producing
from ergon_framework.task.report import Kind
from ergon_framework.task.rounds import Rounds
from ergon_framework.task.tally import count
from ergon_framework.task.watch import Onlooker
from ergon_framework.task.watched import Attempts, Unrecorded, Watched, blame, forget, tracebacks_of
from ergon_framework.telemetry import logs, names, redaction
from ergon_framework.telemetry.metrics import Counts, registry_of
from ergon_framework.telemetry.names import Attribute, Event, Field
from ergon_framework.telemetry.options import TelemetryOptions, options_of
from ergon_framework.telemetry.spans import Node, tracing
from ergon_framework.telemetry.tracebacks import ExcInfo, to_exc_info

if TYPE_CHECKING:
    from ergon_framework.connectors.base import Delivery, SettleResult
    from ergon_framework.engine.attempts import Note, StepWatch
    from ergon_framework.task.lifecycle import Watch
    from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy
    from ergon_framework.task.report import End, Outcome
    from ergon_framework.transaction import Transaction

log = logging.getLogger(__name__)

#: Longest reason of a pause that is kept.
REASON = 100
#: Seconds between two errors in the log about one missing key.
MISSING_KEY_INTERVAL_SECONDS = 60.0
#: Keys that are logged so within one interval: their ids come from messages, and a producer can invent any number.
MAX_MISSING_KEYS = 100

#: How loud the end of a transaction is; a success makes no sound.
_EVENTS = {
    Kind.FAILED: (logging.WARNING, Event.TRANSACTION_FAILED),
    Kind.HANDLER_FAILED: (logging.ERROR, Event.TRANSACTION_FAILED),
    Kind.DEFERRED: (logging.INFO, Event.TRANSACTION_DEFERRED),
    Kind.RELEASED: (logging.INFO, Event.TRANSACTION_RELEASED),
}


def observing(task: object, policy: ConsumerPolicy, *, fenced: Callable[[], int] | None = None) -> Onlooker:
    """Who looks on a consume loop of *task*; *fenced* says how many bodies came back too late."""
    outline = consuming(_name(task), policy)
    return Observer(outline, options_of(task), streaming=policy.loop.streaming, fenced=fenced, outage=_outage_log(task))


def observing_produce(task: object, policy: ProducerPolicy, *, fenced: Callable[[], int] | None = None) -> Onlooker:
    """Who looks on a produce call of *task*."""
    return Observer(producing(_name(task), policy), options_of(task), streaming=False, fenced=fenced)


def safely(callback: Callable[[Outcome], None]) -> Callable[[Outcome], None]:
    """*callback*, whose failures are logged: they must not end the loop that reports to it."""

    def told(outcome: Outcome) -> None:
        try:
            callback(outcome)
        except BaseException as error:  # noqa: BLE001 - the callback is foreign code
            logs.say(logging.ERROR, Event.CALLBACK_FAILED, _ids(outcome.transaction), to=log, exc_info=error)

    return told


class Observer(Onlooker):
    """Looks on one loop."""

    def __init__(
        self,
        outline: Outline,
        options: TelemetryOptions,
        *,
        streaming: bool,
        fenced: Callable[[], int] | None,
        outage: OutageLog | None = None,
    ) -> None:
        self._outline = outline
        self.options = options
        self._outage = outage
        self._tracing = tracing(options, consumer=outline.kind == "consumer")
        # What is given to be produced may carry a trace already, but it is made here: its span belongs to the call.
        self._continues = outline.kind == "consumer"
        self._rounds = None if self._tracing is None else Rounds(self._tracing, outline, streaming=streaming)
        self._registry = registry_of(options.meter_provider)
        self._counts = self._registry.counts(outline.task, steps=(*outline.steps, "settle"), everyday=outline.everyday)
        self._counts.fenced = fenced
        self._unseen: Unrecorded | None = None
        #: Where to find what has ended and is not settled, by the identity of its outcome.
        self._nodes: dict[int, Node] = {}
        self._warned = False
        #: By the id of a missing key, when it was last logged as an error.
        self._missed: dict[str, float] = {}

    # -- the loop -------------------------------------------------------------------------------

    def began(self, slots: Callable[[], tuple[int, int, int]]) -> None:
        self._counts.usage = slots
        self._registry.open(self._counts)

    def batch(self, size: int) -> None:
        if self._rounds is not None:
            self._rounds.begin(size)

    def fetching(self) -> StepWatch:
        root = None if self._rounds is None else self._rounds.present
        outline = self._outline.steps["fetch"]
        self._fetching = Fetching(root, outline, counts=self._counts, options=self.options, outage=self._outage)
        return self._fetching

    def on_fetch_retry(self, number: int, error: BaseException, delay: float) -> None:
        self._failed_attempt({Field.STEP: "fetch"}, number, error, delay=delay)

    def fetched(self, deliveries: Sequence[Delivery] | None, error: BaseException | None) -> None:
        counts = self._counts
        self._fetching.over(None if deliveries is None else len(deliveries), error)
        if self._rounds is not None:
            self._rounds.brought(deliveries or ())
        if error is not None:
            counts.add(names.FAILED_FETCHES)
            self._say(logging.ERROR, Event.FETCH_FAILED, self._blame(error))
        elif deliveries is not None:
            counts.add(names.FETCHES)
            if not deliveries:
                counts.add(names.EMPTY_FETCHES)
            self._aged(deliveries)

    def _aged(self, deliveries: Sequence[Delivery]) -> None:
        born = [made for delivery in deliveries if (made := delivery.transaction.created_at) is not None]
        if born:
            self._counts.aged(max(0.0, time.time() - min(born)))

    def breach(self, asked: int, got: int) -> None:
        self._counts.add(names.BREACHES)
        if not self._warned:
            self._warned = True
            self._say(logging.WARNING, Event.CONTRACT_BREACH, {Field.ASKED: asked, Field.GOT: got})

    def paused(self, reason: str | None) -> None:
        if reason is None:
            self._counts.paused = None
            self._say(logging.INFO, Event.LOOP_RESUMED, {})
            return
        self._counts.paused = redaction.shown(self.options.redact, Attribute.REASON, reason)[:REASON]
        self._say(logging.WARNING, Event.LOOP_PAUSED, {Field.REASON: self._counts.paused})

    def over(self, end: End) -> None:
        if self._rounds is not None:
            self._rounds.close({Attribute.END: end.value})
        self._registry.close(self._counts)
        self._nodes.clear()
        self._say(logging.INFO, Event.LOOP_ENDED, {Field.END: end.value})

    # -- a transaction --------------------------------------------------------------------------

    def begin(self, transaction: Transaction, delivery: Delivery | None) -> Watch | None:  # noqa: ARG002 - nothing of it is shown
        if self._tracing is None or self._rounds is None:
            return None
        outline = self._outline
        root = self._rounds.of(transaction)
        carrier = transaction.trace if self._continues else None
        if root is not None and not root.recording and not carrier:
            return self._below(root)
        own = {Attribute.TRANSACTION_ID: transaction.id}
        told = {Attribute.TASK: outline.task, Attribute.TRANSACTION_ID: transaction.id}
        node = self._tracing.transaction(outline.transaction, root, carrier, told)
        if not node.recording:
            return Unrecorded(node, self._remember)
        if self.options.record_payloads:
            shown = redaction.shown(self.options.redact, Attribute.PAYLOAD, transaction.payload)
            node.tell({Attribute.PAYLOAD: shown})
        return Watched(node, outline, own, options=self.options, remember=self._remember)

    def _below(self, root: Node) -> Unrecorded:
        """For all transactions of a root that nobody sees: asking for a span costs more than all the rest."""
        found = self._unseen
        if found is None or found.node is not root:
            self._unseen = found = Unrecorded(root, self._remember)
        return found

    def _remember(self, outcome: Outcome, node: Node) -> None:
        self._nodes[id(outcome)] = node

    def on_retry(self, transaction: Transaction, note: Note) -> None:
        self._failed_attempt(_ids(transaction) | {Field.STEP: note.step}, note.attempt, note.error, delay=note.delay)

    def trace_id(self, outcome: Outcome) -> str | None:
        node = self._nodes.get(id(outcome))
        found = None if node is None else node.ids
        return None if found is None else found[0]

    def refused(self, delivery: Delivery, reason: str) -> None:
        self._counts.add(names.REFUSED, reason)
        if self._rounds is not None:
            self._rounds.ended(delivery.transaction)
        fields = {Field.REASON: reason, Field.DELIVERIES: delivery.deliveries}
        self._say(logging.WARNING, Event.TRANSACTION_REFUSED, _ids(delivery.transaction) | fields)

    def settled(self, results: list[SettleResult], seconds: float) -> None:
        counts = self._counts
        counts.durations["settle"].add(seconds)
        for result in set(results):
            counts.add(names.SETTLED, result.value, amount=results.count(result))

    def ended(self, outcome: Outcome) -> None:
        count(self._counts, outcome)
        node = None
        if self._rounds is not None:
            node = self._nodes.pop(id(outcome), None)
            self._rounds.ended(outcome.transaction)
        if outcome.kind is not Kind.SUCCEEDED:
            level, event = _EVENTS[outcome.kind]
            if isinstance(outcome.error, MissingKeyError):
                level = self._level_of_missing(outcome.error.key_id)
            if logs.log.isEnabledFor(level):
                self._say(level, event, self._fields(outcome, node), self._to_exception(outcome))

    def _level_of_missing(self, key_id: str) -> int:
        """Return ERROR once a minute for each key: an operator must see it, and every message of the key says it."""
        now = time.monotonic()
        if now < self._missed.get(key_id, -math.inf) + MISSING_KEY_INTERVAL_SECONDS:
            return logging.INFO
        if len(self._missed) >= MAX_MISSING_KEYS:
            since = now - MISSING_KEY_INTERVAL_SECONDS
            self._missed = {known: at for known, at in self._missed.items() if at > since}
            if len(self._missed) >= MAX_MISSING_KEYS:
                return logging.INFO
        self._missed[key_id] = now
        return logging.ERROR

    # -- what is logged -------------------------------------------------------------------------

    def _failed_attempt(self, which: dict[str, Any], number: int, error: BaseException, *, delay: float | None) -> None:
        if logs.log.isEnabledFor(logging.INFO):
            # People count attempts from 1.
            fields = {Field.ATTEMPT: number + 1, Field.DELAY: delay}
            self._say(logging.INFO, Event.ATTEMPT_FAILED, which | fields | self._blame(error))

    def _say(self, level: int, event: str, fields: dict[str, Any], raised: tuple[ExcInfo, str] | None = None) -> None:
        logs.say(level, event, {Field.TASK: self._outline.task, **fields}, raised=raised)

    def _to_exception(self, outcome: Outcome) -> tuple[ExcInfo, str] | None:
        """The error of a failed transaction with its traceback; a BUSINESS failure is a decision, and has none here."""
        error, handler_error = outcome.error, outcome.handler_error
        if error is None or outcome.kind not in (Kind.FAILED, Kind.HANDLER_FAILED):
            return None
        if handler_error is None and error.category is Category.BUSINESS:
            return None
        first, second = tracebacks_of(outcome, self.options)
        shown = [] if first is None else [first]
        if handler_error is not None and second is not None:
            error = handler_error
            shown.append(f"the exception handler failed too:\n{second}")
        return (to_exc_info(error, self.options), "\n\n".join(shown)) if shown else None

    def _fields(self, outcome: Outcome, node: Node | None) -> dict[str, Any]:
        transaction, settlement = outcome.transaction, outcome.settlement
        trace_id, span_id = (node.ids if node is not None else None) or (None, None)
        return (
            _ids(transaction)
            | {
                Field.OUTCOME: outcome.kind.value,
                Field.ATTEMPTS: outcome.attempts,
                Field.REASON: outcome.reason,
                Field.STEP: outcome.failed_step,
                Field.STARTED: outcome.started if outcome.kind is Kind.RELEASED else None,
                Field.STILL_RUNNING: outcome.still_running or None,
                Field.DELAY: settlement.delay if isinstance(settlement, Later) else None,
                Field.TRACE_ID: trace_id,
                Field.SPAN_ID: span_id,
            }
            | self._blame(outcome.error)
            | self._blame_handler(outcome.handler_error)
        )

    def _blame(self, error: BaseException | None) -> dict[str, Any]:
        if error is None:
            return {}
        category = getattr(error, "category", None)
        return {
            Field.ERROR: self._message(error),
            Field.ERROR_TYPE: error_type_of(error),
            Field.CATEGORY: None if category is None else category.value,
            Field.CODE: getattr(error, "code", None),
        }

    def _blame_handler(self, error: BaseException | None) -> dict[str, Any]:
        if error is None:
            return {}
        return {
            Field.HANDLER_ERROR: self._message(error),
            Field.HANDLER_ERROR_TYPE: type(error.__cause__ or error).__name__,
        }

    def _message(self, error: BaseException) -> str:
        hook, values = self.options.redact, self.options.record_payloads
        return redaction.message(hook, Attribute.EXCEPTION_MESSAGE, error, values=values)


class Fetching:
    """One fetch: its attempts are always counted, and are spans where there is a root to hold them."""

    def __init__(
        self,
        root: Node | None,
        outline: StepOutline,
        *,
        counts: Counts,
        options: TelemetryOptions,
        outage: OutageLog | None,
    ) -> None:
        self._counts = counts
        self._outage = outage
        self._called = 0.0
        self._options = options
        self._began = time.perf_counter()
        self._made = 0
        self._node: Node | None = None
        self._spans: Attempts | Unrecorded | None = None
        if root is None:
            return
        if root.recording:
            self._node = root.child(outline.name)
        if self._node is not None and self._node.recording:
            self._spans = Attempts(self._node, outline, {}, options)
        else:
            self._spans = Unrecorded(self._node or root, forget)

    def attempt(self, number: int) -> Context | None:
        self._made += 1
        self._called = time.monotonic()
        return None if self._spans is None else self._spans.attempt(number)

    def attempted(self, number: int, error: BaseException | None) -> None:
        if self._spans is not None:
            self._spans.attempted(number, error)
        if self._outage is None:
            return
        if error is None:
            self._outage.note_answer(began=self._called)
        elif isinstance(error.__cause__, ConnectionLost):
            self._outage.note_failure(error.__cause__, began=self._called)

    def over(self, got: int | None, error: BaseException | None) -> None:
        counts = self._counts
        counts.durations["fetch"].add(time.perf_counter() - self._began)
        counts.add(names.ATTEMPTS, "fetch", amount=self._made)
        if self._made > 1:
            counts.add(names.RETRIES, "fetch", amount=self._made - 1)
        if self._node is not None:
            if got is not None:
                self._node.tell({Attribute.BATCH_FETCHED: got})
            if error is not None:
                blame(self._node, error, self._options)
            self._node.end()


def _outage_log(task: object) -> OutageLog | None:
    connector = getattr(task, "connector", None)
    return None if connector is None else outage_log(connector.name, connector.server_address)


def _ids(transaction: Transaction) -> dict[str, Any]:
    """Return the fields that say which transaction a record is about."""
    return {
        Field.TRANSACTION_ID: transaction.id,
        Field.SOURCE: transaction.source,
        Field.CORRELATION_ID: transaction.correlation,
        Field.TENANT_ID: transaction.tenant,
    }


def _name(task: object) -> str:
    return str(getattr(task, "name", type(task).__name__))
