"""Each alert comes when it should and not otherwise, by promtool over series that are made up."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.servers.prometheus import find_program
from tests.unit.tools.queries import ALERTS, alerts

T = 'ergon_task="charge"'
P = 'ergon_provider_name="pay", ergon_provider_capability="charging"'
K = 'ergon_executor_kind="python"'
Z = 'ergon_fact_replica="hub", ergon_fact_from_zone="plant", ergon_fact_to_zone="hub"'
#: What a counter does in an hour, in steps of a minute: rest, rise all the time, or rise once after half of it.
REST, RISES, ONCE = "0+0x60", "0+10x60", "0x29 1x31"
LOW, HIGH = "0x60", "1x60"


def done(outcome, values):
    return f'ergon_transactions_total{{{T}, ergon_outcome="{outcome}"}}', values


#: By alert: series over which it comes, and series of a world in which all is well.
CASES = {
    "ErgonTargetDown": ([('up{job="ergon", instance="a"}', LOW)], [('up{job="ergon", instance="a"}', HIGH)]),
    "ErgonQueueGrowsOld": (
        [(f"ergon_queue_lag_seconds{{{T}}}", "0+60x60")],
        [(f"ergon_queue_lag_seconds{{{T}}}", "299x60")],
    ),
    "ErgonNothingIsDone": (
        [(f'ergon_queue_depth{{{T}, ergon_queue_state="ready"}}', "5x60"), done("succeeded", "7x60")],
        [(f'ergon_queue_depth{{{T}, ergon_queue_state="ready"}}', "5x60"), done("succeeded", "0+97x60")],
    ),
    "ErgonTransactionsFail": (
        [done("succeeded", "0+90x60"), done("failed", "0+10x60")],
        [done("succeeded", "0+97x60"), done("failed", "0+3x60")],
    ),
    "ErgonHandlerFailed": ([done("handler_failed", ONCE)], [done("handler_failed", REST)]),
    "ErgonDeadLetters": (
        [(f'ergon_queue_depth{{{T}, ergon_queue_state="dead"}}', "3x29 4x31")],
        [(f'ergon_queue_depth{{{T}, ergon_queue_state="dead"}}', "3x60")],
    ),
    "ErgonDeliveriesRefused": (
        [(f'ergon_refused_total{{{T}, ergon_reason="undecodable"}}', ONCE)],
        [(f'ergon_refused_total{{{T}, ergon_reason="done"}}', RISES)],
    ),
    "ErgonSettlementsFail": (
        [(f'ergon_settled_total{{{T}, ergon_settle_result="lost"}}', RISES)],
        [(f'ergon_settled_total{{{T}, ergon_settle_result="settled"}}', RISES)],
    ),
    "ErgonFetchFailed": (
        [(f"ergon_fetches_failed_total{{{T}}}", ONCE)],
        [(f"ergon_fetches_failed_total{{{T}}}", "1x60")],
    ),
    "ErgonPaused": (
        [(f'ergon_paused{{{T}, ergon_reason="disk"}}', HIGH)],
        [(f'ergon_paused{{{T}, ergon_reason="disk"}}', "_x26 1x34")],
    ),
    "ErgonProcessesDie": (
        [(f"ergon_processes_died_total{{{T}}}", ONCE)],
        [(f"ergon_processes_died_total{{{T}}}", "4x60")],
    ),
    "ErgonEventLoopBlocked": (
        [(f'ergon_loop_blocked_total{{{T}, ergon_step="process"}}', ONCE)],
        [(f'ergon_loop_blocked_total{{{T}, ergon_step="process"}}', REST)],
    ),
    "ErgonBodiesAbandoned": (
        [(f'ergon_slots{{{T}, ergon_slot_state="abandoned"}}', HIGH)],
        [(f'ergon_slots{{{T}, ergon_slot_state="running"}}', HIGH)],
    ),
    "ErgonBreakerOpen": (
        [(f"ergon_provider_breaker_open{{{P}}}", HIGH)],
        [(f"ergon_provider_breaker_open{{{P}}}", LOW)],
    ),
    "ErgonQuotaExhausted": (
        [(f"ergon_provider_quota_exhausted{{{P}}}", HIGH)],
        [(f"ergon_provider_quota_exhausted{{{P}}}", LOW)],
    ),
    "ErgonProviderRowsDropped": (
        [(f'ergon_provider_rows_dropped_total{{{P}, ergon_reason="full"}}', ONCE)],
        [(f'ergon_provider_rows_dropped_total{{{P}, ergon_reason="full"}}', REST)],
    ),
    "ErgonExecutorsDie": (
        [(f"ergon_executors_died_total{{{K}}}", REST), (f"ergon_executors_failed_total{{{K}}}", ONCE)],
        [(f"ergon_executors_died_total{{{K}}}", REST), (f"ergon_executors_failed_total{{{K}}}", REST)],
    ),
    "ErgonNoExecutors": (
        [(f"ergon_executor_jobs_waiting{{{K}}}", HIGH), (f"ergon_executor_jobs{{{K}}}", LOW)],
        [(f"ergon_executor_jobs_waiting{{{K}}}", HIGH), (f"ergon_executor_jobs{{{K}}}", HIGH)],
    ),
    "ErgonJobsStale": (
        [(f'ergon_jobs_total{{{T}, ergon_outcome="stale"}}', ONCE)],
        [(f'ergon_jobs_total{{{T}, ergon_outcome="failed"}}', RISES)],
    ),
    "ErgonReplicaBehind": (
        [(f"ergon_replica_lag_duration_seconds{{{Z}}}", "0+60x60")],
        [(f"ergon_replica_lag_duration_seconds{{{Z}}}", "30x60")],
    ),
    "ErgonReplicaHalted": (
        [(f'ergon_replica_status{{{Z}, ergon_fact_status="conflict"}}', HIGH)],
        [(f'ergon_replica_status{{{Z}, ergon_fact_status="following"}}', HIGH)],
    ),
    "ErgonRoomEnds": (
        [('ergon_facts_room_alert{ergon_fact_buffer="EFB", ergon_fact_room="disk"}', HIGH)],
        [('ergon_facts_room_alert{ergon_fact_buffer="EFB", ergon_fact_room="disk"}', LOW)],
    ),
    "ErgonFactConflicts": (
        [('ergon_facts_total{ergon_fact_buffer="ESB", ergon_outcome="conflict"}', ONCE)],
        [('ergon_facts_total{ergon_fact_buffer="ESB", ergon_outcome="repeated"}', RISES)],
    ),
    "ErgonArtifactsLost": (
        [('ergon_artifacts_lost_total{ergon_fact_buffer="EFB", ergon_fact_zone="plant"}', "_x29 1x31")],
        [('ergon_artifacts_total{ergon_fact_buffer="EFB", ergon_outcome="stored"}', RISES)],
    ),
}


def world(series, *, comes=()):
    """Series of an hour, in which these alerts stand after 35 minutes, and no others."""
    return {
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "35m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in comes],
            }
        ],
    }


@pytest.mark.spec("RUN-04")
def test_each_alert_comes_over_what_it_is_for_and_none_where_all_is_well(tmp_path):
    assert sorted(CASES) == sorted(rule["alert"] for rule in alerts())
    well = dict(one for _, series in CASES.values() for one in series)
    worlds = [world(series, comes=[name]) for name, (series, _) in CASES.items()]
    path = tmp_path / "cases.yml"
    # As JSON, which is YAML too.
    told = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [*worlds, world(well.items())]}
    path.write_text(json.dumps(told), encoding="utf-8")
    found = subprocess.run(
        [find_program("promtool"), "test", "rules", str(path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_rules_and_the_example_are_good_to_promtool():
    for kind, name in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        words = [find_program("promtool"), "check", kind, str(ALERTS.with_name(name))]
        found = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
        assert found.returncode == 0, found.stdout + found.stderr
