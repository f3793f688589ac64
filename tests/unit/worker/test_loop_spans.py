"""The outline of a loop holds every name and every setting that its spans show."""

from __future__ import annotations

import pytest

from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.worker.spans import StepSpanNames, consumer_span_names, producer_span_names

RETRIES = {
    "first": {"max_attempts": 2, "timeout": 1.5, "backoff": 0.25, "multiplier": 3.0, "cap": 9.0, "jitter": 0.5},
    "second": {"max_attempts": 4, "timeout": None, "backoff": 0.5, "multiplier": 1.0, "cap": 0.0, "jitter": 0.0},
    "third": {"max_attempts": 5, "timeout": 6.0, "backoff": 0.0, "multiplier": 1.5, "cap": 8.0, "jitter": 1.0},
    "fourth": {"max_attempts": 6, "timeout": 7.0, "backoff": 1.0, "multiplier": 2.5, "cap": 7.0, "jitter": 0.75},
}


def make_steps(**chosen):
    return {name: {"retry": RETRIES[retry_name]} for name, retry_name in chosen.items()}


def make_step(name, span, retry_name):
    settings = RETRIES[retry_name]
    shared = {"ergon.task": "Orders", "ergon.step": name}
    retry_attributes = {f"ergon.retry.{key}": settings[key] for key in SHOWN_SETTINGS if settings[key] is not None}
    retry_attributes["ergon.max_attempts"] = settings["max_attempts"]
    retry_attributes["ergon.retry"] = " ".join(f"{key}={format_setting(settings[key])}" for key in SHOWN_SETTINGS)
    return StepSpanNames(span, f"{span}.attempt", shared | retry_attributes)


SHOWN_SETTINGS = ("timeout", "backoff", "multiplier", "cap", "jitter")


def format_setting(value):
    return "none" if value is None else f"{value:g}"


LOOP = {"concurrency": {"value": 3}, "batch": {"size": 12}}
SHARED = {"ergon.task": "Orders", "ergon.concurrency": 3, "ergon.batch.size": 12}


@pytest.mark.spec("CON-16", "DX-15")
def test_the_outline_of_a_consumer_has_the_settings_of_each_step():
    chosen = make_steps(fetch="first", process="second", success="third", exception="fourth")
    outline = consumer_span_names("Orders", ConsumerPolicy.load({"loop": LOOP, "steps": chosen}))
    assert (outline.task, outline.kind) == ("Orders", "consumer")
    assert (outline.root, outline.transaction) == ("consume_transactions", "start_processing")
    assert outline.attributes == SHARED
    assert outline.steps == {
        "fetch": make_step("fetch", "fetch_transactions", "first"),
        "process": make_step("process", "process", "second"),
        "success": make_step("success", "handle_success", "third"),
        "exception": make_step("exception", "handle_exception", "fourth"),
    }
    assert outline.success_steps == ("process", "success")


@pytest.mark.spec("PRO-10", "DX-15")
def test_the_outline_of_a_producer_has_the_settings_of_each_step():
    chosen = make_steps(produce="second", success="third", exception="fourth")
    outline = producer_span_names("Orders", ProducerPolicy.load({"loop": LOOP, "steps": chosen}))
    assert (outline.task, outline.kind) == ("Orders", "producer")
    assert (outline.root, outline.transaction) == ("produce_transactions", "start_producing")
    assert outline.attributes == SHARED
    assert outline.steps == {
        "produce": make_step("produce", "produce", "second"),
        "success": make_step("success", "handle_produce_success", "third"),
        "exception": make_step("exception", "handle_produce_exception", "fourth"),
    }
    assert outline.success_steps == ("produce", "success")


def test_a_step_without_a_time_limit_shows_none():
    outline = consumer_span_names("Orders", ConsumerPolicy.load({"steps": make_steps(process="second")}))
    assert "ergon.retry.timeout" not in outline.steps["process"].attempt_attributes
