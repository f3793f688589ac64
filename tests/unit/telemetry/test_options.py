"""A task says what may be recorded of it."""

from __future__ import annotations

import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.telemetry.options import DEFAULTS, TelemetryOptions, options_of


class Task:
    pass


@pytest.mark.spec("CON-26", "PRO-17")
def test_by_default_neither_results_nor_payloads_are_recorded():
    assert options_of(Task()) is DEFAULTS
    assert not DEFAULTS.record_results
    assert not DEFAULTS.record_payloads


def test_a_tasks_own_options_are_used():
    task = Task()
    task.telemetry = TelemetryOptions(record_results=True)
    assert options_of(task) is task.telemetry


def test_an_attribute_of_another_kind_is_an_error_that_names_it():
    task = Task()
    task.telemetry = {"record_results": True}
    with pytest.raises(ConfigurationError, match="telemetry of Task must be a TelemetryOptions, not dict"):
        options_of(task)
