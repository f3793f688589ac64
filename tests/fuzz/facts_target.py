"""The facts service under the fuzzer: facts_target.py DIRECTION [options of libFuzzer]; started by facts.py.

Requests go all the way: decoded, validated, authorised, and executed by a store in memory. Every request is answered or
rejected with an error of facts.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys

import atheris

# Everything but the fuzzed slice itself, so that its edges are counted separately.
import ergon_framework.telemetry.metrics  # noqa: F401
from ergon_framework.errors import ErgonError

with atheris.instrument_imports(include=["ergon_framework.facts"]):
    from ergon_framework.facts.errors import FactError, InvalidFactError
    from ergon_framework.facts.model import Envelope, Fact
    from ergon_framework.facts.service import boundary_pb2 as wire
    from ergon_framework.facts.service import calls, errors, requests
    from ergon_framework.facts.service import wire as messages
    from ergon_framework.facts.service.access import AccessPolicy, Identity, RevocationList
    from ergon_framework.facts.service.handlers import BoundaryService
    from ergon_framework.facts.service.transfer import RemoteDownload, check_stored
    from ergon_framework.facts.stores.memory import MemoryBoundary

from tests.fuzz.facts_grammar import ANSWERS, CONFIRMATION, ENVELOPE, FACT, REQUESTS, make_random, mutate_message

#: Callers: one with many rights, one with few, and an operator.
CALLERS = [
    Identity(frozenset(["Plant A"]), None, 0, 2**40, "0" * 64),
    Identity(frozenset(["HQ"]), None, 0, 2**40, "1" * 64),
    Identity(frozenset(), "ops", 0, 2**40, "2" * 64),
]
METHOD_NAMES = {
    name: "_" + "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
    for name in REQUESTS
} | {
    "CursorOf": "_get_cursor",
    "EndOf": "_last_offset",
    "CursorAt": "_cursor_at_time",
    "Survey": "_list_logs",
    "Received": "_uploaded_bytes",
}


class RenewingService:
    """A service over a store that is replaced before it grows."""

    def __init__(self):
        self.renew()

    def renew(self):
        self.remaining_calls = 2000
        self.store = MemoryBoundary(max_facts=500, max_bytes=50_000_000)
        self.service = BoundaryService(self.store, AccessPolicy(["Plant A"]), RevocationList())

    def get_service(self):
        self.remaining_calls -= 1
        if not self.remaining_calls:
            self.renew()
        return self.service


renewing_service = RenewingService()


LOOP = asyncio.new_event_loop()


def run_coroutine(coroutine):
    """Return the result of *coroutine*, which may use threads and must end in time."""
    return LOOP.run_until_complete(asyncio.wait_for(coroutine, 20))


def check_request(name, data):
    service = renewing_service.get_service()
    if name in {"PutObject", "GetObject"}:
        reader = requests.parse_put_part if name == "PutObject" else requests.parse_get_object
        try:
            reader(data)
        except InvalidFactError as error:
            check_error(error)
        return
    for caller in CALLERS:
        try:
            answer = run_coroutine(getattr(service, METHOD_NAMES[name])(caller, data))
        except FactError as error:
            check_error(error)
        else:
            encoded = messages.encode(answer)
            assert type(answer).FromString(encoded) == answer, "an answer that changes on its way"
            assert len(encoded) <= requests.MAX_MESSAGE_BYTES, "an answer that exceeds the message limit"
    if name == "AppendFact":
        try:
            envelope, fact = requests.parse_append_fact(data)
        except InvalidFactError:
            return
        decoded = requests.parse_append_fact(messages.encode(messages.write_appending(envelope, fact)))
        assert decoded == (envelope, fact), "a fact that changes on its way"
    if name == "AppendFacts":
        check_batch(data)


def check_batch(data):
    """Check that facts made in batches equal the model's facts, and stay equal when they are sent on."""
    try:
        parsed = requests.parse_append_facts(data)
    except InvalidFactError:
        return
    valid = [each for each in parsed if not isinstance(each, InvalidFactError)]
    for envelope, fact in valid:
        assert Envelope(**vars(envelope)) == envelope, "an envelope that the model would not make"
        rebuilt = Fact(subject=fact.subject, predicate=fact.predicate, object_json=fact.object_json)
        assert vars(rebuilt) == vars(fact), "a fact that the model would not make"
    sent_messages = [messages.encode(call.request) for call in calls.append_facts(valid)]
    assert [each for data in sent_messages for each in requests.parse_append_facts(data)] == valid, (
        "facts that change on their way"
    )


def check_error(error):
    """Check that every error of a rejection can be sent, and is read back unchanged."""
    errors.to_status_code(error)
    decoded = errors.from_wire(wire.Fault.FromString(messages.encode(errors.to_wire(error))))
    assert type(decoded) in type(error).__mro__, "an error that becomes another"
    assert len(str(decoded)) <= errors.MAX_FAULT_MESSAGE_BYTES, "words without end"


PAIR = messages.read_pair(wire.Pair(from_zone="Plant A", to_zone="HQ"))
STATEMENT = messages.read_envelope(ENVELOPE), messages.read_fact(FACT)
CALLS = {
    "Describe": calls.describe(),
    "AppendFact": calls.append_fact(*STATEMENT),
    "AppendFacts": next(calls.append_facts([STATEMENT] * 2)),
    "GetFact": calls.get_fact("Plant A", "m-1"),
    "FetchFacts": calls.fetch_facts("r", PAIR, 10, None),
    "CursorOf": calls.get_cursor("r", PAIR),
    "RetireReader": calls.retire_reader("r", PAIR, ""),
    "Survey": calls.list_logs(),
    "Received": calls.uploaded_bytes("b", "k", messages.read_artifact(wire.Stored(digest=CONFIRMATION.digest, size=1))),
}


def check_answer(name, data):
    try:
        if name == "PutObject":
            check_stored(data)
        elif name == "GetObject":
            RemoteDownload("b", "k", 0).parse_chunk(data)
        elif name == "Fault":
            assert isinstance(errors.to_client_error(FailedCall(data), "AppendFact"), ErgonError), (
                "a failure that is not an error"
            )
        else:
            CALLS[name].to_result(data)
    except ErgonError:
        pass


class FailedCall:
    def __init__(self, data):
        self._data = data

    def code(self):
        return errors.grpc.StatusCode.UNAVAILABLE

    def details(self):
        return "gone"

    def trailing_metadata(self):
        return ((errors.METADATA_KEY, self._data),)


CHECKS = {"facts-requests": (check_request, list(REQUESTS)), "facts-answers": (check_answer, list(ANSWERS))}


def main():
    direction = sys.argv[1]
    check, names = CHECKS[direction]
    logging.disable(logging.CRITICAL)

    def fuzz_one(data):
        if data:
            check(names[data[0] % len(names)], data[1:])

    def mutate(data, max_size, seed):
        candidate = mutate_message(data, direction, make_random(seed)) if seed % 3 else None
        return atheris.Mutate(data, max_size) if candidate is None or len(candidate) > max_size else candidate

    # When libFuzzer merges it restarts itself through a shell.
    restart_command = f"{shlex.quote(sys.executable)} -m tests.fuzz.facts_target {direction}"
    atheris.Setup([restart_command, *sys.argv[2:]], fuzz_one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
