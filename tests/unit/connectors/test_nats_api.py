"""What JetStream's refusals mean."""

from __future__ import annotations

import pytest

from ergon_framework.connectors.nats.api import NO_MESSAGE, NO_STREAM, NO_SUCH_SEQUENCE, NOT_DELETED, ApiError


@pytest.mark.parametrize(
    "number, message, is_gone",
    [
        (NO_MESSAGE, "no message found", True),
        (NO_SUCH_SEQUENCE, "sequence 7 not found", True),
        (NOT_DELETED, "stream store EOF", True),
        # What a server that was restarted says of a message that it had deleted before.
        (NOT_DELETED, "no message found", True),
        (NOT_DELETED, "deleted message", True),
        (NOT_DELETED, "stream store is closed", False),
        (NO_STREAM, "stream not found", False),
    ],
)
def test_a_message_is_gone_only_if_an_open_store_reports_it(number, message, is_gone):
    assert ApiError(message, number=number).is_not_found is is_gone
