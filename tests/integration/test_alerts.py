"""Each alert fires on its condition and not otherwise: promtool over made-up series."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.servers.prometheus import find_program
from tests.unit.tools.queries import ALERTS_FILE, load_alert_rules

TASK_LABELS = 'ergon_task="charge"'
PROVIDER_LABELS = 'ergon_provider_name="pay", ergon_provider_capability="charging"'
EXECUTOR_LABELS = 'ergon_executor_kind="python"'
REPLICA_LABELS = 'ergon_fact_replica="hub", ergon_fact_from_zone="plant", ergon_fact_to_zone="hub"'
#: A counter over an hour in steps of a minute: constant, rising all the time, or rising once after half of it.
FLAT, RISING, STEP = "0+0x60", "0+10x60", "0x29 1x31"
LOW, HIGH = "0x60", "1x60"


def make_outcome_series(outcome, values):
    return f'ergon_transactions_total{{{TASK_LABELS}, ergon_outcome="{outcome}"}}', values


#: By alert: series on which it fires, and series of a healthy system.
CASES = {
    "ErgonTargetDown": ([('up{job="ergon", instance="a"}', LOW)], [('up{job="ergon", instance="a"}', HIGH)]),
    "ErgonQueueLagHigh": (
        [(f"ergon_queue_lag_seconds{{{TASK_LABELS}}}", "0+60x60")],
        [(f"ergon_queue_lag_seconds{{{TASK_LABELS}}}", "299x60")],
    ),
    "ErgonConsumerStalled": (
        [
            (f'ergon_queue_depth{{{TASK_LABELS}, ergon_queue_state="ready"}}', "5x60"),
            make_outcome_series("succeeded", "7x60"),
        ],
        [
            (f'ergon_queue_depth{{{TASK_LABELS}, ergon_queue_state="ready"}}', "5x60"),
            make_outcome_series("succeeded", "0+97x60"),
        ],
    ),
    "ErgonFailureRateHigh": (
        [make_outcome_series("succeeded", "0+90x60"), make_outcome_series("failed", "0+10x60")],
        [make_outcome_series("succeeded", "0+97x60"), make_outcome_series("failed", "0+3x60")],
    ),
    "ErgonExceptionHandlerFailed": (
        [make_outcome_series("handler_failed", STEP)],
        [make_outcome_series("handler_failed", FLAT)],
    ),
    "ErgonDeadLettersAdded": (
        [(f'ergon_queue_depth{{{TASK_LABELS}, ergon_queue_state="dead"}}', "3x29 4x31")],
        [(f'ergon_queue_depth{{{TASK_LABELS}, ergon_queue_state="dead"}}', "3x60")],
    ),
    "ErgonDeliveriesRejected": (
        [(f'ergon_deliveries_rejected_total{{{TASK_LABELS}, ergon_reason="undecodable"}}', STEP)],
        [(f'ergon_deliveries_rejected_total{{{TASK_LABELS}, ergon_reason="done"}}', RISING)],
    ),
    "ErgonSettlementsFailing": (
        [(f'ergon_settled_total{{{TASK_LABELS}, ergon_settle_result="lost"}}', RISING)],
        [(f'ergon_settled_total{{{TASK_LABELS}, ergon_settle_result="settled"}}', RISING)],
    ),
    "ErgonFetchFailed": (
        [(f"ergon_fetches_failed_total{{{TASK_LABELS}}}", STEP)],
        [(f"ergon_fetches_failed_total{{{TASK_LABELS}}}", "1x60")],
    ),
    "ErgonConsumerPaused": (
        [(f'ergon_paused{{{TASK_LABELS}, ergon_reason="disk"}}', HIGH)],
        [(f'ergon_paused{{{TASK_LABELS}, ergon_reason="disk"}}', "_x26 1x34")],
    ),
    "ErgonProcessesCrashing": (
        [(f"ergon_processes_died_total{{{TASK_LABELS}}}", STEP)],
        [(f"ergon_processes_died_total{{{TASK_LABELS}}}", "4x60")],
    ),
    "ErgonEventLoopBlocked": (
        [(f'ergon_loop_blocked_total{{{TASK_LABELS}, ergon_step="process"}}', STEP)],
        [(f'ergon_loop_blocked_total{{{TASK_LABELS}, ergon_step="process"}}', FLAT)],
    ),
    "ErgonHandlersHung": (
        [(f'ergon_slots{{{TASK_LABELS}, ergon_slot_state="abandoned"}}', HIGH)],
        [(f'ergon_slots{{{TASK_LABELS}, ergon_slot_state="running"}}', HIGH)],
    ),
    "ErgonBreakerOpen": (
        [(f"ergon_provider_breaker_open{{{PROVIDER_LABELS}}}", HIGH)],
        [(f"ergon_provider_breaker_open{{{PROVIDER_LABELS}}}", LOW)],
    ),
    "ErgonQuotaExhausted": (
        [(f"ergon_provider_quota_exhausted{{{PROVIDER_LABELS}}}", HIGH)],
        [(f"ergon_provider_quota_exhausted{{{PROVIDER_LABELS}}}", LOW)],
    ),
    "ErgonProviderRowsDropped": (
        [(f'ergon_provider_rows_dropped_total{{{PROVIDER_LABELS}, ergon_reason="full"}}', STEP)],
        [(f'ergon_provider_rows_dropped_total{{{PROVIDER_LABELS}, ergon_reason="full"}}', FLAT)],
    ),
    "ErgonExecutorsCrashing": (
        [
            (f"ergon_executors_died_total{{{EXECUTOR_LABELS}}}", FLAT),
            (f"ergon_executors_failed_total{{{EXECUTOR_LABELS}}}", STEP),
        ],
        [
            (f"ergon_executors_died_total{{{EXECUTOR_LABELS}}}", FLAT),
            (f"ergon_executors_failed_total{{{EXECUTOR_LABELS}}}", FLAT),
        ],
    ),
    "ErgonExecutorsUnavailable": (
        [
            (f"ergon_executor_jobs_waiting{{{EXECUTOR_LABELS}}}", HIGH),
            (f"ergon_executor_jobs{{{EXECUTOR_LABELS}}}", LOW),
        ],
        [
            (f"ergon_executor_jobs_waiting{{{EXECUTOR_LABELS}}}", HIGH),
            (f"ergon_executor_jobs{{{EXECUTOR_LABELS}}}", HIGH),
        ],
    ),
    "ErgonJobClaimsLost": (
        [(f'ergon_jobs_total{{{TASK_LABELS}, ergon_outcome="stale"}}', STEP)],
        [(f'ergon_jobs_total{{{TASK_LABELS}, ergon_outcome="failed"}}', RISING)],
    ),
    "ErgonReplicationLagHigh": (
        [(f"ergon_replication_lag_duration_seconds{{{REPLICA_LABELS}}}", "0+60x60")],
        [(f"ergon_replication_lag_duration_seconds{{{REPLICA_LABELS}}}", "30x60")],
    ),
    "ErgonReplicationHalted": (
        [(f'ergon_replication_status{{{REPLICA_LABELS}, ergon_fact_status="conflict"}}', HIGH)],
        [(f'ergon_replication_status{{{REPLICA_LABELS}, ergon_fact_status="following"}}', HIGH)],
    ),
    "ErgonStorageNearLimit": (
        [('ergon_facts_capacity_near_limit{ergon_fact_buffer="EFB", ergon_fact_capacity="disk"}', HIGH)],
        [('ergon_facts_capacity_near_limit{ergon_fact_buffer="EFB", ergon_fact_capacity="disk"}', LOW)],
    ),
    "ErgonFactsRejected": (
        [('ergon_facts_total{ergon_fact_buffer="ESB", ergon_outcome="conflict"}', STEP)],
        [('ergon_facts_total{ergon_fact_buffer="ESB", ergon_outcome="repeated"}', RISING)],
    ),
    "ErgonArtifactsLost": (
        [('ergon_artifacts_lost_total{ergon_fact_buffer="EFB", ergon_fact_zone="plant"}', "_x29 1x31")],
        [('ergon_artifacts_total{ergon_fact_buffer="EFB", ergon_outcome="stored"}', RISING)],
    ),
}


def make_promtool_test(series, *, firing=()):
    """Build series of an hour in which exactly these alerts fire after 35 minutes."""
    return {
        "interval": "1m",
        "input_series": [{"series": series_name, "values": values} for series_name, values in series],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "35m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing],
            }
        ],
    }


@pytest.mark.spec("RUN-04")
def test_each_alert_fires_on_its_condition_and_none_on_a_healthy_system(tmp_path):
    assert sorted(CASES) == sorted(rule["alert"] for rule in load_alert_rules())
    healthy = dict(one for _, series in CASES.values() for one in series)
    promtool_tests = [make_promtool_test(series, firing=[name]) for name, (series, _) in CASES.items()]
    path = tmp_path / "cases.yml"
    # As JSON, which is YAML too.
    config = {
        "rule_files": [str(ALERTS_FILE)],
        "evaluation_interval": "1m",
        "tests": [*promtool_tests, make_promtool_test(healthy.items())],
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    result = subprocess.run(
        [find_program("promtool"), "test", "rules", str(path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_accepts_the_rules_and_the_example():
    for kind, name in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        command = [find_program("promtool"), "check", kind, str(ALERTS_FILE.with_name(name))]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert result.returncode == 0, result.stdout + result.stderr
