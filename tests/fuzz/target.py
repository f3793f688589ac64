"""One direction under the fuzzer: target.py DIRECTION [libFuzzer's own words]; started by executors.py."""

from __future__ import annotations

import json
import logging
import random
import shlex
import sys

import atheris

import ergon_framework.task.mixins.policies  # all but the executor's own files, so that edges are theirs

with atheris.instrument_imports(include=["ergon_framework.executor"]):
    from ergon_framework.executor import lines, protocol, registry, runtime, verdict

from tests.fuzz.grammar import mutated

handlers = registry.Registry()
POLICY = ergon_framework.task.mixins.policies.RetryPolicy(max_attempts=3)


@handlers.handler
def echo(*args, **kwargs):
    return [args, kwargs]


@handlers.handler
def typed(a: int, b: list[str]) -> int:
    return a


@handlers.handler
def fails(*args, **kwargs):
    raise ValueError(args)


@handlers.handler
def retries(*args, **kwargs):
    return registry.Retry(after=1)


@handlers.handler
async def late(*args, **kwargs):
    return {len(args): kwargs}


executor = runtime.Runtime(handlers)


def whose(line):
    """Whose *line* is, found in another way than the code under test does; False where this way cannot tell."""
    pairs = []

    def gathered(found):
        pairs.append(found)
        return found

    try:
        value = json.loads(line.decode(errors="surrogateescape"), object_pairs_hook=gathered, parse_int=len)
    except RecursionError:
        return False
    except ValueError:
        return None
    if not pairs or value is not pairs[-1]:
        return None
    named = [item for key, item in pairs[-1] if key == "job_id"]
    if len(named) != 1 or not isinstance(named[0], str) or not 1 <= len(named[0]) <= protocol.LONGEST_NAME:
        return None
    return None if any("\ud800" <= character <= "\udfff" for character in named[0]) else named[0]


def check_request(line):
    reply = executor.reply(line)
    expected = whose(line)
    if reply is None:
        assert expected in {None, False}, "a request that names its job was not answered"
        return
    assert reply.endswith(b"\n"), "an answer without its end"
    assert reply.count(b"\n") == 1, "an answer of several lines"
    got = protocol.read_outcome(reply)
    assert isinstance(got, protocol.ExecutionOutcome), "an answer that is none"
    assert expected is False or got.job_id == expected, "an answer for another job"
    request = protocol.read_request(line)
    if isinstance(request, protocol.ExecutionRequest):
        assert protocol.read_request(protocol.write_request(request)) == request, "a request that changes on its way"


def check_outcome(line):
    got = protocol.read_outcome(line)
    expected = whose(line)
    in_pieces = protocol.read_outcome(line, yielding=True)
    assert type(in_pieces) is type(got), "an outcome for one reader, and none for the other"
    if isinstance(got, protocol.ExecutionOutcome):
        assert in_pieces == got, "an outcome that differs with its reader"
    elif expected is not False:
        assert in_pieces.job_id == got.job_id, "a bad line that is of two jobs"
    if isinstance(got, protocol.BadLine):
        assert got.size == len(line)
        assert expected is False or got.job_id in {None, expected}, "a bad line for another job"
        assert len(got.message) < 1000
        if got.job_id is None:
            return
        got = verdict.unreadable(got.job_id, got)
    else:
        assert got.job_id == expected, "an outcome for another job"
        assert protocol.read_outcome(protocol.write_outcome(got)) == got, "an outcome that changes on its way"
    judged = verdict.judge(got, attempt_number=1, policy=POLICY)
    if isinstance(judged, verdict.Again):
        assert 0 <= judged.delay <= verdict.LONGEST_DELAY, "a delay without bound"


CHECKS = {"requests": check_request, "outcomes": check_outcome}


def main():
    check = CHECKS[sys.argv[1]]
    logging.disable(logging.CRITICAL)

    def one(data):
        splitter, seen = lines.Splitter(longest=1 << 16), []
        middle = len(data) // 2
        for part in (data[:middle], data[middle:]):
            seen += splitter.feed(part)
        assert seen == data.split(b"\n")[:-1], "lines that are not what came"
        for line in seen[:20]:
            check(line)

    def mutate(data, max_size, seed):
        found = mutated(data, dice=random.Random(seed)) if seed % 3 else None
        return atheris.Mutate(data, max_size) if found is None or len(found) > max_size else found

    # Where it merges it starts itself again, through a shell.
    itself = f"{shlex.quote(sys.executable)} -m tests.fuzz.target {sys.argv[1]}"
    atheris.Setup([itself, *sys.argv[2:]], one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
