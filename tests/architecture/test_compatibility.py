"""What users wrote down keeps its meaning: names and defaults may be added, never taken or changed.

Each file in ``snapshots`` is the promise of one part; ``PARTS`` says how that part looks now.
Running this file as a program records what was added, and refuses to record anything else.
"""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from datetime import date
from importlib import import_module
from pathlib import Path

import pytest

from ergon_framework.executor.lines import MAX_DEPTH, MAX_LINE
from ergon_framework.executor.pool import PoolPolicy
from ergon_framework.executor.protocol import (
    LONGEST_TRACEBACK,
    ErrorType,
    ExecutionContext,
    ExecutionOutcome,
    ExecutionRequest,
    Status,
)
from ergon_framework.facts import errors as fact_errors
from ergon_framework.facts import identity, model
from ergon_framework.facts.policy import AppendRetry
from ergon_framework.task.mixins import policies
from ergon_framework.task.mixins.policies import Policy
from ergon_framework.task.report import End, Kind
from ergon_framework.telemetry import names
from ergon_framework.testing.conformance.boundary import CHECKS as BOUNDARY_CHECKS
from ergon_framework.testing.conformance.executor import HANDLERS, QUESTIONS

SNAPSHOTS = Path(__file__).with_name("snapshots")
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


# -- the comparison, for any part -----------------------------------------------------------------


def breaches(promised, found, place=""):
    """What of *promised* is no longer so in *found*: mappings by key, lists of text as sets of names."""
    if isinstance(promised, dict) and isinstance(found, dict):
        told = [f"{place}/{key}: removed or renamed" for key in promised.keys() - found.keys()]
        for key in promised.keys() & found.keys():
            told += breaches(promised[key], found[key], f"{place}/{key}")
        return sorted(told)
    if isinstance(found, list) and isinstance(promised, list) and all(isinstance(name, str) for name in promised):
        return [f"{place}: {name!r} removed or renamed" for name in promised if name not in found]
    # True == 1 in Python, but not in a file.
    same = promised == found and isinstance(promised, bool) == isinstance(found, bool)
    return [] if same else [f"{place}: was {promised!r}, is {found!r}"]


def merged(promised, found):
    """*promised* with the additions of *found*."""
    if isinstance(promised, dict) and isinstance(found, dict):
        both = {key: merged(promised[key], found[key]) for key in promised.keys() & found.keys()}
        return promised | found | both
    return found


# -- the parts ------------------------------------------------------------------------------------


