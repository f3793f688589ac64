"""What JetStream's refusals mean."""

from __future__ import annotations

import pytest

from ergon_framework.connectors.nats.api import NO_MESSAGE, NO_STREAM, NO_SUCH_SEQUENCE, NOT_DELETED, ApiError


@pytest.mark.parametrize(
    "number, words, gone",
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
def test_only_a_store_that_is_open_knows_that_a_message_is_gone(number, words, gone):
    assert ApiError(words, number=number).gone is gone
