"""How many files of the package one transaction crosses on PostgreSQL: a reader of the path has to open all of them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import ergon_framework
from ergon_framework import ConsumerPolicy, Transaction, consumer
from tests.integration.boxes import open_queue

PACKAGE = str(Path(str(ergon_framework.__file__)).parent)
MAX_FILES = 31
ONE_AT_A_TIME = ConsumerPolicy.model_validate({"loop": {"concurrency": {"value": 1}, "batch": {"size": 1}}})


class CallProfile:
    """The files of the package whose functions are called between two calls of a handler."""

    def __init__(self) -> None:
        self.files_by_window: list[set[str]] = []

    def start_window(self) -> None:
        self.files_by_window.append(set())

    def record(self, frame, event, argument):
        filename, function = frame.f_code.co_filename, frame.f_code.co_name
        if event != "call" or function == "<module>":  # an import on first use is not part of the path
            return
        if self.files_by_window and filename.startswith(PACKAGE):
            self.files_by_window[-1].add(filename.removeprefix(PACKAGE))


def consume(queue, on_start):
    @consumer(queue, policy=ONE_AT_A_TIME)
    def charge(transaction: Transaction) -> None:
        on_start()

    return charge.consume_transactions()


def test_one_transaction_crosses_few_files(database):
    with open_queue(database, "warm-up") as queue:
        queue.dispatch([Transaction({}, id="order-0")])
        consume(queue, lambda: None)
    profile = CallProfile()
    with open_queue(database, "orders") as queue:
        queue.dispatch([Transaction({}, id=f"order-{number}") for number in range(3)])
        threading.setprofile(profile.record)
        sys.setprofile(profile.record)
        try:
            report = consume(queue, profile.start_window)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    assert report.started == 3
    # From the start of one handler to the start of the next: return, settle, fetch, decode, admit, start.
    window = profile.files_by_window[1]
    assert "/connectors/postgres/settle.py" in window
    assert "/connectors/postgres/claims.py" in window
    assert len(window) <= MAX_FILES, sorted(window)
