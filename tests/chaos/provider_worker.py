"""One worker process of the fleet of providers: python -m tests.chaos.provider_worker CONFIGURATION

It says that it is ready, begins when it is told to, and answers with one line of JSON. What it does is told
by its configuration, as JSON: see the functions of ``WORK``.
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
from ergon_framework.providers.sql.blocks import BlockPolicy
from ergon_framework.providers.sql.books import PostgresBooks
from ergon_framework.providers.synthetic import SyntheticProvider


class Noting(SyntheticProvider):
    """Notes, of calls that say when they began, when they were let through."""

    def __init__(self, told, books):
        # Only the address of the upstream is known here: it lives in another process.
        upstream = SimpleNamespace(address=tuple(told["address"]))
        super().__init__(upstream, books=books, policy=ProviderPolicy.model_validate(told["policy"]))
        self.sent = []

    def _execute_impl(self, *, payload, **rest):
        if "began" in payload:
            self.sent.append((payload["began"], time.time()))
        return super()._execute_impl(payload=payload, **rest)


def books_of(told):
    blocks = told.get("blocks")
    return PostgresBooks(told["dsn"], blocks=None if blocks is None else BlockPolicy.model_validate(blocks))


def calls(told):
    """So many threads make so many calls each; how they ended."""
    counted, lock = Counter(), threading.Lock()
    books = books_of(told)
    payments = Noting(told, books)

    def one(_):
        key, outcome = told.get("key"), "success"
        try:
            payments.call("charge", told.get("payload", {}), key=key, tenant=told["tenant"])
        except ProviderError as error:
            outcome = error.code if error.code in {"in_flight", "books_unavailable"} else error.reason_code.value
        with lock:
            counted[outcome] += 1

    with ThreadPoolExecutor(told["threads"]) as pool:
        list(pool.map(one, range(told["calls"])))
    books.close()
    return dict(counted)


def hammer(told):
    """So many threads call until a moment; when the calls that were refused or answered began and ended."""
    books = books_of(told)
    payments = Noting(told, books)
    first, counted, lock, well = [], Counter(), threading.Lock(), Counter()
    answered, stop = [], Path(told["stop"])

    def loop(number):
        sick = number < told["threads"]
        tenant = told["tenant"] if sick else told["other"]
        while time.time() < told["until"] and not stop.exists():
            began = time.time()
            try:
                payments.call("charge" if sick else "well", {"began": began} if sick else {}, tenant=tenant)
                outcome = "success"
            except ProviderCircuitOpenError:
                outcome = "circuit_open"
            except ProviderError as error:
                outcome = error.code if error.code == "books_unavailable" else error.reason_code.value
            with lock:
                (counted if sick else well)[outcome] += 1
                if sick and not first:
                    first.append(outcome)
                if sick and outcome == "success":
                    answered.append(began)
            # An open breaker answers at once; a worker would be told to come back later.
            time.sleep(0.02 if outcome == "circuit_open" or not sick else 0.002)

    threads = [threading.Thread(target=loop, args=(n,)) for n in range(told["threads"] + told["well"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    books.close()
    return {
        "sick": dict(counted),
        "well": dict(well),
        "first": first[:1],
        "answered": answered[:1],
        "sent": payments.sent,
    }


def consume(told):
    """A consumer, forked again and again, and killed at random moments; then one that is left in peace."""
    dice = random.Random(told["seed"])
    kills = 0
    while kills < told["kills"]:
        child = os.fork()
        if child == 0:
            _consume(told, forever=True)
        time.sleep(dice.uniform(0.0, told["longest"]))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
    child = os.fork()
    if child == 0:
        _consume(told, forever=False)
    _, status = os.waitpid(child, 0)
    return {"kills": kills, "last": os.waitstatus_to_exitcode(status)}


def _consume(told, *, forever):
    code = 1
    try:
        queue = PostgresQueue(told["queue"], dsn=told["dsn"], lease=told["lease"])
        books = PostgresBooks(told["dsn"])
        payments = Noting(told, books)
        rules = ConsumerPolicy.load({"loop": {"concurrency": {"value": 4}, "max_deliveries": 10_000}})

        @consumer(queue)
        def charge(order):
            payments.call("charge", order)

        until = time.monotonic() + told["patience"]
        while forever or time.monotonic() < until:
            charge.consume_transactions(rules)
            depth = queue.depth()
            if not forever and depth.ready + depth.delayed + depth.in_flight == 0:
                code = 0
                break
            time.sleep(0.05)
        queue.close()
        books.close()
    except ErgonError:
        code = 2
    finally:
        os._exit(code)


WORK = {"calls": calls, "hammer": hammer, "consume": consume}

if __name__ == "__main__":
    configuration = json.loads(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(WORK[configuration["work"]](configuration)), flush=True)
