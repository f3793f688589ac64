"""The exam itself: what it says of those who pass, fail, or cannot be asked, and that either flavour is enough."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.testing.conformance.candidate import UNSAID
from ergon_framework.testing.conformance.connector import CHECKS, Result, exam, expect, mark, rule, take
from tests.conformance.candidates import LogCandidate, MemoryCandidate, with_codec
from tests.unit.connectors.worlds import OnlyAsync, OnlySync


class Halved(MemoryCandidate):
    """A candidate whose clients have one flavour; the other one is the bridge's."""

    def __init__(self, half):
        super().__init__()
        self._half = half
        self._clients = {}

    def client(self, queue, *, lease):
        if queue not in self._clients:
            self._clients[queue] = self._half(super().client(queue, lease=lease))
        return self._clients[queue]


@pytest.mark.spec("CNN-01")
@pytest.mark.parametrize("half, variant", [(OnlySync, "async"), (OnlyAsync, "sync")])
def test_one_flavour_and_a_bridge_pass(half, variant):
    with ThreadPoolExecutor(6) as threads:
        marks = list(threads.map(lambda check: mark(check, Halved(half), variant), CHECKS))
    assert [str(got) for got in marks if got.result is Result.FAILED] == []


def test_what_does_not_apply_says_why():
    marks = {got.check: got for got in take(MemoryCandidate(), only=["dispatch_takes_all_or_none"])}
    got = marks["dispatch_takes_all_or_none"]
    assert got.result is Result.NOT_APPLICABLE
    assert "nothing is encoded" in got.reason


@pytest.mark.parametrize(
    "make, names",
    [
        (
            MemoryCandidate,
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
            with_codec,
            {
                "the_order_of_a_key_is_kept",
                "nothing_of_a_key_is_in_two_hands",
                "the_urgent_comes_first",
                "a_log_that_was_taken_over_refuses_the_old_consumer",
            },
        ),
        (
            LogCandidate,
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
def test_nothing_is_left_out_unseen(make, names):
    candidate = make()
    capabilities = candidate.client("any", lease=1.0).capabilities
    left_out = {check.name for check in CHECKS if check.applies(candidate, capabilities)}
    without_the_real_servers = {name for name in left_out if not name.endswith(("_killed", "_cut_off"))}
    assert without_the_real_servers == names


def test_every_connector_requirement_has_a_check():
    asked = {name for check in CHECKS for name in check.ids}
    # The last delivery runs alone (11) and foreign ids (16) are the engine's and the codec's.
    assert asked == {f"CNN-{number:02}" for number in range(1, 18)} - {"CNN-11", "CNN-16"} | {"DX-10", "SEC-21"}


def test_names_are_unique():
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_an_unknown_check_is_refused():
    with pytest.raises(ValueError, match="no check called 'a_fetsh'"):
        take(MemoryCandidate(), only=["a_fetsh"])


def test_a_candidate_may_ask_more_of_itself():
    @rule("MINE-1")
    async def it_is_called_memory(sitting):
        client = await sitting.client()
        expect(client.connector.name == "memory", f"it is called {client.connector.name}")

    candidate = MemoryCandidate()
    candidate.checks = [it_is_called_memory]
    (got,) = take(candidate, variant="async", only=["it_is_called_memory"])
    assert got.result is Result.FAILED
    assert "it is called exam-" in str(got)


def test_an_error_that_is_no_answer_is_told_with_its_place():
    class Breaks(MemoryConnector):
        def dispatch(self, transactions):
            raise ZeroDivisionError("by nothing")

    (got,) = take(MemoryCandidate(Breaks), only=["what_is_confirmed_is_there"])
    assert got.result is Result.FAILED
    assert got.reason.startswith("ZeroDivisionError: by nothing (")


@pytest.fixture
def memory_candidate():
    return MemoryCandidate()


FEW = [check for check in CHECKS if check.name in ("a_release_costs_nothing", "the_urgent_comes_first")]
test_a_fixture_may_have_the_candidate = exam("memory_candidate", checks=FEW, variants=["async"])


# -- what memory has not, pretended ---------------------------------------------------------------------


class Hooked(MemoryCandidate):
    """Memory with an inbox, an outbox and priorities, each of which can be switched to a wrong one."""

    def __init__(self, *, wrong=False):
        super().__init__(Prioritised)
        self.wrong = wrong

    def dispatch_urgent(self, client, transaction):
        client.dispatch([transaction])
        if not self.wrong:
            client._fresh.rotate(1)
        return True

    def inbox(self, task):
        inner, succeeded = task.process_transaction, set()

        def once(transaction):
            if transaction.id in succeeded and not self.wrong:
                return None
            result = inner(transaction)
            succeeded.add(transaction.id)
            return result

        task.process_transaction = once
        return task

    @contextmanager
    def outbox(self, queue):
        yield PretendedOutbox(self.client(queue, lease=1.0), commits_at_once=self.wrong)


class PretendedOutbox:
    def __init__(self, client, *, commits_at_once):
        self._client = client
        self._commits_at_once = commits_at_once
        self._written = []

    def dispatch(self, transactions):
        self._written += transactions
        if self._commits_at_once:
            self.commit()

    def commit(self):
        self._client.dispatch(self._written)
        self._written = []

    def rollback(self):
        self._written = []


class Prioritised(MemoryConnector):
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
def test_what_a_candidate_offers_is_examined(name, wrong, result):
    (got,) = take(Hooked(wrong=wrong), only=[name])
    assert got.result is result, got


@pytest.mark.spec("CNN-17")
@pytest.mark.parametrize(
    "durable, result", [(False, Result.PASSED), (True, Result.FAILED), (UNSAID, Result.NOT_APPLICABLE)]
)
def test_what_the_settings_are_worth_is_compared(durable, result):
    candidate = MemoryCandidate()
    candidate.durable = durable
    (got,) = take(candidate, only=["it_says_what_a_power_loss_could_cost"])
    assert got.result is result
