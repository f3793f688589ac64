"""Which providers a transaction waits for or failed by, how they are now, and what somebody may do about it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ergon_framework.cli.dlq_view import told
from ergon_framework.cli.provider_work import ALL
from ergon_framework.history import History, Kind, State
from ergon_framework.providers.base import Provider
from ergon_framework.providers.execution import NO_TENANT
from ergon_framework.providers.health import NOT_CALLED
from ergon_framework.providers.standing import Cause, Hold, Standing

#: Seconds by which the end of a hold and the moment a transaction comes back may differ: clocks, and the way between.
_NEAR: Final = 5.0
_WAITING: Final = frozenset({State.DELAYED, State.READY, State.QUEUED})
_ENDED_BADLY: Final = frozenset({State.DEAD, State.FAILED})

#: Asks how the providers of a tenant are: those named, or all that hold calls back. None where nobody can say.
Ask = Callable[[str, Sequence[tuple[str, str]]], Sequence[Standing] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Involved:
    """A provider that has to do with a transaction, and how it is now.

    *known* says by what: "failure", the record of the dead letter; "call", an attempt that was written down; "uses",
    what the task says; "moment", nothing but that it ends its hold when the transaction comes back.
    """

    tenant: str
    provider: str
    capability: str
    known: str
    operation: str | None = None
    #: Why the call was not made, or failed.
    reason: str | None = None
    #: None where nobody can say.
    standing: Standing | None = None

    @property
    def account(self) -> tuple[str, str]:
        return self.provider, self.capability

    @property
    def hold(self) -> Hold | None:
        """What keeps calls back the longest."""
        return self.standing.holds[0] if self.standing is not None and self.standing.holds else None


def used_by(gates: Iterable[Any]) -> list[tuple[str, str]]:
    """The providers that a task ``uses``: it knows them by their gates."""
    owners = (getattr(gate, "__self__", None) for gate in gates)
    return [(owner.provider_name, owner.capability) for owner in owners if isinstance(owner, Provider)]


def involved_in(
    history: History, others: Sequence[History], used: Sequence[tuple[str, str]], ask: Ask
) -> list[Involved]:
    """The providers that *history* waits for or failed by; *others* are what was found besides it."""
    if history.kind is not Kind.TRANSACTION or history.place.state not in _WAITING | _ENDED_BADLY:
        return []
    tenant = str(history.about.get("tenant", NO_TENANT))
    if history.place.state in _ENDED_BADLY:
        return _standing(_by_failure(history, tenant), ask)
    if history.place.state is State.QUEUED and any(_same(history, other) for other in others):
        return []  # its queue itself has told more
    found = _standing(_by_calls(history, others), ask)
    if found or _explained(history):
        return found
    return _by_use(history, tenant, used, ask) if used else _by_moment(history, tenant, ask)


def _same(history: History, other: History) -> bool:
    known = other.kind is history.kind and other.place.state in _WAITING - {State.QUEUED}
    return known and (other.id, other.where) == (history.id, history.where)


def _explained(history: History) -> bool:
    """Whether it comes back when its last attempt has said."""
    until, last = history.place.until, history.events[-1] if history.events else None
    if until is None or last is None or last.at is None or "delay" not in last.values:
        return False
    return abs(last.at + float(last.values["delay"]) - until) <= _NEAR


def _by_failure(history: History, tenant: str) -> list[Involved]:
    about = history.about
    if "provider" not in about or "capability" not in about:
        return []
    return [
        Involved(
            tenant=tenant,
            provider=str(about["provider"]),
            capability=str(about["capability"]),
            operation=str(about["operation"]) if "operation" in about else None,
            reason=history.place.words or None,
            known="failure",
        )
    ]


def _by_calls(history: History, others: Sequence[History]) -> list[Involved]:
    """Of each provider the last call of the same process, unless it succeeded."""
    process = history.about.get("correlation", history.id)
    mine = history.about.get("tenant")
    last: dict[tuple[str, str], Involved | None] = {}
    for call in others:
        about = call.about
        if call.kind is not Kind.CALL or call.id != process or "provider" not in about or not call.events:
            continue
        if mine is not None and about["tenant"] != mine:
            continue
        one = Involved(
            tenant=str(about["tenant"]),
            provider=str(about["provider"]),
            capability=str(about["capability"]),
            operation=str(about["operation"]),
            reason=call.events[-1].words or None,
            known="call",
        )
        last[one.account] = None if call.place.state is State.SUCCEEDED else one
    return [one for one in last.values() if one is not None]


def _by_use(history: History, tenant: str, used: Sequence[tuple[str, str]], ask: Ask) -> list[Involved]:
    """Those that hold calls back now: of the others there is nothing to say."""
    named = [Involved(tenant=tenant, provider=one, capability=what, known="uses") for one, what in dict.fromkeys(used)]
    held = [one for one in _standing(named, ask) if one.hold is not None]
    if history.place.state is State.READY:
        # Whatever else is held back, this one was not taken yet: only a closed gate keeps it where it is.
        return [one for one in held if _gated(one) is not None]
    return [one for one in held if _at_moment(one.standing, history)] or held


def _gated(one: Involved) -> Hold | None:
    """The breaker of all tenants, if it is open: a task that uses the provider then fetches nothing."""
    holds = () if one.standing is None else one.standing.holds
    return next((hold for hold in holds if hold.shared and hold.cause in {Cause.BREAKER, Cause.OPERATOR}), None)


def _by_moment(history: History, tenant: str, ask: Ask) -> list[Involved]:
    if history.place.state is not State.DELAYED:
        return []
    return [
        Involved(tenant=tenant, provider=one.provider, capability=one.capability, known="moment", standing=one)
        for one in ask(tenant, ()) or ()
        if _at_moment(one, history)
    ]


def _at_moment(standing: Standing | None, history: History) -> bool:
    until, holds = history.place.until, () if standing is None else standing.holds
    return until is not None and any(hold.until is not None and abs(hold.until - until) <= _NEAR for hold in holds)


def _standing(found: Sequence[Involved], ask: Ask) -> list[Involved]:
    answered: list[Involved] = []
    for one in found:
        said = ask(one.tenant, [one.account])
        answered.append(one if not said else replace(one, standing=said[0]))
    return answered


# -- what is said -----------------------------------------------------------------------------------


def seen_of(one: Involved) -> str:
    """A line on one provider: whose, what happened to the call, what holds calls back, and what went wrong lately."""
    perhaps = "perhaps " if one.known == "moment" else ""
    words = [f"{perhaps}{one.provider} ({one.capability}) of tenant {one.tenant}: {_called(one)}{_now(one)}"]
    if one.standing is not None:
        words += _lately(one.standing)
    return "; ".join(words)


def _called(one: Involved) -> str:
    if one.reason is None or one.operation is None:
        return ""
    if one.reason in NOT_CALLED:
        return f"{one.operation} was not called ({one.reason}); "
    return f"{one.operation} failed ({one.reason}); "


def _now(one: Involved) -> str:
    if one.standing is None:
        return "how it is now is not known"
    if not one.standing.holds:
        return "nothing holds its calls back now"
    return "; ".join(_held(hold) for hold in one.standing.holds)


def _held(hold: Hold) -> str:
    shared = " of all tenants" if hold.shared else ""
    until = "" if hold.until is None else f" until {told(hold.until)}"
    match hold.cause:
        case Cause.QUOTA:
            used = "" if hold.used is None else f", {hold.used} of {hold.limit} used"
            return f"the quota{shared} per {hold.window} is spent{until}{used}"
        case Cause.OPERATOR:
            return f"an operator keeps the breaker{shared} open{until}"
        case Cause.PROBING:
            return f"the breaker{shared} is half open: only probes go through{_faults(hold)}"
        case Cause.BREAKER:
            return f"the breaker{shared} is open{until}{_faults(hold)}"


def _faults(hold: Hold) -> str:
    return "" if hold.faults is None else f", {hold.faults} faults in a row"


def _lately(standing: Standing) -> list[str]:
    if standing.failures:
        counts = ", ".join(f"{reason} {count}" for reason, count in standing.failures.items())
        return [f"failed in the last hour: {counts}"]
    if standing.last_error is not None and standing.last_error_at is not None:
        return [f"the last error was {standing.last_error} at {told(standing.last_error_at)}"]
    return []


def advised(history: History, found: Sequence[Involved], advice: str) -> str:
    """*advice* with what is to be done about the providers of *history*."""
    if not found:
        return advice
    one = next((one for one in found if one.hold is not None), found[0])
    look = f"look at the provider: {_look(one)}"
    if history.place.state in _ENDED_BADLY:
        return f"{look}; {advice}" if advice else look
    if one.hold is None or (history.place.state is State.READY and one.known != "uses"):
        return f"{advice}; {look}" if advice else look
    waits = "it is fetched once calls go through" if history.place.state is State.READY else "it comes back by itself"
    return f"nothing, {waits}; {look}{_more(one, one.hold)}"


def _look(one: Involved) -> str:
    hold = one.hold
    if hold is None:
        return f"ergon provider health --tenant {shlex.quote(one.tenant)}"
    what = "quota" if hold.cause is Cause.QUOTA else "breaker"
    return f"ergon provider {what} list --tenant {_whose(one, hold)} --provider {shlex.quote(one.provider)}"


def _more(one: Involved, hold: Hold) -> str:
    """What an operator may say, where it is his to say."""
    account = f"{shlex.quote(one.provider)} {shlex.quote(one.capability)} --tenant {_whose(one, hold)}"
    if hold.cause is Cause.QUOTA:
        return f"; for more calls: ergon provider quota extend {account} --calls N --for 1h --reason WHY"
    if hold.cause is Cause.OPERATOR:
        return f"; to end it: ergon provider breaker lift {account} --reason WHY"
    return ""


def _whose(one: Involved, hold: Hold) -> str:
    return shlex.quote(ALL if hold.shared else one.tenant)


def because(history: History, found: Sequence[Involved]) -> str:
    """Why a transaction waits, behind the sentence that says where; empty where that is only a guess."""
    for one in found:
        if history.place.state is not State.READY and one.known == "call" and one.reason in NOT_CALLED:
            return f", because {one.provider}.{one.operation} was not called ({one.reason})"
        if history.place.state is State.READY and one.known == "uses":
            return f"; a task that uses {one.provider} fetches nothing while its breaker is open"
    return ""


def as_plain(one: Involved) -> Mapping[str, Any]:
    """*one* for a program."""
    standing = one.standing
    return {
        "tenant": one.tenant,
        "provider": one.provider,
        "capability": one.capability,
        "operation": one.operation,
        "known": one.known,
        "reason": one.reason,
        "holds": None if standing is None else [_hold(hold) for hold in standing.holds],
        "failures": None if standing is None else dict(standing.failures),
        "words": seen_of(one),
    }


def _hold(hold: Hold) -> Mapping[str, Any]:
    return {"cause": hold.cause.value, "shared": hold.shared, "until": hold.until, "words": _held(hold)}
