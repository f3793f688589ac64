"""The outline of a loop holds every name and every setting that its spans show."""

from __future__ import annotations

import pytest

from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.task.outline import StepOutline, consuming, producing

RETRIES = {
    "first": {"max_attempts": 2, "timeout": 1.5, "backoff": 0.25, "multiplier": 3.0, "cap": 9.0, "jitter": 0.5},
    "second": {"max_attempts": 4, "timeout": None, "backoff": 0.5, "multiplier": 1.0, "cap": 0.0, "jitter": 0.0},
    "third": {"max_attempts": 5, "timeout": 6.0, "backoff": 0.0, "multiplier": 1.5, "cap": 8.0, "jitter": 1.0},
    "fourth": {"max_attempts": 6, "timeout": 7.0, "backoff": 1.0, "multiplier": 2.5, "cap": 7.0, "jitter": 0.75},
}


def steps(**chosen):
    return {name: {"retry": RETRIES[which]} for name, which in chosen.items()}


def step(name, span, which):
    settings = RETRIES[which]
    shared = {"ergon.task": "Orders", "ergon.step": name}
    shown = {f"ergon.retry.{key}": settings[key] for key in SHOWN if settings[key] is not None}
    shown["ergon.max_attempts"] = settings["max_attempts"]
    shown["ergon.retry"] = " ".join(f"{key}={spelled(settings[key])}" for key in SHOWN)
    return StepOutline(span, f"{span}.attempt", shared | shown)


SHOWN = ("timeout", "backoff", "multiplier", "cap", "jitter")


def spelled(value):
    return "none" if value is None else f"{value:g}"


LOOP = {"concurrency": {"value": 3}, "batch": {"size": 12}}
SHARED = {"ergon.task": "Orders", "ergon.concurrency": 3, "ergon.batch.size": 12}


@pytest.mark.spec("CON-16", "DX-15")
def test_a_consumer_is_outlined_with_the_settings_of_each_step():
    chosen = steps(fetch="first", process="second", success="third", exception="fourth")
    outline = consuming("Orders", ConsumerPolicy.load({"loop": LOOP, "steps": chosen}))
    assert (outline.task, outline.kind) == ("Orders", "consumer")
    assert (outline.root, outline.transaction) == ("consume_transactions", "start_processing")
    assert outline.attributes == SHARED
    assert outline.steps == {
        "fetch": step("fetch", "fetch_transactions", "first"),
        "process": step("process", "process", "second"),
        "success": step("success", "handle_success", "third"),
        "exception": step("exception", "handle_exception", "fourth"),
    }
    assert outline.everyday == ("process", "success")


@pytest.mark.spec("PRO-10", "DX-15")
def test_a_producer_is_outlined_with_the_settings_of_each_step():
    chosen = steps(produce="second", success="third", exception="fourth")
    outline = producing("Orders", ProducerPolicy.load({"loop": LOOP, "steps": chosen}))
    assert (outline.task, outline.kind) == ("Orders", "producer")
    assert (outline.root, outline.transaction) == ("produce_transactions", "start_producing")
    assert outline.attributes == SHARED
    assert outline.steps == {
        "produce": step("produce", "produce", "second"),
        "success": step("success", "handle_produce_success", "third"),
        "exception": step("exception", "handle_produce_exception", "fourth"),
    }
    assert outline.everyday == ("produce", "success")


def test_a_step_without_a_time_limit_shows_none():
    outline = consuming("Orders", ConsumerPolicy.load({"steps": steps(process="second")}))
    assert "ergon.retry.timeout" not in outline.steps["process"].attempt_attributes