def field_now(schema):
    """A field's promise: bounds and choices are written even when absent, so that a new one is a change."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    return {
        "types": sorted(kind.get("type") or kind["$ref"].rpartition("/")[2] for kind in kinds),
        "nullable": any(kind.get("type") == "null" for kind in schema.get("anyOf", ())),
        "choices": schema.get("enum"),
        "bounds": " ".join(f"{sign}{kind[key]}" for kind in kinds for key, sign in BOUNDS.items() if key in kind),
    }


def policies_now():
    kinds = [kind for kind in vars(policies).values() if isinstance(kind, type) and issubclass(kind, Policy)]
    kinds = [kind for kind in kinds if kind is not Policy]
    return {
        "schemas": {
            kind.__name__: {name: field_now(field) for name, field in kind.model_json_schema()["properties"].items()}
            for kind in kinds
        },
        "defaults": {kind.__name__: kind().model_dump(mode="json") for kind in kinds},
        "files": {name: delays_now(file) for name, file in recorded("policies").get("files", {}).items()},
    }


def delays_now(file):
    """An old policy file, with the delays that it gives today."""
    loaded = getattr(policies, file["policy"]).load(file["settings"])
    steps = {name: step.retry for name, step in loaded.steps}
    if isinstance(loaded, policies.ConsumerPolicy):
        steps["empty_queue"] = loaded.loop.empty_queue
    delays = {name: [policy.delay(attempt) for attempt in range(6)] for name, policy in steps.items()}
    return {**file, "delays": delays}


def telemetry_now():
    return {
        "spans": sorted(names.listed(names.Span)),
        "attributes": sorted(names.listed(names.Attribute)),
        "metrics": {
            metric.name: {"kind": metric.kind, "unit": metric.unit, "attributes": list(metric.attributes)}
            for metric in names.METRICS
        },
        "outcomes": [kind.value for kind in Kind],
        "ends": [end.value for end in End],
        "events": sorted(names.listed(names.Event)),
        "fields": sorted(names.listed(names.Field)),
    }


def executor_now():
    """What handlers import, what is on the wire, and what an executor must do to pass."""
    names = {
        "executor.job": ["current_job"],
        "executor.pool": ["ExecutorPool", "PoolClosed", "PoolPolicy"],
        "executor.process": ["Command", "ExecutorReleased", "Limits"],
        "executor.registry": ["Registry", "Retry"],
        "executor.task": ["isolated"],
        "testing.conformance.executor": ["HANDLERS", "QUESTIONS", "Mark", "report", "take"],
    }
    return {
        "names": {
            module: [name for name in wanted if hasattr(import_module(f"ergon_framework.{module}"), name)]
            for module, wanted in names.items()
        },
        "handlers": sorted(HANDLERS),
        "questions": sorted(question.name for question in QUESTIONS),
        "statuses": [status.value for status in Status],
        "error_types": [kind.value for kind in ErrorType],
        "fields": {
            kind.__name__: sorted(kind.model_fields) for kind in (ExecutionRequest, ExecutionContext, ExecutionOutcome)
        },
        "pool": {name: str(field.default) for name, field in PoolPolicy.model_fields.items()},
        "limits": {"line": MAX_LINE, "depth": MAX_DEPTH, "traceback": LONGEST_TRACEBACK},
    }


def facts_now():
    """What programs import, how ids and digests come out, how long things may be, and what a store must do to pass."""
    imported = {
        "facts.blob": ["Blob"],
        "facts.boundary": ["AsyncBoundary", "Boundary", "BoundaryCapabilities", "Pruned"],
        "facts.connector": ["AsyncFactConnector", "FactConnector"],
        "facts.facts": ["AsyncFacts", "Facts"],
        "facts.identity": ["business_id", "canonical", "digest", "event_id", "named_id"],
        "facts.producer": ["AsyncFactProducer", "FactProducer"],
        "facts.publish": ["Upload"],
        "facts.stores.memory": ["MemoryBoundary"],
        "testing.conformance.boundary": ["CHECKS", "BoundaryCandidate", "exam", "take"],
        "testing.determinism": ["NotDeterministic", "assert_deterministic"],
    }
    stated = {"from_zone": "A", "to_zone": "B", "subject": "s", "predicate": "p", "object_json": '{"b": 1.0, "a": []}'}
    limits = {name: value for name, value in vars(model).items() if name.isupper() and isinstance(value, int)}
    return {
        "names": {
            module: [name for name in wanted if hasattr(import_module(f"ergon_framework.{module}"), name)]
            for module, wanted in imported.items()
        },
        "ids": {
            "business_id": identity.business_id("a", "b"),
            "named_id": identity.named_id("a", "b"),
            "event_id": identity.event_id("a", "b", "c", date(2026, 3, 6)),
            "digest": identity.digest(**stated),
        },
        "limits": limits,
        "fields": {
            kind.__name__: sorted(field.name for field in fields(kind))
            for kind in (
                model.ArtifactReference,
                model.Envelope,
                model.Fact,
                model.FactConfirmation,
                model.StoredFact,
            )
        },
        "buffers": [buffer.value for buffer in model.Buffer],
        "errors": {
            kind.__name__: {
                "code": kind.code,
                "category": kind.category.value,
                "final": kind.final,
                "later": kind.later,
            }
            for kind in vars(fact_errors).values()
            if isinstance(kind, type) and issubclass(kind, fact_errors.FactError)
        },
        "append_retry": AppendRetry().model_dump(mode="json"),
        "waits": [AppendRetry().delay(attempt) for attempt in range(12)],
        "checks": sorted(check.name for check in BOUNDARY_CHECKS),
    }


PARTS = {"policies": policies_now, "telemetry": telemetry_now, "executor": executor_now, "facts": facts_now}


def recorded(part):
    return json.loads((SNAPSHOTS / f"{part}.json").read_text(encoding="utf-8"))


# -- the promise ----------------------------------------------------------------------------------


@pytest.mark.spec("CON-41")
@pytest.mark.parametrize("part", PARTS)
def test_nothing_that_was_promised_is_removed_renamed_or_changed(part):
    assert breaches(recorded(part), PARTS[part]()) == []


@pytest.mark.spec("CON-41")
def test_no_promise_is_forgotten():
    assert {path.stem for path in SNAPSHOTS.glob("*.json")} == set(PARTS)


@pytest.mark.spec("CON-41")
@pytest.mark.parametrize("name", recorded("policies")["files"])
def test_an_old_policy_file_loads_with_the_same_delays(name):
    file = recorded("policies")["files"][name]
    assert delays_now(file)["delays"] == file["delays"]


# -- the comparison itself ------------------------------------------------------------------------


@pytest.fixture
def now():
    return policies_now()


def test_an_unchanged_part_breaks_no_promise(now):
    assert breaches(now, copy.deepcopy(now)) == []


@pytest.mark.spec("CON-41")
def test_an_addition_breaks_no_promise(now):
    later = copy.deepcopy(now)
    later["schemas"]["RetryPolicy"]["patience"] = {"types": ["number"]}
    later["schemas"]["SettlePolicy"]["on_system"]["choices"].append("later")
    later["schemas"]["PatiencePolicy"] = {}
    later["defaults"]["RetryPolicy"]["patience"] = 1
    assert breaches(now, later) == []


def taken(tree, *path):
    *above, last = path
    for key in above:
        tree = tree[key]
    return tree, last


@pytest.mark.spec("CON-41")
@pytest.mark.parametrize(
    "path",
    [
        ("schemas", "RetryPolicy"),
        ("schemas", "RetryPolicy", "cap"),
        ("defaults", "ConsumerPolicy", "steps", "settle", "group"),
        ("files", "consumer"),
    ],
    ids="/".join,
)
def test_a_removal_is_caught(now, path):
    later = copy.deepcopy(now)
    holder, last = taken(later, *path)
    del holder[last]
    assert breaches(now, later) == [f"/{'/'.join(path)}: removed or renamed"]


@pytest.mark.spec("CON-41")
def test_a_rename_is_caught(now):
    later = copy.deepcopy(now)
    retry = later["schemas"]["RetryPolicy"]
    retry["tries"] = retry.pop("max_attempts")
    assert breaches(now, later) == ["/schemas/RetryPolicy/max_attempts: removed or renamed"]


@pytest.mark.spec("CON-41")
@pytest.mark.parametrize(
    "path, value, told",
    [
        (("defaults", "RetryPolicy", "cap"), 31.0, "was 30.0, is 31.0"),
        (("defaults", "RetryPolicy", "timeout"), None, "was 60.0, is None"),
        (("defaults", "ConsumerPolicy", "loop", "prefetch"), False, "was 0, is False"),
        (("schemas", "BatchPolicy", "size", "bounds"), ">=1 <=100", "was '>=1', is '>=1 <=100'"),
        (("schemas", "FetchPolicy", "extra", "bounds"), ">=1", "was '', is '>=1'"),
        (("schemas", "FetchPolicy", "extra", "choices"), ["one"], "was None, is ['one']"),
        (("schemas", "RetryPolicy", "timeout", "nullable"), False, "was True, is False"),
        (("schemas", "RetryPolicy", "timeout", "types"), ["string"], "'number' removed or renamed"),
        (("schemas", "SettlePolicy", "on_system", "choices"), ["ack"], "'dead_letter' removed or renamed"),
        (("defaults", "RetryPolicy"), None, "was {"),
    ],
)
def test_a_changed_default_bound_type_or_choice_is_caught(now, path, value, told):
    later = copy.deepcopy(now)
    holder, last = taken(later, *path)
    holder[last] = value
    (breach,) = breaches(now, later)
    assert breach.startswith(f"/{'/'.join(path)}: {told}")


@pytest.mark.spec("CON-41")
def test_changed_arithmetic_is_caught_by_the_delays_of_old_files(now):
    later = copy.deepcopy(now)
    later["files"]["consumer"]["delays"]["process"][2] += 1
    (breach,) = breaches(now, later)
    assert breach.startswith("/files/consumer/delays/process: ")


@pytest.mark.spec("CON-41")
@pytest.mark.parametrize("part", ["spans", "attributes", "outcomes", "events", "fields"])
def test_a_renamed_span_attribute_outcome_or_event_is_caught(part):
    later = telemetry_now()
    gone = later[part][0]
    later[part][0] = "renamed"
    assert breaches(telemetry_now(), later) == [f"/{part}: {gone!r} removed or renamed"]


@pytest.mark.spec("CON-41")
def test_a_metric_that_is_renamed_or_counts_in_another_unit_is_caught():
    later = telemetry_now()
    later["metrics"]["ergon.transactions"]["unit"] = "s"
    later["metrics"]["ergon.tries"] = later["metrics"].pop("ergon.attempts")
    assert breaches(telemetry_now(), later) == [
        "/metrics/ergon.attempts: removed or renamed",
        "/metrics/ergon.transactions/unit: was '{transaction}', is 's'",
    ]


def test_recording_keeps_the_old_and_adds_the_new():
    assert merged({"a": {"x": 1}, "b": 2}, {"a": {"x": 1, "y": 2}, "c": 3}) == {"a": {"x": 1, "y": 2}, "b": 2, "c": 3}


def main():
    for part, found in PARTS.items():
        path = SNAPSHOTS / f"{part}.json"
        promised, current = recorded(part), found()
        broken = breaches(promised, current)
        if broken:
            raise SystemExit("\n".join(["not recorded, because promises are broken:", *broken]))
        text = json.dumps(merged(promised, current), indent=2, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
