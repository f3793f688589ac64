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
            "How many ended in a second, by outcome.",
            (
                (
                    rate("ergon_transactions_total", "ergon_task, ergon_outcome", TASK),
                    "{{ergon_task}} {{ergon_outcome}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Share that failed",
            "Of those that ended, how many failed.",
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
            "BUSINESS is about the transaction, SYSTEM about what it needs, TIMEOUT about time.",
            (
                (
                    rate("ergon_transactions_total", "ergon_task, ergon_category", FAILED),
                    "{{ergon_task}} {{ergon_category}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Waiting in the queue",
            "As the broker counts them, by state; dead ones are dead letters.",
            (
                (
                    f"max by (ergon_task, ergon_queue_state) (ergon_queue_depth{{{TASK}}})",
                    "{{ergon_task}} {{ergon_queue_state}}",
                ),
            ),
        ),
        Panel(
            "Age of the oldest in the queue",
            "It grows while more comes than is done.",
            (
                (f"max by (ergon_task) (ergon_queue_lag_seconds{{{TASK}}})", "{{ergon_task}} waits"),
                (f"max by (ergon_task) (ergon_queue_age_seconds{{{TASK}}})", "{{ergon_task}} at its fetch"),
            ),
            "s",
        ),
        Panel(
            "Wait before a fetch",
            "Of the oldest of each fetch: half of them waited less, and 95 of 100.",
            (
                (quantile(0.5, "ergon_queue_wait_seconds", "ergon_task", TASK), "{{ergon_task}} p50"),
                (quantile(0.95, "ergon_queue_wait_seconds", "ergon_task", TASK), "{{ergon_task}} p95"),
            ),
            "s",
        ),
        Panel(
            "Duration of steps, p95",
            "Waits between attempts included.",
            (
                (
                    quantile(0.95, "ergon_step_duration_seconds", "ergon_task, ergon_step", TASK),
                    "{{ergon_task}} {{ergon_step}}",
                ),
            ),
            "s",
        ),
        Panel(
            "Duration of process",
            "Half of them took less, 99 of 100, and the mean.",
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
                (rate("ergon_retries_total", "ergon_task, ergon_step", TASK), "{{ergon_task}} {{ergon_step}} again"),
            ),
            "ops",
        ),
        Panel(
            "Waits between attempts",
            "How many transactions wait for their next attempt at once, on average.",
            (
                (
                    rate("ergon_waits_duration_seconds_total", "ergon_task, ergon_step", TASK),
                    "{{ergon_task}} {{ergon_step}}",
                ),
            ),
        ),
        Panel(
            "Slots",
            "Running, held for want of one, or kept by a handler that timed out and did not leave.",
            (
                (
                    f"sum by (ergon_task, ergon_slot_state) (ergon_slots{{{TASK}}})",
                    "{{ergon_task}} {{ergon_slot_state}}",
                ),
            ),
        ),
        Panel(
            "Fetches",
            "Answered, empty, and failed for good.",
            (
                (rate("ergon_fetches_total", "ergon_task", TASK), "{{ergon_task}}"),
                (rate("ergon_fetches_empty_total", "ergon_task", TASK), "{{ergon_task}} empty"),
                (rate("ergon_fetches_failed_total", "ergon_task", TASK), "{{ergon_task}} failed"),
            ),
            "ops",
        ),
        Panel(
            "Settlements and refusals",
            "What the broker answered, and what was settled before any handler saw it.",
            (
                (
                    rate("ergon_settled_total", "ergon_task, ergon_settle_result", TASK),
                    "{{ergon_task}} {{ergon_settle_result}}",
                ),
                (
                    rate("ergon_refused_total", "ergon_task, ergon_reason", TASK),
                    "{{ergon_task}} refused: {{ergon_reason}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Paused by a gate",
            "Loops that a gate holds back, with its reason.",
            ((f"sum by (ergon_task, ergon_reason) (ergon_paused{{{TASK}}})", "{{ergon_task}}: {{ergon_reason}}"),),
        ),
        Panel(
            "Processes",
            "How many run the task, and how many died.",
            (
                (f"sum by (ergon_task) (ergon_processes{{{TASK}}})", "{{ergon_task}}"),
                (f"sum by (ergon_task) (increase(ergon_processes_died_total{{{TASK}}}{RATE}))", "{{ergon_task}} died"),
            ),
        ),
        Panel(
            "Handlers that misbehave",
            "Bodies left behind, bodies that came back too late, and times that something held the event loop.",
            (
                (
                    f"sum by (ergon_task) (increase(ergon_bodies_abandoned_total{{{TASK}}}{RATE}))",
                    "{{ergon_task}} abandoned",
                ),
                (
                    f"sum by (ergon_task) (increase(ergon_bodies_fenced_total{{{TASK}}}{RATE}))",
                    "{{ergon_task}} too late",
                ),
                (f"sum by (ergon_task) (increase(ergon_loop_blocked_total{{{TASK}}}{RATE}))", "{{ergon_task}} blocked"),
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
            "That are over in a second, by outcome; a replayed one was not made again.",
            (
                (
                    rate("ergon_provider_calls_total", f"{PROVIDER_LABELS}, ergon_outcome", PROVIDER),
                    f"{PROVIDER_LEGEND} {{{{ergon_outcome}}}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Calls that failed, by reason",
            "After all their attempts.",
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
            "Share of calls that failed",
            "Of those that ended.",
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
            "By outcome; those included that quota or breaker held back.",
            (
                (
                    rate("ergon_provider_attempts_total", f"{PROVIDER_LABELS}, ergon_outcome", PROVIDER),
                    f"{PROVIDER_LEGEND} {{{{ergon_outcome}}}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Mean duration of an attempt",
            "Without what was held back.",
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
            "Held back by ourselves",
            "Attempts that an open breaker or a quota that is used up did not let through.",
            (
                (
                    rate("ergon_provider_attempts_total", f"{PROVIDER_LABELS}, ergon_code", BLOCKED),
                    f"{PROVIDER_LEGEND} {{{{ergon_code}}}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Open breakers and used-up quotas",
            "1 while one is known, for any tenant.",
            (
                (
                    f"max by ({PROVIDER_LABELS}) (ergon_provider_breaker_open{{{PROVIDER}}})",
                    f"{PROVIDER_LEGEND} breaker open",
                ),
                (
                    f"max by ({PROVIDER_LABELS}) (ergon_provider_quota_exhausted{{{PROVIDER}}})",
                    f"{PROVIDER_LEGEND} quota used up",
                ),
            ),
        ),
        Panel(
            "Changes of breakers",
            "States that breakers have entered.",
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
            "Attempts that are in no table",
            "Health knows nothing of them; the reason says why they were dropped.",
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
            "Processes of a pool, and the jobs that they have.",
            (
                (f"sum by (ergon_executor_kind) (ergon_executors{{{KIND}}})", "{{ergon_executor_kind}}"),
                (f"sum by (ergon_executor_kind) (ergon_executor_jobs{{{KIND}}})", "{{ergon_executor_kind}} jobs"),
            ),
        ),
        Panel(
            "Jobs that wait for an executor",
            "Of those that were claimed.",
            ((f"sum by (ergon_executor_kind) (ergon_executor_jobs_waiting{{{KIND}}})", "{{ergon_executor_kind}}"),),
        ),
        Panel(
            "Mean wait for an executor",
            "Of jobs that were given one.",
            (
                (
                    rate("ergon_executor_waits_duration_seconds_total", "ergon_executor_kind", KIND)
                    + f" / ({rate('ergon_executor_waits_total', 'ergon_executor_kind', KIND)} > 0)",
                    "{{ergon_executor_kind}}",
                ),
            ),
            "s",
        ),
        Panel(
            "Jobs",
            "Attempts that are over in a second, by outcome.",
            (
                (
                    "sum by (ergon_task, ergon_outcome) (rate(ergon_jobs_total" + RATE + "))",
                    "{{ergon_task}} {{ergon_outcome}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Starts and ends",
            "A pool in peace starts few and loses none.",
            tuple(
                (
                    f"sum by (ergon_executor_kind) (increase(ergon_executors_{end}_total{{{KIND}}}{RATE}))",
                    f"{{{{ergon_executor_kind}}}} {end}",
                )
                for end in ("started", "failed", "retired", "killed", "died")
            ),
        ),
        Panel(
            "Lines that are no outcome",
            "Of executors that say what they should not.",
            (
                (
                    f"sum by (ergon_executor_kind, ergon_reason) (increase(ergon_executor_strays_total{{{KIND}}}{RATE}))",
                    "{{ergon_executor_kind}} {{ergon_reason}}",
                ),
            ),
        ),
        Panel(
            "Scheduled times",
            "Of cron entries: fired, or repeated and not fired again.",
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
    ("zone", "ergon_fact_to_zone", "ergon_replica_status"),
    (
        Panel(
            "Facts given to stores",
            "By buffer and outcome; a conflict is an id that came with another payload.",
            (
                (
                    "sum by (ergon_fact_buffer, ergon_outcome) (rate(ergon_facts_total" + RATE + "))",
                    "{{ergon_fact_buffer}} {{ergon_outcome}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Replicas behind, in facts",
            "What the source has and this zone has not.",
            ((f"max by ({PAIR_LABELS}) (ergon_replica_lag{{{ZONE}}})", PAIR_LEGEND),),
        ),
        Panel(
            "Replicas behind, in time",
            "Since the oldest of them was stored, or the source last heard of.",
            ((f"max by ({PAIR_LABELS}) (ergon_replica_lag_duration_seconds{{{ZONE}}})", PAIR_LEGEND),),
            "s",
        ),
        Panel(
            "Replicas behind, in bytes",
            "Without artifacts.",
            ((f"max by ({PAIR_LABELS}) (ergon_replica_lag_size_bytes{{{ZONE}}})", PAIR_LEGEND),),
            "bytes",
        ),
        Panel(
            "State of replicas",
            "1 for the state that each is in.",
            (
                (
                    f"max by ({PAIR_LABELS}, ergon_fact_status) (ergon_replica_status{{{ZONE}}})",
                    PAIR_LEGEND + " {{ergon_fact_status}}",
                ),
            ),
        ),
        Panel(
            "Forwarded",
            "Facts and artifacts in a second.",
            (
                (rate("ergon_replica_facts_total", PAIR_LABELS, ZONE), PAIR_LEGEND + " facts"),
                (rate("ergon_replica_artifacts_total", PAIR_LABELS, ZONE), PAIR_LEGEND + " artifacts"),
            ),
            "ops",
        ),
        Panel(
            "Artifacts over the line",
            "Bytes in a second.",
            ((rate("ergon_replica_artifacts_size_bytes_total", PAIR_LABELS, ZONE), PAIR_LEGEND),),
            "Bps",
        ),
        Panel(
            "Calls of replicas that failed",
            "By what they mean.",
            (
                (
                    f"sum by ({PAIR_LABELS}, ergon_fact_status) (increase(ergon_replica_troubles_total{{{ZONE}}}{RATE}))",
                    PAIR_LEGEND + " {{ergon_fact_status}}",
                ),
            ),
        ),
        Panel(
            "Room",
            "Share of each limit that is used; 1 where it is nearly reached.",
            (
                (
                    "max by (ergon_fact_buffer, ergon_fact_room) (ergon_facts_room_ratio)",
                    "{{ergon_fact_buffer}} {{ergon_fact_room}}",
                ),
                (
                    "max by (ergon_fact_buffer, ergon_fact_room) (ergon_facts_room_alert)",
                    "{{ergon_fact_buffer}} {{ergon_fact_room}} ends",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Calls of the facts service",
            "By method and answer.",
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
