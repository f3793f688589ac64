"""The conformance suite itself: its results for passed, failed and inapplicable checks, and for a single variant."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.testing.conformance.connector.adapter import UNKNOWN_DURABILITY
from ergon_framework.testing.conformance.connector.check_outages import MAX_QUICK_DISPATCHES
from ergon_framework.testing.conformance.connector.suite import (
    CHECKS,
    CheckOutcome,
    check,
    expect,
    pytest_suite,
    run_check,
    run_suite,
)
from tests.conformance.candidates import MemoryLogUnderTest, MemoryUnderTest, make_memory_with_codec
from tests.unit.connectors.harness import OnlyAsync, OnlySync


class SingleVariantUnderTest(MemoryUnderTest):
    """A connector under test whose clients have one variant; the bridge adds the other one."""

    def __init__(self, wrapper_class):
        super().__init__()
        self._wrapper_class = wrapper_class
        self._clients = {}

    def client(self, queue, *, lease):
        if queue not in self._clients:
            self._clients[queue] = self._wrapper_class(super().client(queue, lease=lease))
        return self._clients[queue]


@pytest.mark.spec("CNN-01")
@pytest.mark.parametrize("wrapper_class, variant", [(OnlySync, "async"), (OnlyAsync, "sync")])
def test_a_single_variant_passes_with_the_bridge(wrapper_class, variant):
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda check: run_check(check, SingleVariantUnderTest(wrapper_class), variant), CHECKS))
    assert [str(check_result) for check_result in results if check_result.result is CheckOutcome.FAILED] == []


def test_an_inapplicable_check_has_a_reason():
    results = {
        check_result.check: check_result
        for check_result in run_suite(MemoryUnderTest(), only=["dispatch_takes_all_or_none"])
    }
    check_result = results["dispatch_takes_all_or_none"]
    assert check_result.result is CheckOutcome.NOT_APPLICABLE
    assert "the system under test encodes nothing" in check_result.reason


@pytest.mark.parametrize(
    "factory, names",
    [
        (
            MemoryUnderTest,
            {
                "the_order_of_a_key_is_kept",
                "transactions_of_a_key_never_overlap",
                "a_higher_priority_is_delivered_first",
                "an_unencodable_delivery_affects_no_other",
                "a_log_that_was_taken_over_refuses_the_old_consumer",
                "dispatch_takes_all_or_none",
                "an_undecodable_message_arrives_with_its_bytes",
                "a_too_large_message_arrives_with_its_size",
                "an_undecodable_message_is_dead_lettered_with_its_bytes",
                "an_undecodable_message_stops_no_loop",
            },
        ),
        (
            make_memory_with_codec,
            {
                "the_order_of_a_key_is_kept",
                "transactions_of_a_key_never_overlap",
                "a_higher_priority_is_delivered_first",
                "a_log_that_was_taken_over_refuses_the_old_consumer",
            },
        ),
        (
            MemoryLogUnderTest,
            {
                "a_delayed_dispatch_is_not_delivered_early",
                "a_delayed_dispatch_is_counted_as_delayed",
                "a_time_in_the_past_is_immediate",
                "the_longest_delay_is_kept_and_a_longer_one_is_rejected",
                "a_delayed_dispatch_outlives_its_client",
                "delays_are_kept_when_the_server_is_stopped",
                "a_replaced_dead_letter_is_sent_once",
                "transactions_of_a_key_never_overlap",
                "a_higher_priority_is_delivered_first",
                "a_cancelled_fetch_keeps_nothing",
                "an_acked_transaction_is_not_redelivered_after_its_lease",
                "an_unencodable_delivery_affects_no_other",
                "a_claim_reports_its_lease_time",
                "renewal_keeps_a_claim_beyond_its_lease",
                "an_unrenewed_claim_goes_to_another_client",
                "a_stale_claim_settles_nothing",
                "a_stale_claim_of_the_same_client_settles_nothing",
                "a_lost_claim_is_reported",
                "dispatch_takes_all_or_none",
                "an_undecodable_message_arrives_with_its_bytes",
                "a_too_large_message_arrives_with_its_size",
                "an_undecodable_message_is_dead_lettered_with_its_bytes",
                "an_undecodable_message_stops_no_loop",
                "a_loop_renews_claims_of_long_calls",
                "two_loops_share_the_work",
            },
        ),
    ],
)
def test_the_inapplicable_checks_are_known(factory, names):
    system = factory()
    capabilities = system.client("any", lease=1.0).capabilities
    inapplicable = {check.name for check in CHECKS if check.get_skip_reason(system, capabilities)}
    without_server_faults = {name for name in inapplicable if not name.endswith(("_killed", "_cut_off"))}
    assert without_server_faults == names


def test_every_connector_requirement_has_a_check():
    checked_requirements = {name for check in CHECKS for name in check.ids}
    # The last delivery runs alone (11) and foreign ids (16) belong to the engine and the codec.
    assert checked_requirements == {f"CNN-{number:02}" for number in range(1, 18)} - {"CNN-11", "CNN-16"} | {
        "DX-10",
        "SEC-21",
    }


def test_names_are_unique():
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_an_unknown_check_is_rejected():
    with pytest.raises(ValueError, match="no check called 'a_fetsh'"):
        run_suite(MemoryUnderTest(), only=["a_fetsh"])


def test_a_system_under_test_may_add_checks():
    @check("MINE-1")
    async def it_is_called_memory(context):
        client = await context.client()
        expect(client.connector.name == "memory", f"it is called {client.connector.name}")

    system = MemoryUnderTest()
    system.checks = [it_is_called_memory]
    (check_result,) = run_suite(system, variant="async", only=["it_is_called_memory"])
    assert check_result.result is CheckOutcome.FAILED
    assert "it is called conformance-" in str(check_result)


def test_an_unexpected_error_is_reported_with_its_location():
    class FailingConnector(MemoryConnector):
        def dispatch(self, transactions):
            raise ZeroDivisionError("by nothing")

    (check_result,) = run_suite(MemoryUnderTest(FailingConnector), only=["a_confirmed_dispatch_is_delivered"])
    assert check_result.result is CheckOutcome.FAILED
    assert check_result.reason.startswith("ZeroDivisionError: by nothing (")


@pytest.fixture
def memory_system():
    return MemoryUnderTest()


FEW_CHECKS = [
    check for check in CHECKS if check.name in ("a_release_costs_nothing", "a_higher_priority_is_delivered_first")
]
test_a_fixture_may_yield_the_system_under_test = pytest_suite("memory_system", checks=FEW_CHECKS, variants=["async"])


# -- features that memory lacks, pretended --------------------------------------------------------------


class FullFeaturedMemoryUnderTest(MemoryUnderTest):
    """Memory with an inbox, an outbox and priorities, each of which can be switched to a wrong one."""

    def __init__(self, *, wrong=False):
        super().__init__(partial(PriorityMemoryConnector, wrong=wrong))
        self.wrong = wrong

    def inbox(self, task):
        process, succeeded_ids = task.process_transaction, set()

        def process_once(transaction):
            if transaction.id in succeeded_ids and not self.wrong:
                return None
            result = process(transaction)
            succeeded_ids.add(transaction.id)
            return result

        task.process_transaction = process_once
        return task

    @contextmanager
    def outbox(self, queue):
        yield PretendedOutbox(self.client(queue, lease=1.0), commits_immediately=self.wrong)


class PretendedOutbox:
    def __init__(self, client, *, commits_immediately):
        self._client = client
        self._commits_immediately = commits_immediately
        self._transactions = []

    def dispatch(self, transactions):
        self._transactions += transactions
        if self._commits_immediately:
            self.commit()

    def commit(self):
        self._client.dispatch(self._transactions)
        self._transactions = []

    def rollback(self):
        self._transactions = []


class PriorityMemoryConnector(MemoryConnector):
    def __init__(self, name, *, wrong, **options):
        super().__init__(name, **options)
        self._wrong = wrong

    @property
    def capabilities(self):
        return replace(super().capabilities, priority=True)

    def dispatch(self, transactions):
        confirmations = super().dispatch(transactions)
        if not self._wrong and transactions[0].priority:
            self._unclaimed.rotate(len(transactions))
        return confirmations


@pytest.mark.parametrize("wrong, result", [(False, CheckOutcome.PASSED), (True, CheckOutcome.FAILED)])
@pytest.mark.parametrize(
    "name",
    [
        "a_higher_priority_is_delivered_first",
        "an_inbox_runs_a_succeeded_transaction_once",
        "an_outbox_dispatches_with_the_callers_transaction",
    ],
)
def test_offered_features_are_checked(name, wrong, result):
    (check_result,) = run_suite(FullFeaturedMemoryUnderTest(wrong=wrong), only=[name])
    assert check_result.result is result, check_result


class SlowlyStoppedMemoryUnderTest(MemoryUnderTest):
    """Its server still confirms *dispatch_count* dispatches while it stops."""

    def __init__(self, dispatch_count):
        super().__init__()
        self._dispatch_count = dispatch_count
        self._sent = threading.Condition()
        self._sent_count = 0
        stop = self.server.stop

        def stop_slowly():
            with self._sent:
                assert self._sent.wait_for(lambda: self._sent_count >= self._dispatch_count, timeout=30)
            stop()

        self.server.stop = stop_slowly

    def client(self, queue, *, lease):
        client = super().client(queue, lease=lease)
        dispatch = client.dispatch

        def dispatch_and_count(transactions):
            confirmations = dispatch(transactions)
            with self._sent:
                self._sent_count += len(transactions)
                self._sent.notify_all()
            return confirmations

        client.dispatch = dispatch_and_count
        return client


@pytest.mark.spec("CNN-02", "CNN-07")
def test_dispatches_meet_the_outage_of_a_server_that_stops_slowly():
    system = SlowlyStoppedMemoryUnderTest(dispatch_count=MAX_QUICK_DISPATCHES + 10)
    (check_result,) = run_suite(system, variant="sync", only=["dispatching_loses_nothing_when_the_server_is_stopped"])
    assert check_result.result is CheckOutcome.PASSED, check_result


@pytest.mark.spec("CNN-17")
@pytest.mark.parametrize(
    "durable, result",
    [(False, CheckOutcome.PASSED), (True, CheckOutcome.FAILED), (UNKNOWN_DURABILITY, CheckOutcome.NOT_APPLICABLE)],
)
def test_the_declared_durability_is_compared(durable, result):
    system = MemoryUnderTest()
    system.durable = durable
    (check_result,) = run_suite(system, only=["the_connector_reports_its_durability"])
    assert check_result.result is result
