"""Each broken connector fails exactly the checks it breaks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ergon_framework.connectors.codec import JsonCodec
from ergon_framework.testing.conformance.connector.suite import CHECKS, CheckOutcome, run_check
from tests.conformance import broken
from tests.conformance.candidates import MemoryUnderTest

#: Broken connector -> the checks that it must fail, and no others.
EXPECTED_FAILURES = {
    broken.DropsDeadLetterBytes: {
        "an_undecodable_message_is_dead_lettered_with_its_bytes",
        "an_undecodable_message_stops_no_loop",
    },
    broken.ChangesTheId: {
        "the_envelope_arrives_and_stays_the_same",
        "an_unrenewed_claim_goes_to_another_client",
        "a_transaction_beyond_max_deliveries_is_dead_lettered",
    },
    broken.ComesTooEarly: {
        "what_is_deferred_comes_after_its_delay",
        "a_delay_outlives_its_client",
    },
    broken.ConfirmsTooEarly: {"a_confirmed_dispatch_is_delivered", "each_settlement_has_its_own_result"},
    broken.HalvesDispatchDelays: {
        "a_delayed_dispatch_is_not_delivered_early",
        "a_delayed_dispatch_outlives_its_client",
        "delays_are_kept_when_the_server_is_stopped",
    },
    broken.AcceptsEveryPriority: {"a_priority_is_rejected_where_there_is_none"},
    broken.ConfirmsInAnOutage: {
        "every_call_reports_the_outage_when_the_server_is_stopped",
        "dispatching_loses_nothing_when_the_server_is_stopped",
    },
    broken.CountsAtSettlement: {
        "a_crash_costs_exactly_one_delivery",
        "the_delivery_of_a_crash_stays_counted",
        "a_transaction_beyond_max_deliveries_is_dead_lettered",
    },
    broken.CountsReleases: {
        "a_release_costs_nothing",
        "the_delivery_of_a_crash_stays_counted",
        "a_stop_releases_the_rest_at_no_cost",
    },
    broken.DropsTheCorrelation: {
        "the_envelope_arrives_and_stays_the_same",
        "a_dead_letter_keeps_the_message_and_the_reason",
        "dead_letters_are_listed_page_by_page",
        "a_replayed_dead_letter_starts_from_scratch",
    },
    broken.RenewsLostClaims: {"a_lost_claim_is_reported", "a_settled_claim_cannot_be_renewed"},
    broken.ForgetsLater: {
        "what_is_deferred_comes_after_its_delay",
        "a_deferral_keeps_attempts_and_history",
        "a_deferral_costs_no_delivery",
        "a_delay_outlives_its_client",
        "the_depth_is_what_is_there",
        "each_transaction_of_a_loop_ends_exactly_once",
        "what_a_handler_does_to_a_payload_is_not_kept",
    },
    broken.ReturnsTooMany: {
        "a_fetch_brings_no_more_than_it_asks_for",
        "no_claim_is_handed_out_twice",
        "the_depth_is_what_is_there",
        "fetching_loses_nothing_when_the_server_is_stopped",
    },
    broken.ClaimsTwice: {"no_claim_is_handed_out_twice"},
    broken.IgnoresTokens: {
        "a_stale_claim_settles_nothing",
        "a_stale_claim_of_the_same_client_settles_nothing",
    },
    broken.ClosesWithoutWaking: {"closing_ends_a_waiting_fetch"},
    broken.LosesAttempts: {
        "a_deferral_keeps_attempts_and_history",
        "a_delay_outlives_its_client",
        "the_envelope_arrives_and_stays_the_same",
    },
    broken.NeverRenews: {
        "renewal_keeps_a_claim_beyond_its_lease",
        "a_loop_renews_claims_of_long_calls",
    },
    broken.ReplacesTwice: {"a_replaced_dead_letter_is_sent_once"},
    broken.ReplaysTheCounts: {"a_replayed_dead_letter_starts_from_scratch"},
    broken.LooksEmptyInAnOutage: {
        "every_call_reports_the_outage_when_the_server_is_stopped",
        "a_waiting_fetch_reports_the_outage_when_the_server_is_stopped",
    },
    broken.SettlesInAnOutage: {
        "every_call_reports_the_outage_when_the_server_is_stopped",
        "settling_loses_nothing_when_the_server_is_stopped",
        "dead_lettering_loses_nothing_when_the_server_is_stopped",
    },
    broken.FailsTheWholeGroup: {"an_unknown_settlement_affects_no_other"},
    broken.WithdrawsDeadLetters: {"dead_lettering_loses_nothing_when_the_server_is_stopped"},
    broken.NeverNotifiesListeners: {"a_listener_is_woken_by_a_dispatch"},
}


class ImpatientMemoryUnderTest(MemoryUnderTest):
    """A connector under test with shorter timeouts than a real server needs."""

    arrival = 3.0
    call_timeout = 5.0

    def client(self, queue, *, lease):
        exists = queue in self._queues
        client = super().client(queue, lease=lease)
        if not exists and hasattr(client, "hide"):
            client.hide()
        return client


def find_failures(connector_class, variant):
    def run_one_check(check):
        return run_check(check, ImpatientMemoryUnderTest(connector_class, codec=JsonCodec(max_bytes=4096)), variant)

    # Checks wait much and work little, and each has a separate connector.
    with ThreadPoolExecutor(6) as pool:
        return {
            check_result.check: check_result.reason
            for check_result in pool.map(run_one_check, CHECKS)
            if check_result.result is CheckOutcome.FAILED
        }


def test_a_valid_connector_fails_no_check():
    assert find_failures(broken.MemoryConnector, "async") == {}


@pytest.mark.parametrize("kind", EXPECTED_FAILURES, ids=lambda kind: kind.__name__)
def test_a_broken_connector_fails_exactly_the_checks_it_breaks(kind):
    assert set(find_failures(kind, "sync")) == EXPECTED_FAILURES[kind]
