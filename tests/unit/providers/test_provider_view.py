"""What a process saw last of the breakers, and when somebody has to look."""

from __future__ import annotations

from ergon_framework.providers.books import Account
from ergon_framework.providers.circuit_breaker import Snapshot
from ergon_framework.providers.sql.view import View

ACCOUNT = Account("acme", "payments", "charging")


def test_an_account_that_nobody_has_read_is_asked_for_once():
    view, asked = View(), []
    view.wanting = lambda: asked.append(view.unread())
    assert view.of(ACCOUNT) is None
    assert view.of(ACCOUNT) is None
    assert asked == [[ACCOUNT]]


def test_one_that_was_read_is_not_asked_for():
    view, asked = View(), []
    view.wanting = lambda: asked.append(1)
    view.saw(ACCOUNT, Snapshot(consecutive_failures=2))
    assert view.of(ACCOUNT) == Snapshot(consecutive_failures=2)
    assert (view.unread(), asked) == ([], [])
