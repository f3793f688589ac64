"""``ergon policy``: its output, and when it rejects a policy."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.cli.policy import PolicyExit, format_duration
from ergon_framework.worker.policies import ConsumerPolicy

pytestmark = pytest.mark.spec("RUN-07")

PROGRAM = """
from dataclasses import replace
from ergon_framework import ConsumerPolicy, consumer
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.providers.base import ProviderBase
from ergon_framework.providers.policy import ProviderPolicy

class Bank(ProviderBase):
    provider_name = "bank"
    capability = "charge"
    policy = ProviderPolicy.load({"timeout": 90.0, "retry": {"max_attempts": 4}})
    def _execute_impl(self, operation, payload, context): ...

class Stern(MemoryConnector):
    @property
    def capabilities(self):
        return replace(super().capabilities, renewable=False, lease=None, deadline=60.0)

bank = Bank()
cashier = bank
orders = MemoryConnector("orders")

@consumer(orders, policy=ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 5, "backoff": 10.0,
    "jitter": 0.2}}}}))
def charge(transaction): ...

@consumer(Stern("slow"))
def refused(transaction): ...

@consumer(orders, policy=ConsumerPolicy.load({"steps": {"process": {"retry": {"timeout": None, "max_attempts": 1}}}}))
def endless(transaction): ...

@consumer(orders, policy=ConsumerPolicy.load({"loop": {"transaction_timeout": 5.0}}))
def hasty(transaction): ...
"""


@pytest.fixture(autouse=True)
def _program(monkeypatch, tmp_path):
    (tmp_path / "tills.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("tills", None)


def run_policy(*arguments):
    return CliRunner().invoke(app, ["policy", *arguments])


def explain(*arguments):
    result = run_policy("explain", *arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


def test_delays_and_the_worst_case_in_seconds_and_calls():
    code, explanation = explain("tills:charge")
    assert code == PolicyExit.OK
    assert [wait["planned"] for wait in explanation["worst"]["process"]["waits"]] == [10.0, 20.0, 30.0, 30.0]
    assert (explanation["worst"]["calls"], explanation["worst"]["calls_with_crashes"]) == (5, 50)
    assert explanation["worst"]["held"] == 2 * explanation["worst"]["busy"]
    assert (explanation["queue"], explanation["refused"]) == ("orders", None)


def test_retries_of_a_provider_are_counted_once_and_multiply():
    _, explanation = explain("tills:charge")
    (bank,) = explanation["stacked"]
    assert bank == {
        "name": "bank charge",
        "attempts": 4,
        "timeout": 90.0,
        "attempt_timeout": None,
        "calls": 624,
        "calls_with_crashes": 804,
    }
    assert any(
        "bank charge may take 1 min 30 s, but an attempt of process ends after 1 min" in x
        for x in explanation["warnings"]
    )


def test_the_text_output_has_the_same_figures():
    result = run_policy("explain", "tills:charge")
    assert result.exit_code == PolicyExit.OK
    for text in (
        "charge on orders",
        "10 s, 20 s",
        "±20%",
        "max handler calls:     5 (50 if every delivery ends in a crash)",
        "outage deferral:       up to 1 h after the first deferral (loop.max_deferral), at most 151 times",
        "provider bank charge: 4 attempts within 1 min 30 s; max calls per transaction: 624 ",
        "624 (804 if every delivery ends in a crash), plus the probes of an open breaker",
        "lasts 30 s, renewed while the transaction is in flight",
    ):
        assert text in result.stdout


@pytest.mark.spec("DX-27")
def test_deferrals_and_the_timeout_of_one_attempt_are_shown(tmp_path):
    _, explanation = explain("tills:charge")
    assert (explanation["worst"]["max_deferral"], explanation["worst"]["deferrals"]) == (3600.0, 151)
    assert any("bank charge gets one attempt of 4 if it hangs" in warning for warning in explanation["warnings"])
    changed = PROGRAM.replace('"timeout": 90.0,', '"timeout": 90.0, "attempt_timeout": 20.0,')
    (tmp_path / "tills.py").write_text(changed, encoding="utf-8")
    sys.modules.pop("tills")
    (tmp_path / "off.toml").write_text("[loop]\nmax_deferral = 0\n")
    result = run_policy("explain", "tills:charge", "--policy", "off.toml")
    assert "outage deferral:       none (loop.max_deferral is 0)" in result.stdout
    assert "4 attempts within 1 min 30 s, each at most 20 s; max calls per transaction: 12 " in result.stdout
    assert "if it hangs" not in result.stdout
    (tmp_path / "any.toml").write_text("[steps.process.retry]\nbackoff = 0\n")
    assert (
        "(loop.max_deferral), any number of times"
        in run_policy("explain", "tills:charge", "--policy", "any.toml").stdout
    )


def test_a_policy_that_the_broker_cannot_support_is_rejected():
    result = run_policy("explain", "tills:refused")
    assert result.exit_code == PolicyExit.REJECTED
    assert "ends after 1 min, cannot be renewed" in result.stdout
    assert "'slow' redelivers a claim after 60 s" in result.stderr
    code, explanation = explain("tills:refused")
    assert code == PolicyExit.REJECTED
    assert "set loop.transaction_timeout" in explanation["refused"]


def test_a_handler_call_without_a_time_limit_is_reported_and_is_null_in_json():
    code, explanation = explain("tills:endless")
    assert code == PolicyExit.OK
    assert explanation["worst"]["busy"] is None
    assert any("no timeout ends a hung handler" in warning for warning in explanation["warnings"])
    assert "no limit" in run_policy("explain", "tills:endless").stdout


def test_a_timeout_without_an_effect_is_reported():
    _, explanation = explain("tills:hasty")
    assert any("steps.process.retry.timeout has no effect" in warning for warning in explanation["warnings"])


def test_the_settings_change_the_policy(tmp_path):
    (tmp_path / "ergon.toml").write_text("[tasks.charge.policy.steps.process.retry]\nmax_attempts = 2\n")
    assert explain("tills:charge")[1]["worst"]["calls"] == 2


def test_a_policy_file_replaces_the_policy(tmp_path):
    (tmp_path / "other.toml").write_text("[steps.process.retry]\nmax_attempts = 7\n")
    assert explain("tills:charge", "--policy", "other.toml")[1]["worst"]["calls"] == 7


@pytest.mark.parametrize("name", ["nowhere:charge", "tills:chrage", "tills"])
def test_an_unknown_task_is_a_usage_error(name):
    result = run_policy("explain", name)
    assert result.exit_code == PolicyExit.USAGE
    assert result.stderr.startswith("ergon: ")


@pytest.mark.parametrize("kind", ["consumer", "producer", "provider"])
def test_the_schema_is_that_of_the_policy(kind):
    schema = json.loads(run_policy("schema", kind).stdout)
    assert schema["additionalProperties"] is False
    assert schema["title"].lower().startswith(kind)


def test_the_consumers_schema_is_the_default():
    assert json.loads(run_policy("schema").stdout) == ConsumerPolicy.model_json_schema()


def test_durations_are_formatted_for_people():
    lengths = (0, 0.002, 1.5, 59.99, 60, 90, 7200, 7260, 200_000, float("inf"))
    expected = ["0 s", "2 ms", "1.5 s", "60 s", "1 min", "1 min 30 s", "2 h", "2 h 1 min", "2 d 7 h", "no limit"]
    assert [format_duration(length) for length in lengths] == expected
