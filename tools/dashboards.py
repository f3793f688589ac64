"""Write the Grafana dashboards of deploy/grafana/ from the few lines that make them differ.

`python tools/dashboards.py` rewrites them; a test checks that the files match this module.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "deploy" / "grafana"
RATE = "[$__rate_interval]"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: its queries, each with the legend of its lines."""

    title: str
    description: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard; *variable* is its filter label, and a metric that has all values of it."""

    uid: str
    title: str
    variable: tuple[str, str, str]
    panels: tuple[Panel, ...]


def rate(metric: str, labels: str, selector: str) -> str:
    return f"sum by ({labels}) (rate({metric}{{{selector}}}{RATE}))"


def quantile(share: float, metric: str, labels: str, selector: str) -> str:
    return f"histogram_quantile({share}, sum by ({labels}, le) (rate({metric}_bucket{{{selector}}}{RATE})))"


TASK = 'ergon_task=~"$task"'
FAILED = f'{TASK}, ergon_outcome=~"failed|handler_failed"'
ENGINE = Dashboard(
    "ergon-engine",
    "Ergon: engine and queues",
    ("task", "ergon_task", "ergon_processes"),
    (
        Panel(
            "Transactions",
            "Processed per second, by outcome.",
            (
                (
                    rate("ergon_transactions_total", "ergon_task, ergon_outcome", TASK),
                    "{{ergon_task}} {{ergon_outcome}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Failure rate",
            "Failed transactions as a fraction of all processed transactions.",
            (
                (
                    (
                        f"{rate('ergon_transactions_total', 'ergon_task', FAILED)} / "
                        f"({rate('ergon_transactions_total', 'ergon_task', TASK)} > 0)"
                    ),
                    "{{ergon_task}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Failures by category",
            "BUSINESS: invalid transaction. SYSTEM: failed dependency. TIMEOUT: attempt timed out.",
            (
                (
                    rate("ergon_transactions_total", "ergon_task, ergon_category", FAILED),
                    "{{ergon_task}} {{ergon_category}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Queue depth",
            "Messages in the queue as counted by the broker, by state; dead = dead letters.",
            (
                (
                    f"max by (ergon_task, ergon_queue_state) (ergon_queue_depth{{{TASK}}})",
                    "{{ergon_task}} {{ergon_queue_state}}",
                ),
            ),
        ),
        Panel(
            "Queue lag",
            "Age of the oldest waiting message; it grows while messages arrive faster than they are processed.",
            (
                (f"max by (ergon_task) (ergon_queue_lag_seconds{{{TASK}}})", "{{ergon_task}} waiting"),
                (f"max by (ergon_task) (ergon_queue_age_seconds{{{TASK}}})", "{{ergon_task}} when fetched"),
            ),
            "s",
        ),
        Panel(
            "Queue wait",
            "Wait of the oldest message of each fetch, p50 and p95.",
            (
                (quantile(0.5, "ergon_queue_wait_seconds", "ergon_task", TASK), "{{ergon_task}} p50"),
                (quantile(0.95, "ergon_queue_wait_seconds", "ergon_task", TASK), "{{ergon_task}} p95"),
            ),
            "s",
        ),
        Panel(
            "Step duration, p95",
            "Including backoff delays between attempts.",
            (
                (
                    quantile(0.95, "ergon_step_duration_seconds", "ergon_task, ergon_step", TASK),
                    "{{ergon_task}} {{ergon_step}}",
                ),
            ),
            "s",
        ),
        Panel(
            "Process step duration",
            "p50, p99 and mean.",
            (
                (
                    quantile(0.5, "ergon_step_duration_seconds", "ergon_task", f'{TASK}, ergon_step="process"'),
                    "{{ergon_task}} p50",
                ),
                (
                    quantile(0.99, "ergon_step_duration_seconds", "ergon_task", f'{TASK}, ergon_step="process"'),
                    "{{ergon_task}} p99",
                ),
                (
                    rate("ergon_step_duration_seconds_sum", "ergon_task", f'{TASK}, ergon_step="process"')
                    + " / ("
                    + rate("ergon_step_duration_seconds_count", "ergon_task", f'{TASK}, ergon_step="process"')
                    + " > 0)",
                    "{{ergon_task}} mean",
                ),
            ),
            "s",
        ),
        Panel(
            "Attempts and retries",
            "A retry is an attempt after the first of its step.",
            (
                (rate("ergon_attempts_total", "ergon_task, ergon_step", TASK), "{{ergon_task}} {{ergon_step}}"),
                (rate("ergon_retries_total", "ergon_task, ergon_step", TASK), "{{ergon_task}} {{ergon_step}} retries"),
            ),
            "ops",
        ),
        Panel(
            "Transactions in backoff",
            "Average number of transactions that wait for their next attempt.",
            (
                (
                    rate("ergon_retry_backoff_duration_seconds_total", "ergon_task, ergon_step", TASK),
                    "{{ergon_task}} {{ergon_step}}",
                ),
            ),
        ),
        Panel(
            "Slots",
            "Running, waiting for a slot, or occupied by a handler call still running after its timeout.",
            (
                (
                    f"sum by (ergon_task, ergon_slot_state) (ergon_slots{{{TASK}}})",
                    "{{ergon_task}} {{ergon_slot_state}}",
                ),
            ),
        ),
        Panel(
            "Fetches",
            "Successful, empty, and failed after all retries.",
            (
                (rate("ergon_fetches_total", "ergon_task", TASK), "{{ergon_task}}"),
                (rate("ergon_fetches_empty_total", "ergon_task", TASK), "{{ergon_task}} empty"),
                (rate("ergon_fetches_failed_total", "ergon_task", TASK), "{{ergon_task}} failed"),
            ),
            "ops",
        ),
        Panel(
            "Settlements and rejections",
            "Settlement results of the broker, and deliveries rejected before the handler ran.",
            (
                (
                    rate("ergon_settled_total", "ergon_task, ergon_settle_result", TASK),
                    "{{ergon_task}} {{ergon_settle_result}}",
                ),
                (
                    rate("ergon_deliveries_rejected_total", "ergon_task, ergon_reason", TASK),
                    "{{ergon_task}} rejected: {{ergon_reason}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Paused by a gate",
            "Loops paused by a gate, by reason.",
            ((f"sum by (ergon_task, ergon_reason) (ergon_paused{{{TASK}}})", "{{ergon_task}}: {{ergon_reason}}"),),
        ),
        Panel(
            "Processes",
            "Running processes, and processes that exited unexpectedly.",
            (
                (f"sum by (ergon_task) (ergon_processes{{{TASK}}})", "{{ergon_task}}"),
                (
                    f"sum by (ergon_task) (increase(ergon_processes_died_total{{{TASK}}}{RATE}))",
                    "{{ergon_task}} exited unexpectedly",
                ),
            ),
        ),
        Panel(
            "Handler problems (hung, late, blocking)",
            "Abandoned calls, calls that returned after their timeout, and blocks of the event loop.",
            (
                (
                    f"sum by (ergon_task) (increase(ergon_handler_abandoned_total{{{TASK}}}{RATE}))",
                    "{{ergon_task}} hung",
                ),
                (
                    f"sum by (ergon_task) (increase(ergon_handler_late_results_total{{{TASK}}}{RATE}))",
                    "{{ergon_task}} late",
                ),
                (
                    f"sum by (ergon_task) (increase(ergon_loop_blocked_total{{{TASK}}}{RATE}))",
                    "{{ergon_task}} blocking",
                ),
            ),
        ),
    ),
)

PROVIDER = 'ergon_provider_name=~"$provider"'
PROVIDER_LABELS = "ergon_provider_name, ergon_provider_capability"
PROVIDER_LEGEND = "{{ergon_provider_name}} {{ergon_provider_capability}}"
BLOCKED = f'{PROVIDER}, ergon_code=~"circuit_open|quota_exhausted"'
PROVIDERS = Dashboard(
    "ergon-providers",
    "Ergon: providers",
    ("provider", "ergon_provider_name", "ergon_provider_calls_total"),
    (
        Panel(
            "Calls",
            "Completed calls per second, by outcome; replayed = earlier result returned, no new call.",
            (
                (
                    rate("ergon_provider_calls_total", f"{PROVIDER_LABELS}, ergon_outcome", PROVIDER),
                    f"{PROVIDER_LEGEND} {{{{ergon_outcome}}}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Failed calls by reason",
            "Calls that failed after all attempts.",
            (
                (
                    rate(
                        "ergon_provider_calls_total",
                        f"{PROVIDER_LABELS}, ergon_code",
                        f'{PROVIDER}, ergon_outcome="failed"',
                    ),
                    f"{PROVIDER_LEGEND} {{{{ergon_code}}}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Call failure rate",
            "Failed calls as a fraction of all completed calls.",
            (
                (
                    rate("ergon_provider_calls_total", PROVIDER_LABELS, f'{PROVIDER}, ergon_outcome="failed"')
                    + f" / ({rate('ergon_provider_calls_total', PROVIDER_LABELS, PROVIDER)} > 0)",
                    PROVIDER_LEGEND,
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Attempts",
            "Attempts by outcome, including those rejected by rate limit or circuit breaker.",
            (
                (
                    rate("ergon_provider_attempts_total", f"{PROVIDER_LABELS}, ergon_outcome", PROVIDER),
                    f"{PROVIDER_LEGEND} {{{{ergon_outcome}}}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Mean attempt duration",
            "Without attempts rejected by rate limit or circuit breaker.",
            (
                (
                    rate("ergon_provider_attempts_duration_seconds_total", PROVIDER_LABELS, PROVIDER)
                    + " / ("
                    + rate(
                        "ergon_provider_attempts_total",
                        PROVIDER_LABELS,
                        f'{PROVIDER}, ergon_code!~"circuit_open|quota_exhausted"',
                    )
                    + " > 0)",
                    PROVIDER_LEGEND,
                ),
            ),
            "s",
        ),
        Panel(
            "Rejected by rate limit or circuit breaker",
            "Attempts that were not sent because a quota was exhausted or a circuit breaker was open.",
            (
                (
                    rate("ergon_provider_attempts_total", f"{PROVIDER_LABELS}, ergon_code", BLOCKED),
                    f"{PROVIDER_LEGEND} {{{{ergon_code}}}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Open circuit breakers and exhausted quotas",
            "1 while one is known, for any tenant.",
            (
                (
                    f"max by ({PROVIDER_LABELS}) (ergon_provider_breaker_open{{{PROVIDER}}})",
                    f"{PROVIDER_LEGEND} breaker open",
                ),
                (
                    f"max by ({PROVIDER_LABELS}) (ergon_provider_quota_exhausted{{{PROVIDER}}})",
                    f"{PROVIDER_LEGEND} quota exhausted",
                ),
            ),
        ),
        Panel(
            "Circuit breaker transitions",
            "Transitions by new state.",
            (
                (
                    (
                        f"sum by ({PROVIDER_LABELS}, ergon_provider_breaker_state) "
                        f"(increase(ergon_provider_breaker_transitions_total{{{PROVIDER}}}{RATE}))"
                    ),
                    f"{PROVIDER_LEGEND} {{{{ergon_provider_breaker_state}}}}",
                ),
            ),
        ),
        Panel(
            "Dropped attempt records",
            "Attempts missing from the provider tables and provider health, by reason.",
            (
                (
                    f"sum by ({PROVIDER_LABELS}, ergon_reason) (increase(ergon_provider_rows_dropped_total{{{PROVIDER}}}{RATE}))",
                    f"{PROVIDER_LEGEND} {{{{ergon_reason}}}}",
                ),
            ),
        ),
    ),
)

KIND = 'ergon_executor_kind=~"$kind"'
EXECUTORS = Dashboard(
    "ergon-executors",
    "Ergon: executors and jobs",
    ("kind", "ergon_executor_kind", "ergon_executors"),
    (
        Panel(
            "Executors",
            "Processes of a pool, and the jobs they run.",
            (
                (f"sum by (ergon_executor_kind) (ergon_executors{{{KIND}}})", "{{ergon_executor_kind}}"),
                (f"sum by (ergon_executor_kind) (ergon_executor_jobs{{{KIND}}})", "{{ergon_executor_kind}} jobs"),
            ),
        ),
        Panel(
            "Jobs waiting for an executor",
            "Claimed jobs without an executor.",
            ((f"sum by (ergon_executor_kind) (ergon_executor_jobs_waiting{{{KIND}}})", "{{ergon_executor_kind}}"),),
        ),
        Panel(
            "Mean wait for an executor",
            "Mean wait of jobs that acquired an executor.",
            (
                (
                    rate("ergon_executor_acquisitions_duration_seconds_total", "ergon_executor_kind", KIND)
                    + f" / ({rate('ergon_executor_acquisitions_total', 'ergon_executor_kind', KIND)} > 0)",
                    "{{ergon_executor_kind}}",
                ),
            ),
            "s",
        ),
        Panel(
            "Jobs",
            "Completed attempts per second, by outcome.",
            (
                (
                    "sum by (ergon_task, ergon_outcome) (rate(ergon_jobs_total" + RATE + "))",
                    "{{ergon_task}} {{ergon_outcome}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Executor starts and exits",
            "A healthy pool starts few executors and loses none.",
            tuple(
                (
                    f"sum by (ergon_executor_kind) (increase(ergon_executors_{end}_total{{{KIND}}}{RATE}))",
                    f"{{{{ergon_executor_kind}}}} {end}",
                )
                for end in ("started", "failed", "retired", "killed", "died")
            ),
        ),
        Panel(
            "Invalid executor output",
            "Output lines that are not the outcome of a running job, by reason.",
            (
                (
                    f"sum by (ergon_executor_kind, ergon_reason) (increase(ergon_executor_unexpected_lines_total{{{KIND}}}{RATE}))",
                    "{{ergon_executor_kind}} {{ergon_reason}}",
                ),
            ),
        ),
        Panel(
            "Cron schedules",
            "Scheduled times: fired, or repeated and not fired again.",
            (
                (
                    "sum by (ergon_task, ergon_outcome) (increase(ergon_cron_ticks_total" + RATE + "))",
                    "{{ergon_task}} {{ergon_outcome}}",
                ),
            ),
        ),
    ),
)

PAIR_LABELS = "ergon_fact_from_zone, ergon_fact_to_zone"
PAIR_LEGEND = "{{ergon_fact_from_zone}} to {{ergon_fact_to_zone}}"
ZONE = 'ergon_fact_to_zone=~"$zone"'
FACTS = Dashboard(
    "ergon-facts",
    "Ergon: facts",
    ("zone", "ergon_fact_to_zone", "ergon_replication_status"),
    (
        Panel(
            "Facts sent to stores",
            "By buffer and outcome; conflict = the id exists with another payload.",
            (
                (
                    "sum by (ergon_fact_buffer, ergon_outcome) (rate(ergon_facts_total" + RATE + "))",
                    "{{ergon_fact_buffer}} {{ergon_outcome}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Replication lag, facts",
            "Facts of the source that are missing in this zone.",
            ((f"max by ({PAIR_LABELS}) (ergon_replication_lag{{{ZONE}}})", PAIR_LEGEND),),
        ),
        Panel(
            "Replication lag, time",
            "Time since the oldest missing fact was stored, or since the last contact with the source.",
            ((f"max by ({PAIR_LABELS}) (ergon_replication_lag_duration_seconds{{{ZONE}}})", PAIR_LEGEND),),
            "s",
        ),
        Panel(
            "Replication lag, bytes",
            "Bytes of missing facts, without artifacts.",
            ((f"max by ({PAIR_LABELS}) (ergon_replication_lag_size_bytes{{{ZONE}}})", PAIR_LEGEND),),
            "bytes",
        ),
        Panel(
            "Replication status",
            "1 for the current status of each replica.",
            (
                (
                    f"max by ({PAIR_LABELS}, ergon_fact_status) (ergon_replication_status{{{ZONE}}})",
                    PAIR_LEGEND + " {{ergon_fact_status}}",
                ),
            ),
        ),
        Panel(
            "Replication throughput",
            "Facts and artifacts copied per second.",
            (
                (rate("ergon_replication_facts_total", PAIR_LABELS, ZONE), PAIR_LEGEND + " facts"),
                (rate("ergon_replication_artifacts_total", PAIR_LABELS, ZONE), PAIR_LEGEND + " artifacts"),
            ),
            "ops",
        ),
        Panel(
            "Artifact transfer",
            "Bytes of artifacts transferred per second.",
            ((rate("ergon_replication_artifacts_size_bytes_total", PAIR_LABELS, ZONE), PAIR_LEGEND),),
            "Bps",
        ),
        Panel(
            "Replication errors",
            "Failed calls, by the resulting status.",
            (
                (
                    f"sum by ({PAIR_LABELS}, ergon_fact_status) (increase(ergon_replication_errors_total{{{ZONE}}}{RATE}))",
                    PAIR_LEGEND + " {{ergon_fact_status}}",
                ),
            ),
        ),
        Panel(
            "Storage capacity",
            "Used fraction of each limit; near limit = 1 while the alert threshold is exceeded.",
            (
                (
                    "max by (ergon_fact_buffer, ergon_fact_capacity) (ergon_facts_capacity_used_ratio)",
                    "{{ergon_fact_buffer}} {{ergon_fact_capacity}}",
                ),
                (
                    "max by (ergon_fact_buffer, ergon_fact_capacity) (ergon_facts_capacity_near_limit)",
                    "{{ergon_fact_buffer}} {{ergon_fact_capacity}} near limit",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Facts service calls",
            "Completed calls per second, by method and outcome.",
            (
                (
                    "sum by (ergon_fact_method, ergon_outcome) (rate(ergon_facts_calls_total" + RATE + "))",
                    "{{ergon_fact_method}} {{ergon_outcome}}",
                ),
            ),
            "ops",
        ),
    ),
)

DASHBOARDS = {"engine": ENGINE, "providers": PROVIDERS, "executors": EXECUTORS, "facts": FACTS}


def build_dashboard(dashboard: Dashboard) -> dict[str, Any]:
    """Return the JSON object that Grafana reads."""
    name, label, metric = dashboard.variable
    source = {"type": "prometheus", "uid": "${datasource}"}
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": name,
            "type": "query",
            "datasource": source,
            "query": f"label_values({metric}, {label})",
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["ergon"],
        "schemaVersion": 37,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": [_build_panel(number, panel, source) for number, panel in enumerate(dashboard.panels)],
    }


def _build_panel(number: int, panel: Panel, source: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": source,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def render_dashboard(dashboard: Dashboard) -> str:
    return json.dumps(build_dashboard(dashboard), indent=2) + "\n"


if __name__ == "__main__":
    for stem, dashboard in DASHBOARDS.items():
        (FOLDER / f"{stem}.json").write_text(render_dashboard(dashboard), encoding="utf-8")
