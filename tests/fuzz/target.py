"""One direction under the fuzzer: target.py DIRECTION [options of libFuzzer]; started by executors.py."""

from __future__ import annotations

import json
import logging
import random
import shlex
import sys

import atheris

# Everything but the executor's own files, so that its edges are counted separately.
from ergon_framework.worker.policies import RetryPolicy

with atheris.instrument_imports(include=["ergon_framework.executors"]):
    from ergon_framework.executors import decision as verdict
    from ergon_framework.executors import json_lines, protocol, registry, runtime

from tests.fuzz.grammar import mutate_line

handlers = registry.HandlerRegistry()
POLICY = RetryPolicy(max_attempts=3)


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


def find_job_id(line):
    """Return the job of *line*, determined independently of the code under test; False where this is impossible."""
    pairs = []

    def collect_pairs(items):
        pairs.append(items)
        return items

    try:
        value = json.loads(line.decode(errors="surrogateescape"), object_pairs_hook=collect_pairs, parse_int=len)
    except RecursionError:
        return False
    except ValueError:
        return None
    if not pairs or value is not pairs[-1]:
        return None
    job_ids = [item for key, item in pairs[-1] if key == "job_id"]
    if len(job_ids) != 1 or not isinstance(job_ids[0], str) or not 1 <= len(job_ids[0]) <= protocol.MAX_NAME_CHARS:
        return None
    return None if any("\ud800" <= character <= "\udfff" for character in job_ids[0]) else job_ids[0]


def check_request(line):
    reply = executor.reply(line)
    expected = find_job_id(line)
    if reply is None:
        assert expected in {None, False}, "a request that names its job was not answered"
        return
    assert reply.endswith(b"\n"), "an answer without its end"
    assert reply.count(b"\n") == 1, "an answer of several lines"
    outcome = protocol.read_outcome(reply)
    assert isinstance(outcome, protocol.ExecutionOutcome), "an answer that is none"
    assert expected is False or outcome.job_id == expected, "an answer for another job"
    request = protocol.read_request(line)
    if isinstance(request, protocol.ExecutionRequest):
        assert protocol.read_request(protocol.write_request(request)) == request, "a request that changes on its way"


def check_outcome(line):
    outcome = protocol.read_outcome(line)
    expected = find_job_id(line)
    incremental = protocol.read_outcome(line, yielding=True)
    assert type(incremental) is type(outcome), "an outcome for one reader, and none for the other"
    if isinstance(outcome, protocol.ExecutionOutcome):
        assert incremental == outcome, "an outcome that differs with its reader"
    elif expected is not False:
        assert incremental.job_id == outcome.job_id, "a bad line that is of two jobs"
    if isinstance(outcome, protocol.InvalidMessage):
        assert outcome.size == len(line)
        assert expected is False or outcome.job_id in {None, expected}, "a bad line for another job"
        assert len(outcome.message) < 1000
        if outcome.job_id is None:
            return
        outcome = verdict.invalid_outcome(outcome.job_id, outcome)
    else:
        assert outcome.job_id == expected, "an outcome for another job"
        assert protocol.read_outcome(protocol.write_outcome(outcome)) == outcome, "an outcome that changes on its way"
    decision = verdict.decide(outcome, attempt_number=1, policy=POLICY)
    if isinstance(decision, verdict.Retry):
        assert 0 <= decision.delay <= verdict.MAX_DELAY_SECONDS, "a delay without bound"


CHECKS = {"requests": check_request, "outcomes": check_outcome}


def main():
    check = CHECKS[sys.argv[1]]
    logging.disable(logging.CRITICAL)

    def fuzz_one(data):
        splitter, split_lines = json_lines.LineSplitter(max_bytes=1 << 16), []
        middle = len(data) // 2
        for part in (data[:middle], data[middle:]):
            split_lines += splitter.feed(part)
        assert split_lines == data.split(b"\n")[:-1], "lines that are not what came"
        for line in split_lines[:20]:
            check(line)

    def mutate(data, max_size, seed):
        candidate = mutate_line(data, rng=random.Random(seed)) if seed % 3 else None
        return atheris.Mutate(data, max_size) if candidate is None or len(candidate) > max_size else candidate

    # When libFuzzer merges it restarts itself through a shell.
    restart_command = f"{shlex.quote(sys.executable)} -m tests.fuzz.target {sys.argv[1]}"
    atheris.Setup([restart_command, *sys.argv[2:]], fuzz_one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
