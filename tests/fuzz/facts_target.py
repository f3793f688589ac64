"""The facts service under the fuzzer: facts_target.py DIRECTION [libFuzzer's own words]; started by facts.py.

Requests go all the way: decoded, checked, judged by the caller's rights, and done by a store in memory. Whatever comes,
it is answered or refused with an error of facts.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys

import atheris

# All but the slice itself, so that edges are its own.
import ergon_framework.telemetry.metrics  # noqa: F401
from ergon_framework.errors import ErgonError

with atheris.instrument_imports(include=["ergon_framework.facts"]):
    from ergon_framework.facts.errors import FactError, InvalidFactError
    from ergon_framework.facts.model import Envelope, Fact
    from ergon_framework.facts.service import boundary_pb2 as wire
    from ergon_framework.facts.service import calls, faults, messages, requests
    from ergon_framework.facts.service.access import Access
    from ergon_framework.facts.service.identity import Identity
    from ergon_framework.facts.service.revoked import Revoked
    from ergon_framework.facts.service.service import BoundaryService
    from ergon_framework.facts.service.transfer import Download, stored
    from ergon_framework.facts.stores.memory import MemoryBoundary

from tests.fuzz.facts_grammar import ANSWERS, CONFIRMATION, ENVELOPE, FACT, REQUESTS, mutated, random_of

#: Of every caller, one who may much, one who may little, and an operator.
WHO = [
    Identity(frozenset(["Plant A"]), None, 0, 2**40, "0" * 64),
    Identity(frozenset(["HQ"]), None, 0, 2**40, "1" * 64),
    Identity(frozenset(), "ops", 0, 2**40, "2" * 64),
]
NAMES = {
    name: "_" + "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
    for name in REQUESTS
}


class Room:
    """A service over a store that is replaced before it grows."""

    def __init__(self):
        self.renew()

    def renew(self):
        self.left = 2000
        self.store = MemoryBoundary(max_facts=500, max_bytes=50_000_000)
        self.service = BoundaryService(self.store, Access(["Plant A"]), Revoked())

    def used(self):
        self.left -= 1
        if not self.left:
            self.renew()
        return self.service


room = Room()


LOOP = asyncio.new_event_loop()


def ended(coroutine):
    """What *coroutine* returns; it may use threads, and has an end."""
    return LOOP.run_until_complete(asyncio.wait_for(coroutine, 20))


def check_request(name, data):
    service = room.used()
    if name in {"PutObject", "GetObject"}:
        reader = requests.put_part if name == "PutObject" else requests.get_object
        try:
            reader(data)
        except InvalidFactError as error:
            told(error)
        return
    for who in WHO:
        try:
            answer = ended(getattr(service, NAMES[name])(who, data))
        except FactError as error:
            told(error)
        else:
            written = messages.written(answer)
            assert type(answer).FromString(written) == answer, "an answer that changes on its way"
            assert len(written) <= requests.MESSAGE, "an answer that nobody takes"
    if name == "AppendFact":
        try:
            envelope, fact = requests.append_fact(data)
        except InvalidFactError:
            return
        again = requests.append_fact(messages.written(messages.write_appending(envelope, fact)))
        assert again == (envelope, fact), "a fact that changes on its way"
    if name == "AppendFacts":
        check_many(data)


def check_many(data):
    """Facts that were made at once are those that the model makes, and arrive as they were when they are sent on."""
    try:
        given = requests.append_facts(data)
    except InvalidFactError:
        return
    sound = [each for each in given if not isinstance(each, InvalidFactError)]
    for envelope, fact in sound:
        assert Envelope(**vars(envelope)) == envelope, "an envelope that the model would not make"
        stated = Fact(subject=fact.subject, predicate=fact.predicate, object_json=fact.object_json)
        assert vars(stated) == vars(fact), "a fact that the model would not make"
    sent = [messages.written(asked.request) for asked in calls.append_facts(sound)]
    assert [each for data in sent for each in requests.append_facts(data)] == sound, "facts that change on their way"


def told(error):
    """Whatever is refused can be sent, and comes out as it was."""
    faults.status(error)
    got = faults.read(wire.Fault.FromString(messages.written(faults.write(error))))
    assert type(got) in type(error).__mro__, "an error that becomes another"
    assert len(str(got)) <= faults.WORDS, "words without end"


PAIR = messages.read_pair(wire.Pair(from_zone="Plant A", to_zone="HQ"))
APPENDING = messages.read_envelope(ENVELOPE), messages.read_fact(FACT)
READERS = {
    "Describe": calls.describe(),
    "AppendFact": calls.append_fact(*APPENDING),
    "AppendFacts": next(calls.append_facts([APPENDING] * 2)),
    "GetFact": calls.get_fact("Plant A", "m-1"),
    "FetchFacts": calls.fetch_facts("r", PAIR, 10, None),
    "CursorOf": calls.cursor_of("r", PAIR),
    "RetireReader": calls.retire_reader("r", PAIR, ""),
    "Survey": calls.survey(),
    "Received": calls.received("b", "k", messages.read_stored(wire.Stored(digest=CONFIRMATION.digest, size=1))),
}


def check_answer(name, data):
    try:
        if name == "PutObject":
            stored(data)
        elif name == "GetObject":
            Download("b", "k", 0).take(data)
        elif name == "Fault":
            assert isinstance(faults.raised(Failed(data), "AppendFact"), ErgonError), "a failure that is no error"
        else:
            READERS[name].result(data)
    except ErgonError:
        pass


class Failed:
    def __init__(self, data):
        self._data = data

    def code(self):
        return faults.grpc.StatusCode.UNAVAILABLE

    def details(self):
        return "gone"

    def trailing_metadata(self):
        return ((faults.KEY, self._data),)


CHECKS = {"facts-requests": (check_request, list(REQUESTS)), "facts-answers": (check_answer, list(ANSWERS))}


def main():
    direction = sys.argv[1]
    check, names = CHECKS[direction]
    logging.disable(logging.CRITICAL)

    def one(data):
        if data:
            check(names[data[0] % len(names)], data[1:])

    def mutate(data, max_size, seed):
        found = mutated(data, direction, random_of(seed)) if seed % 3 else None
        return atheris.Mutate(data, max_size) if found is None or len(found) > max_size else found

    # Where it merges it starts itself again, through a shell.
    itself = f"{shlex.quote(sys.executable)} -m tests.fuzz.facts_target {direction}"
    atheris.Setup([itself, *sys.argv[2:]], one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
