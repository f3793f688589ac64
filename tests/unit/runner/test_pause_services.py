"""Fleet pauses where no notification can arrive."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

from ergon_framework.runner.services import pause_gates
from tests.log_events import get_event


def make_settings(dsn="postgresql://nowhere", is_pausable=True):
    return SimpleNamespace(postgres=SimpleNamespace(dsn=dsn), run=SimpleNamespace(pausable=is_pausable))


@pytest.mark.parametrize(
    "settings", [make_settings(dsn=None), make_settings(is_pausable=False)], ids=["no database", "not wanted"]
)
def test_there_is_no_gate_without_a_database_or_when_pauses_are_disabled(settings, caplog):
    with pause_gates([SimpleNamespace(name="charge")], settings) as gates:
        assert gates == [()]
    with pause_gates([SimpleNamespace(name="charge"), SimpleNamespace(name="email")], settings) as gates:
        assert gates == [(), ()]
    assert not caplog.records


@pytest.mark.spec("CON-47")
def test_a_worker_without_the_library_runs_and_says_that_pauses_do_not_reach_it(monkeypatch, caplog):
    for module in [name for name in sys.modules if name.startswith("ergon_framework.connectors.postgres")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with caplog.at_level(logging.WARNING), pause_gates([SimpleNamespace(name="charge")], make_settings()) as gates:
        assert gates == [()]
    (record,) = caplog.records
    assert get_event(record) == "pause channel unavailable"
    assert record.task == "charge"
    assert "ergon-framework[postgres]" in record.error
