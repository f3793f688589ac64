"""Names and defaults that users rely on keep their meaning: they may be added, never removed or changed.

Each file in ``snapshots`` is the promise of one part; ``PARTS`` says how that part looks now.
Running this file as a program records additions, and refuses to record anything else.
"""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from datetime import date
from importlib import import_module
from pathlib import Path

import pytest

from ergon_framework.executors.json_lines import MAX_DEPTH, MAX_LINE_BYTES
from ergon_framework.executors.pool import PoolPolicy
from ergon_framework.executors.protocol import (
    MAX_TRACEBACK_BYTES,
    ErrorType,
    ExecutionContext,
    ExecutionOutcome,
    ExecutionRequest,
    Status,
)
from ergon_framework.facts import errors as fact_errors
from ergon_framework.facts import identity, model
from ergon_framework.facts.policy import AppendRetry
from ergon_framework.telemetry import names
from ergon_framework.testing.conformance.boundary.suite import CHECKS as BOUNDARY_CHECKS
from ergon_framework.testing.conformance.executor.suite import CHECKS, HANDLERS
from ergon_framework.worker import policies
from ergon_framework.worker.policies import Policy
from ergon_framework.worker.report import OutcomeKind, StopReason

SNAPSHOTS = Path(__file__).with_name("snapshots")
BOUND_SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


# -- the comparison, for any part -----------------------------------------------------------------


def find_breaches(promised, current, path=""):
    """Return how *current* breaks *promised*: mappings by key, lists of text as sets of names."""
    if isinstance(promised, dict) and isinstance(current, dict):
        problems = [f"{path}/{key}: removed or renamed" for key in promised.keys() - current.keys()]
        for key in promised.keys() & current.keys():
            problems += find_breaches(promised[key], current[key], f"{path}/{key}")
        return sorted(problems)
    if isinstance(current, list) and isinstance(promised, list) and all(isinstance(name, str) for name in promised):
        return [f"{path}: {name!r} removed or renamed" for name in promised if name not in current]
    # True == 1 in Python, but not in a file.
    same = promised == current and isinstance(promised, bool) == isinstance(current, bool)
    return [] if same else [f"{path}: was {promised!r}, is {current!r}"]


def merge(promised, current):
    """Return *promised* with the additions of *current*."""
    if isinstance(promised, dict) and isinstance(current, dict):
        shared = {key: merge(promised[key], current[key]) for key in promised.keys() & current.keys()}
        return promised | current | shared
    return current


# -- the parts ------------------------------------------------------------------------------------


