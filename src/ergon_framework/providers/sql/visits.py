"""Visits: what is asked of the database before and after an attempt, and what its answers mean; for both flavours."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

from ergon_framework.providers import circuit_breaker, idempotency
from ergon_framework.providers.books import Admission, Admitted, Asked, Busy, Concluded, Replayed
from ergon_framework.providers.circuit_breaker import BreakerState, Pass, Probe, Refused, Snapshot
from ergon_framework.providers.errors import ProviderQuotaExceededError
from ergon_framework.providers.idempotency import Kept
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.quota import QuotaState, WindowKind, window_at
from ergon_framework.providers.sql import statements
from ergon_framework.providers.sql.blocks import BlockPolicy, Leased, Limits, Purse, Rest
from ergon_framework.providers.sql.names import KEY, check, check_tenant, owner_of
from ergon_framework.providers.sql.results import not_kept, written
from ergon_framework.providers.sql.view import View, moved, snapshot
from ergon_framework.schema.operation import Operation, Query, Text

KINDS: Final = tuple(WindowKind)


@dataclass(slots=True)
class Granted(Admitted):
    """An attempt that these books let through, with what is to be ended after it."""

    reservation: int | None = None
    purse: Purse | None = None
    block: int | None = None


def limits_of(quota: QuotaPolicy) -> Limits | None:
    """The limits of all windows; None where there is none."""
    return (quota.minute, quota.hour, quota.day, quota.month) if quota.limits else None


def is_closed(seen: Snapshot) -> bool:
    """Whether everything goes through, and nothing but a fault can change that."""
    return seen.state is BreakerState.CLOSED and seen.override is None


def held(seen: Snapshot, now: float) -> Refused | None:
    """The refusal that *seen* stands for; None where something may go through."""
    until = circuit_breaker.held_until(seen)
    return None if until is None or until <= now else Refused(seen, until)


# -- before -------------------------------------------------------------------------------------------


def admission(asked: Asked, *, limits: Limits | None, who: str, view: View) -> Operation[Admission]:
    """Key, quota and breaker in one round trip."""
    account, key = asked.account, asked.idempotency_key
    seen = view.of(account)
    values = (
        owner_of(account),
        account.provider_name,
        account.capability,
        None if limits is None else _array(limits),
        _rules(asked.policy),
        who,
        repr(asked.lease),
        _flag(seen is not None and not is_closed(seen)),
    )
    if key is None:
        query = Text(statements.ADMIT_PLAIN, values)
    else:
        _check_key(asked, key)
        claim = asked.tenant_id, key, asked.fingerprint, asked.owner
        query = Text(statements.ADMIT, (*values, *claim, _flag(asked.attempt_number == 1), _flag(asked.doubt)))
    ((text,),) = yield query
    answer = json.loads(text)
    if isinstance(answer, list):
        reservation, generation, failures = answer
        if seen is None or (seen.generation, seen.consecutive_failures) != (generation, failures):
            view.saw(account, Snapshot(consecutive_failures=failures, generation=generation))
        return Granted(asked, Pass(generation), reservation=reservation)
    return _unusual(asked, answer, view)


def _unusual(asked: Asked, answer: dict[str, Any], view: View) -> Admission:
    """What an answer means that is more than a plain yes."""
    verdict = answer["verdict"]
    # The moments of an answer are the server's; whoever asked goes by a clock of his own.
    shift = asked.now - answer["at"]
    if verdict in {"admitted", "open"}:
        found = moved(snapshot(answer["breaker"]), shift)
        view.saw(asked.account, found)
        if verdict == "open":
            raise circuit_breaker.refusal(Refused(found, answer["until"] + shift), asked.now)
        number = answer["probe"]
        probe = None if number is None else Probe(number, asked.now + asked.policy.breaker.probe_lease_seconds)
        return Granted(asked, Pass(found.generation, probe), reservation=answer["reservation"])
    if verdict == "replayed":
        if answer["value"] is None:
            raise not_kept()
        return Replayed(Kept(answer["value"], answer["http_status"]))
    if verdict == "busy":
        return Busy(answer["until"] + shift)
    if verdict == "spent":
        raise spent(answer["kind"], answer["limit"], at=answer["at"])
    raise idempotency.conflict()


@lru_cache(maxsize=1024)
def _array(numbers: tuple[float | None, ...]) -> str:
    """An array as the server reads it: text, because it is always the same."""
    return "{" + ",".join("NULL" if number is None else repr(number) for number in numbers) + "}"


def _rules(policy: ProviderPolicy) -> str:
    breaker = policy.breaker
    places = breaker.half_open_max_calls
    return _array((policy.keep, breaker.open_cooldown_seconds, places, breaker.probe_lease_seconds))


def spent(kind: int, limit: int, *, at: float) -> ProviderQuotaExceededError:
    """The error of a window that has no call left, in the words of the model."""
    now = datetime.fromtimestamp(at, UTC)
    try:
        QuotaState(window_at(KINDS[kind - 1], now), limit, limit).reserve(now=now)
    except ProviderQuotaExceededError as error:
        return error
    raise AssertionError("a spent window has no call left")


def lease(
    asked: Asked, purse: Purse, rest: Rest | None, *, policy: BlockPolicy, who: str, view: View
) -> Operation[Leased | ProviderQuotaExceededError]:
    """The next block of *purse*, in exchange for *rest*; or why there is none."""
    sent = time.monotonic()
    parameters = _account(asked) | {
        "limits": _array(purse.limits),
        "who": who,
        "calls": policy.size,
        "seconds": policy.lease,
        "patience": asked.lease,
        "previous": None if rest is None else rest.reservation,
        "unspent": 0 if rest is None else rest.unspent,
    }
    ((shown, granted, at, until, kind, limit, reservation),) = yield Query(statements.LEASE, parameters)
    view.saw(asked.account, moved(snapshot(shown), asked.now - at))
    if not granted:
        return spent(kind, limit, at=at)
    shortest = next(kind for kind, _ in asked.policy.quota.limits)
    window = window_at(shortest, datetime.fromtimestamp(at, UTC))
    return Leased(reservation, granted, window, at, until, sent)


# -- after --------------------------------------------------------------------------------------------


def conclusion(admitted: Granted, concluded: Concluded, view: View) -> Operation[BreakerState | None] | None:
    """Key, reservation and breaker in one round trip; None where there is nothing to write."""
    asked, leave, error = admitted.asked, admitted.leave, concluded.error
    fault = None if error is None and concluded.kept is None else circuit_breaker.fault_of(error)
    tells = leave.probe is not None or fault is True or (fault is False and view.failures(asked.account) > 0)
    ends = concluded.last and asked.idempotency_key is not None
    if not tells and not ends and admitted.reservation is None:
        return None
    return (
        _told(admitted, concluded, view, ends=ends, fault=fault) if tells else _finished(admitted, concluded, ends=ends)
    )


def _finished(admitted: Granted, concluded: Concluded, *, ends: bool) -> Operation[BreakerState | None]:
    asked, kept = admitted.asked, concluded.kept
    provider, keep = asked.account.provider_name, repr(asked.policy.keep)
    reservation = None if admitted.reservation is None else str(admitted.reservation)
    if ends and kept is not None:
        status = None if kept.http_status is None else str(kept.http_status)
        mine = asked.tenant_id, provider, asked.idempotency_key, asked.owner
        yield Text(statements.DONE, (*mine, written(kept.value), status, keep, reservation))
        return None
    key = (asked.tenant_id, asked.idempotency_key, asked.owner) if ends else (None, None, None)
    unspent, doubt = str(_unspent(concluded)), _flag(concluded.doubt)
    values = provider, repr(asked.lease), reservation, unspent, *key, "f", doubt, keep, None, None
    yield Text(statements.FINISH, values)
    return None


def _told(
    admitted: Granted, concluded: Concluded, view: View, *, ends: bool, fault: bool | None
) -> Operation[BreakerState | None]:
    asked, leave, error, kept = admitted.asked, admitted.leave, concluded.error, concluded.kept
    breaker = asked.policy.breaker
    parameters = _account(asked) | {
        "key_tenant": asked.tenant_id,
        "key": asked.idempotency_key if ends else None,
        "owner": asked.owner,
        "keep": asked.policy.keep,
        "patience": asked.lease,
        "reservation": admitted.reservation,
        "unspent": _unspent(concluded),
        "done": kept is not None,
        "doubt": concluded.doubt,
        "value": written(kept.value) if ends and kept is not None else None,
        "http_status": None if kept is None else kept.http_status,
        "generation": leave.generation,
        "probe": None if leave.probe is None else leave.probe.number,
        "fault": fault,
        "code": error.reason_code.value if error is not None and fault else None,
        "threshold": breaker.failure_threshold,
        "cooldown": breaker.open_cooldown_seconds,
        "places": breaker.half_open_max_calls,
    }
    ((shown, entered, at),) = yield Query(statements.CONCLUDE, parameters)
    if shown is not None:
        view.saw(asked.account, moved(snapshot(shown), concluded.now - at))
    return None if entered is None else BreakerState(entered)


def _account(asked: Asked) -> dict[str, Any]:
    account = asked.account
    return {"tenant": owner_of(account), "provider": account.provider_name, "capability": account.capability}


def _check_key(asked: Asked, key: str) -> None:
    check_tenant(asked.tenant_id)
    check("key", key, KEY)


def _unspent(concluded: Concluded) -> int:
    """How many of the attempt's calls were certainly never made."""
    return int(concluded.error is not None and not concluded.error.sent)


def _flag(is_so: bool) -> str:  # noqa: FBT001 - a value, as the server reads it
    return "t" if is_so else "f"
