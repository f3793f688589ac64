"""A task defines what may be recorded of it."""

from __future__ import annotations

import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.telemetry.options import DEFAULT_OPTIONS, TelemetryOptions, get_options


class Task:
    pass


@pytest.mark.spec("CON-26", "PRO-17")
def test_by_default_neither_results_nor_payloads_are_recorded():
    assert get_options(Task()) is DEFAULT_OPTIONS
    assert not DEFAULT_OPTIONS.record_results
    assert not DEFAULT_OPTIONS.record_payloads


def test_a_tasks_own_options_are_used():
    task = Task()
    task.telemetry = TelemetryOptions(record_results=True)
    assert get_options(task) is task.telemetry


def test_options_of_another_type_are_an_error_that_names_it():
    task = Task()
    task.telemetry = {"record_results": True}
    with pytest.raises(ConfigurationError, match="telemetry of Task must be a TelemetryOptions, not dict"):
        get_options(task)