def describe_field(schema):
    """Return a field's promise: absent bounds and choices are written too, so that a new one is a change."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    return {
        "types": sorted(kind.get("type") or kind["$ref"].rpartition("/")[2] for kind in kinds),
        "nullable": any(kind.get("type") == "null" for kind in schema.get("anyOf", ())),
        "choices": schema.get("enum"),
        "bounds": " ".join(f"{sign}{kind[key]}" for kind in kinds for key, sign in BOUND_SIGNS.items() if key in kind),
    }


def describe_policies():
    kinds = [kind for kind in vars(policies).values() if isinstance(kind, type) and issubclass(kind, Policy)]
    kinds = [kind for kind in kinds if kind is not Policy]
    return {
        "schemas": {
            kind.__name__: {
                name: describe_field(field) for name, field in kind.model_json_schema()["properties"].items()
            }
            for kind in kinds
        },
        "defaults": {kind.__name__: kind().model_dump(mode="json") for kind in kinds},
        "files": {name: add_current_delays(file) for name, file in load_snapshot("policies").get("files", {}).items()},
    }


def add_current_delays(file):
    """Return an old policy file with its current delays."""
    loaded = getattr(policies, file["policy"]).load(file["settings"])
    steps = {name: step.retry for name, step in loaded.steps}
    if isinstance(loaded, policies.ConsumerPolicy):
        steps["empty_queue"] = loaded.loop.empty_queue
    delays = {name: [policy.delay(attempt) for attempt in range(6)] for name, policy in steps.items()}
    return {**file, "delays": delays}


def describe_telemetry():
    return {
        "spans": sorted(names.values_of(names.Span)),
        "attributes": sorted(names.values_of(names.Attribute)),
        "metrics": {
            metric.name: {"kind": metric.kind, "unit": metric.unit, "attributes": list(metric.attributes)}
            for metric in names.METRICS
        },
        "outcomes": [kind.value for kind in OutcomeKind],
        "ends": [end.value for end in StopReason],
        "events": sorted(names.values_of(names.Event)),
        "fields": sorted(names.values_of(names.Field)),
    }


def describe_executor():
    """Return what handlers import, what is on the wire, and what an executor must do to pass."""
    names = {
        "executors.runtime": ["current_job"],
        "executors.pool": ["ExecutorPool", "PoolClosed", "PoolPolicy"],
        "executors.process": ["ExecutorCommand", "ExecutorInterrupted", "ResourceLimits"],
        "executors.registry": ["HandlerRegistry", "Retry"],
        "executors.isolation": ["run_in_executor"],
        "testing.conformance.executor.suite": ["CHECKS", "ExecutorCheckResult", "HANDLERS", "report", "run_suite"],
    }
    return {
        "names": {
            module: [name for name in expected if hasattr(import_module(f"ergon_framework.{module}"), name)]
            for module, expected in names.items()
        },
        "handlers": sorted(HANDLERS),
        "questions": sorted(question.name for question in CHECKS),
        "statuses": [status.value for status in Status],
        "error_types": [kind.value for kind in ErrorType],
        "fields": {
            kind.__name__: sorted(kind.model_fields) for kind in (ExecutionRequest, ExecutionContext, ExecutionOutcome)
        },
        "pool": {name: str(field.default) for name, field in PoolPolicy.model_fields.items()},
        "limits": {"line": MAX_LINE_BYTES, "depth": MAX_DEPTH, "traceback": MAX_TRACEBACK_BYTES},
    }


def describe_facts():
    """Return what programs import, the form of ids and digests, the limits, and what a store must do to pass."""
    exports = {
        "facts.append": ["AsyncFacts", "Blob", "Facts", "Upload"],
        "facts.boundary": ["AsyncBoundary", "Boundary", "BoundaryCapabilities", "PruneResult"],
        "facts.connector": ["AsyncFactConnector", "FactConnector"],
        "facts.identity": ["business_id", "canonical_json", "digest_parts", "event_id", "uuid5_id"],
        "facts.producer": ["AsyncFactProducer", "FactProducer"],
        "facts.stores.memory": ["MemoryBoundary"],
        "testing.conformance.boundary.suite": ["BoundaryUnderTest", "CHECKS", "pytest_suite", "run_suite"],
        "testing.determinism": ["NotDeterministicError", "assert_deterministic"],
    }
    fact_fields = {
        "from_zone": "A",
        "to_zone": "B",
        "subject": "s",
        "predicate": "p",
        "object_json": '{"b": 1.0, "a": []}',
    }
    limits = {name: value for name, value in vars(model).items() if name.isupper() and isinstance(value, int)}
    return {
        "names": {
            module: [name for name in expected if hasattr(import_module(f"ergon_framework.{module}"), name)]
            for module, expected in exports.items()
        },
        "ids": {
            "business_id": identity.business_id("a", "b"),
            "named_id": identity.uuid5_id("a", "b"),
            "event_id": identity.event_id("a", "b", "c", date(2026, 3, 6)),
            "digest": identity.digest_parts(**fact_fields),
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
                "later": kind.not_attempted,
            }
            for kind in vars(fact_errors).values()
            if isinstance(kind, type) and issubclass(kind, fact_errors.FactError)
        },
        "append_retry": AppendRetry().model_dump(mode="json"),
        "waits": [AppendRetry().delay(attempt) for attempt in range(12)],
        "checks": sorted(check.name for check in BOUNDARY_CHECKS),
    }


PARTS = {
    "policies": describe_policies,
    "telemetry": describe_telemetry,
    "executor": describe_executor,
    "facts": describe_facts,
}


def load_snapshot(part):
    return json.loads((SNAPSHOTS / f"{part}.json").read_text(encoding="utf-8"))


# -- the promise ----------------------------------------------------------------------------------


@pytest.mark.spec("CON-41")
@pytest.mark.parametrize("part", PARTS)
def test_nothing_that_was_promised_is_removed_renamed_or_changed(part):
    assert find_breaches(load_snapshot(part), PARTS[part]()) == []


@pytest.mark.spec("CON-41")
def test_every_snapshot_belongs_to_a_part():
    assert {path.stem for path in SNAPSHOTS.glob("*.json")} == set(PARTS)


@pytest.mark.spec("CON-41")
@pytest.mark.parametrize("name", load_snapshot("policies")["files"])
def test_an_old_policy_file_loads_with_the_same_delays(name):
    file = load_snapshot("policies")["files"][name]
    assert add_current_delays(file)["delays"] == file["delays"]


# -- the comparison itself ------------------------------------------------------------------------


@pytest.fixture
def current_policies():
    return describe_policies()


def test_an_unchanged_part_breaks_no_promise(current_policies):
    assert find_breaches(current_policies, copy.deepcopy(current_policies)) == []


@pytest.mark.spec("CON-41")
def test_an_addition_breaks_no_promise(current_policies):
    later = copy.deepcopy(current_policies)
    later["schemas"]["RetryPolicy"]["patience"] = {"types": ["number"]}
    later["schemas"]["SettlePolicy"]["on_system"]["choices"].append("later")
    later["schemas"]["PatiencePolicy"] = {}
    later["defaults"]["RetryPolicy"]["patience"] = 1
    assert find_breaches(current_policies, later) == []


def find_parent(tree, *path):
    *parent_keys, last = path
    for key in parent_keys:
        tree = tree[key]
    return tree, last


@pytest.mark.spec("CON-41")
@pytest.mark.parametrize(
    "path",
    [
        ("schemas", "RetryPolicy"),
        ("schemas", "RetryPolicy", "cap"),
        ("defaults", "ConsumerPolicy", "steps", "settle", "batch_size"),
        ("files", "consumer"),
    ],
    ids="/".join,
)
def test_a_removal_is_caught(current_policies, path):
    later = copy.deepcopy(current_policies)
    holder, last = find_parent(later, *path)
    del holder[last]
    assert find_breaches(current_policies, later) == [f"/{'/'.join(path)}: removed or renamed"]


@pytest.mark.spec("CON-41")
def test_a_rename_is_caught(current_policies):
    later = copy.deepcopy(current_policies)
    retry = later["schemas"]["RetryPolicy"]
    retry["tries"] = retry.pop("max_attempts")
    assert find_breaches(current_policies, later) == ["/schemas/RetryPolicy/max_attempts: removed or renamed"]


@pytest.mark.spec("CON-41")
@pytest.mark.parametrize(
    "path, value, message",
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
def test_a_changed_default_bound_type_or_choice_is_caught(current_policies, path, value, message):
    later = copy.deepcopy(current_policies)
    holder, last = find_parent(later, *path)
    holder[last] = value
    (breach,) = find_breaches(current_policies, later)
    assert breach.startswith(f"/{'/'.join(path)}: {message}")


@pytest.mark.spec("CON-41")
def test_changed_arithmetic_is_caught_by_the_delays_of_old_files(current_policies):
    later = copy.deepcopy(current_policies)
    later["files"]["consumer"]["delays"]["process"][2] += 1
    (breach,) = find_breaches(current_policies, later)
    assert breach.startswith("/files/consumer/delays/process: ")


@pytest.mark.spec("CON-41")
@pytest.mark.parametrize("part", ["spans", "attributes", "outcomes", "events", "fields"])
def test_a_renamed_span_attribute_outcome_or_event_is_caught(part):
    later = describe_telemetry()
    removed = later[part][0]
    later[part][0] = "renamed"
    assert find_breaches(describe_telemetry(), later) == [f"/{part}: {removed!r} removed or renamed"]


@pytest.mark.spec("CON-41")
def test_a_metric_that_is_renamed_or_counts_in_another_unit_is_caught():
    later = describe_telemetry()
    later["metrics"]["ergon.transactions"]["unit"] = "s"
    later["metrics"]["ergon.tries"] = later["metrics"].pop("ergon.attempts")
    assert find_breaches(describe_telemetry(), later) == [
        "/metrics/ergon.attempts: removed or renamed",
        "/metrics/ergon.transactions/unit: was '{transaction}', is 's'",
    ]


def test_recording_keeps_the_old_and_adds_the_new():
    assert merge({"a": {"x": 1}, "b": 2}, {"a": {"x": 1, "y": 2}, "c": 3}) == {"a": {"x": 1, "y": 2}, "b": 2, "c": 3}


def main():
    for part, describe in PARTS.items():
        path = SNAPSHOTS / f"{part}.json"
        promised, current = load_snapshot(part), describe()
        problems = find_breaches(promised, current)
        if problems:
            raise SystemExit("\n".join(["not recorded, because promises are broken:", *problems]))
        text = json.dumps(merge(promised, current), indent=2, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
