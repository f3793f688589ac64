"""The conformance suite itself: its results for passed, failed and inapplicable checks, and for a single variant."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.testing.conformance.candidate import UNSAID
from ergon_framework.testing.conformance.connector import (
    CHECKS,
    Result,
    check,
    expect,
    pytest_suite,
    run_check,
    run_suite,
)
from tests.conformance.candidates import MemoryLogUnderTest, MemoryUnderTest, make_memory_with_codec
from tests.unit.connectors.worlds import OnlyAsync, OnlySync


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
    assert [str(check_result) for check_result in results if check_result.result is Result.FAILED] == []


def test_an_inapplicable_check_has_a_reason():
    results = {
        check_result.check: check_result
        for check_result in run_suite(MemoryUnderTest(), only=["dispatch_takes_all_or_none"])
    }
    check_result = results["dispatch_takes_all_or_none"]
    assert check_result.result is Result.NOT_APPLICABLE
    assert "nothing is encoded" in check_result.reason


@pytest.mark.parametrize(
    "factory, names",
    [
        (
            MemoryUnderTest,
            {
                "the_order_of_a_key_is_kept",
                "nothing_of_a_key_is_in_two_hands",
                "the_urgent_comes_first",
                "what_cannot_be_written_spoils_no_neighbour",
                "a_log_that_was_taken_over_refuses_the_old_consumer",
                "dispatch_takes_all_or_none",
                "what_is_too_large_is_refused",
                "what_cannot_be_read_comes_with_its_bytes",
                "what_is_too_large_to_read_says_its_size",
                "what_cannot_be_read_is_a_dead_letter_with_its_bytes",
                "what_cannot_be_read_stops_no_loop",
            },
        ),
        (
            make_memory_with_codec,
            {
                "the_order_of_a_key_is_kept",
                "nothing_of_a_key_is_in_two_hands",
                "the_urgent_comes_first",
                "a_log_that_was_taken_over_refuses_the_old_consumer",
            },
        ),
        (
            MemoryLogUnderTest,
            {
                "a_replaced_dead_letter_is_sent_once",
                "nothing_of_a_key_is_in_two_hands",
                "the_urgent_comes_first",
                "a_cancelled_fetch_keeps_nothing",
                "what_is_acked_stays_away_when_its_lease_would_have_ended",
                "what_cannot_be_written_spoils_no_neighbour",
                "a_claim_says_how_long_it_holds",
                "renewal_keeps_a_claim_beyond_its_lease",
                "a_claim_that_nobody_renews_goes_to_another",
                "a_stale_claim_settles_nothing",
                "a_stale_claim_of_the_same_client_settles_nothing",
                "a_lost_claim_is_reported",
                "dispatch_takes_all_or_none",
                "what_is_too_large_is_refused",
                "what_cannot_be_read_comes_with_its_bytes",
                "what_is_too_large_to_read_says_its_size",
                "what_cannot_be_read_is_a_dead_letter_with_its_bytes",
                "what_cannot_be_read_stops_no_loop",
                "a_loop_renews_what_takes_longer_than_its_lease",
                "two_loops_share_the_work",
            },
        ),
    ],
)
def test_the_inapplicable_checks_are_known(factory, names):
    system = factory()
    capabilities = system.client("any", lease=1.0).capabilities
    inapplicable = {check.name for check in CHECKS if check.applies(system, capabilities)}
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
    assert check_result.result is Result.FAILED
    assert "it is called exam-" in str(check_result)


def test_an_unexpected_error_is_reported_with_its_location():
    class FailingConnector(MemoryConnector):
        def dispatch(self, transactions):
            raise ZeroDivisionError("by nothing")

    (check_result,) = run_suite(MemoryUnderTest(FailingConnector), only=["what_is_confirmed_is_there"])
    assert check_result.result is Result.FAILED
    assert check_result.reason.startswith("ZeroDivisionError: by nothing (")


@pytest.fixture
def memory_system():
    return MemoryUnderTest()


FEW_CHECKS = [check for check in CHECKS if check.name in ("a_release_costs_nothing", "the_urgent_comes_first")]
test_a_fixture_may_yield_the_system_under_test = pytest_suite("memory_system", checks=FEW_CHECKS, variants=["async"])


# -- features that memory lacks, pretended --------------------------------------------------------------


class FullFeaturedMemoryUnderTest(MemoryUnderTest):
    """Memory with an inbox, an outbox and priorities, each of which can be switched to a wrong one."""

    def __init__(self, *, wrong=False):
        super().__init__(PriorityMemoryConnector)
        self.wrong = wrong

    def dispatch_urgent(self, client, transaction):
        client.dispatch([transaction])
        if not self.wrong:
            client._unclaimed.rotate(1)
        return True

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
    @property
    def capabilities(self):
        return replace(super().capabilities, priority=True)


@pytest.mark.parametrize("wrong, result", [(False, Result.PASSED), (True, Result.FAILED)])
@pytest.mark.parametrize(
    "name",
    [
        "the_urgent_comes_first",
        "with_an_inbox_what_has_succeeded_runs_once",
        "an_outbox_dispatches_with_the_callers_transaction",
    ],
)
def test_offered_features_are_checked(name, wrong, result):
    (check_result,) = run_suite(FullFeaturedMemoryUnderTest(wrong=wrong), only=[name])
    assert check_result.result is result, check_result


@pytest.mark.spec("CNN-17")
@pytest.mark.parametrize(
    "durable, result", [(False, Result.PASSED), (True, Result.FAILED), (UNSAID, Result.NOT_APPLICABLE)]
)
def test_the_declared_durability_is_compared(durable, result):
    system = MemoryUnderTest()
    system.durable = durable
    (check_result,) = run_suite(system, only=["it_says_what_a_power_loss_could_cost"])
    assert check_result.result is result
