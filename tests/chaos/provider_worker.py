"""One worker process of the fleet of providers: python -m tests.chaos.provider_worker CONFIGURATION

It prints ``ready``, begins at a line on stdin, and answers with one line of JSON. Its configuration, as JSON, says what
it does: see the functions of ``WORK``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from ergon_framework import ConsumerPolicy, ErgonError, consumer
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.providers.errors import ProviderCircuitOpenError, ProviderError
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.postgres.quota_blocks import BlockPolicy
from ergon_framework.providers.postgres.state import PostgresProviderState
from ergon_framework.testing.fake_provider import FakeProvider


class RecordingProvider(FakeProvider):
    """Records when calls that carry their begin reached the upstream."""

    def __init__(self, settings, state_store):
        # Only the address of the upstream is known here: it runs in another process.
        upstream = SimpleNamespace(address=tuple(settings["address"]))
        super().__init__(upstream, state_store=state_store, policy=ProviderPolicy.model_validate(settings["policy"]))
        self.sent = []

    def _execute_impl(self, *, payload, **rest):
        if "began" in payload:
            self.sent.append((payload["began"], time.time()))
        return super()._execute_impl(payload=payload, **rest)


def open_state_store(settings):
    blocks = settings.get("blocks")
    return PostgresProviderState(settings["dsn"], blocks=None if blocks is None else BlockPolicy.model_validate(blocks))


def make_calls(settings):
    """Make a number of calls on a number of threads; return how they ended."""
    outcomes, lock = Counter(), threading.Lock()
    state_store = open_state_store(settings)
    payments = RecordingProvider(settings, state_store)

    def call_once(_):
        key, outcome = settings.get("key"), "success"
        try:
            payments.call("charge", settings.get("payload", {}), key=key, tenant=settings["tenant"])
        except ProviderError as error:
            outcome = (
                error.code if error.code in {"in_flight", "provider_state_unavailable"} else error.reason_code.value
            )
        with lock:
            outcomes[outcome] += 1

    with ThreadPoolExecutor(settings["threads"]) as pool:
        list(pool.map(call_once, range(settings["calls"])))
    state_store.close()
    return dict(outcomes)


def hammer(settings):
    """Call on a number of threads until a deadline; return when rejected and answered calls began and ended."""
    state_store = open_state_store(settings)
    payments = RecordingProvider(settings, state_store)
    first_outcomes, sick_outcomes, lock, healthy_outcomes = [], Counter(), threading.Lock(), Counter()
    answered_starts, stop_file = [], Path(settings["stop"])

    def call_in_loop(number):
        is_sick = number < settings["threads"]
        tenant = settings["tenant"] if is_sick else settings["other"]
        while time.time() < settings["until"] and not stop_file.exists():
            started_at = time.time()
            try:
                payments.call("charge" if is_sick else "well", {"began": started_at} if is_sick else {}, tenant=tenant)
                outcome = "success"
            except ProviderCircuitOpenError:
                outcome = "circuit_open"
            except ProviderError as error:
                outcome = error.code if error.code == "provider_state_unavailable" else error.reason_code.value
            with lock:
                (sick_outcomes if is_sick else healthy_outcomes)[outcome] += 1
                if is_sick and not first_outcomes:
                    first_outcomes.append(outcome)
                if is_sick and outcome == "success":
                    answered_starts.append(started_at)
            # An open breaker answers immediately; a worker would defer the transaction.
            time.sleep(0.02 if outcome == "circuit_open" or not is_sick else 0.002)

    threads = [threading.Thread(target=call_in_loop, args=(n,)) for n in range(settings["threads"] + settings["well"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state_store.close()
    return {
        "sick": dict(sick_outcomes),
        "well": dict(healthy_outcomes),
        "first": first_outcomes[:1],
        "answered": answered_starts[:1],
        "sent": payments.sent,
    }


def consume(settings):
    """Fork a consumer repeatedly and kill it at random moments; then let one finish."""
    rng = random.Random(settings["seed"])
    kills = 0
    while kills < settings["kills"]:
        child = os.fork()
        if child == 0:
            _run_consumer(settings, forever=True)
        time.sleep(rng.uniform(0.0, settings["longest"]))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
    child = os.fork()
    if child == 0:
        _run_consumer(settings, forever=False)
    _, status = os.waitpid(child, 0)
    return {"kills": kills, "last": os.waitstatus_to_exitcode(status)}


def _run_consumer(settings, *, forever):
    exit_code = 1
    try:
        queue = PostgresQueue(settings["queue"], dsn=settings["dsn"], lease=settings["lease"])
        state_store = PostgresProviderState(settings["dsn"])
        payments = RecordingProvider(settings, state_store)
        policy = ConsumerPolicy.load({"loop": {"concurrency": {"value": 4}, "max_deliveries": 10_000}})

        @consumer(queue)
        def charge(order):
            payments.call("charge", order)

        deadline = time.monotonic() + settings["patience"]
        while forever or time.monotonic() < deadline:
            charge.consume_transactions(policy)
            depth = queue.depth()
            if not forever and depth.ready + depth.delayed + depth.in_flight == 0:
                exit_code = 0
                break
            time.sleep(0.05)
        queue.close()
        state_store.close()
    except ErgonError:
        exit_code = 2
    finally:
        os._exit(exit_code)


WORK = {"calls": make_calls, "hammer": hammer, "consume": consume}

if __name__ == "__main__":
    configuration = json.loads(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(WORK[configuration["work"]](configuration)), flush=True)
