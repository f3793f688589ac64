"""The last breaker states that a process saw, and when they must be read."""

from __future__ import annotations

from ergon_framework.providers.circuit_breaker import BreakerSnapshot
from ergon_framework.providers.postgres.breaker_cache import BreakerCache
from ergon_framework.providers.state import ProviderScope

SCOPE = ProviderScope("acme", "payments", "charging")


def test_an_unread_scope_is_requested_once():
    view, requests = BreakerCache(), []
    view.on_scope_requested = lambda: requests.append(view.unread_scopes())
    assert view.get(SCOPE) is None
    assert view.get(SCOPE) is None
    assert requests == [[SCOPE]]


def test_a_scope_that_was_read_is_not_requested():
    view, requests = BreakerCache(), []
    view.on_scope_requested = lambda: requests.append(1)
    view.update(SCOPE, BreakerSnapshot(consecutive_failures=2))
    assert view.get(SCOPE) == BreakerSnapshot(consecutive_failures=2)
    assert (view.unread_scopes(), requests) == ([], [])
