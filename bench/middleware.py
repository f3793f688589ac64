"""What a task without middleware costs, beside the commit before middleware existed, measured in one run.

    python bench/middleware.py                the engine of this tree beside that commit; exit 1 above 1.02
    python bench/middleware.py --base COMMIT  beside another commit

Each side is a process of its own, and the two take turns. Two figures decide. The number of function calls for each
transaction does not depend on the machine. The processor time is compared by the best round of each side, because other
load only adds to it. The cost with middleware is printed without a bar.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
ADDED_FILE = "src/ergon_framework/task/middleware.py"
ROUNDS = 25
TRANSACTIONS = 4_000
COUNTED_TRANSACTIONS = 1_000
MAX_RATIO = 1.02
VARIANTS = ("asyncio", "threads")


# -- one side --------------------------------------------------------------------------------------


def build_middleware(variant):
    """Return a middleware with both parts, which do nothing."""
    from contextlib import asynccontextmanager  # noqa: PLC0415 - not needed by the other side

    from ergon_framework import AsyncMiddleware, Middleware  # noqa: PLC0415 - the commit before does not have it

    if variant == "threads":

        class Empty(Middleware):
            @contextmanager
            def transaction(self, context):
                yield

            attempt = transaction

        return Empty()

    class AsyncEmpty(AsyncMiddleware):
        @asynccontextmanager
        async def transaction(self, context):
            yield

        attempt = transaction

    return AsyncEmpty()


def consume(variant, count, *, with_middleware=False):
    """Return the seconds of processor time for each of *count* transactions."""
    from ergon_framework import AsyncConsumerMixin, ConsumerMixin, MemoryConnector, Transaction  # noqa: PLC0415

    class Threaded(ConsumerMixin):
        def process_transaction(self, transaction): ...

    class Async(AsyncConsumerMixin):
        async def process_transaction(self, transaction): ...

    task = Threaded() if variant == "threads" else Async()
    task.connector = MemoryConnector("bench")
    task.connector.dispatch([Transaction(id=f"t{number}") for number in range(count)])
    if with_middleware:
        task.middleware = [build_middleware(variant)]
    gc.collect()
    began = time.process_time()
    report = task.consume_transactions()
    if variant == "asyncio":
        report = asyncio.run(report)
    seconds = time.process_time() - began
    if report.finished != count:
        raise RuntimeError(f"{report.finished} of {count} transactions have ended")
    return seconds / count


def count_calls(variant):
    """Return the calls of functions of the package for each transaction."""
    calls = [0]
    package = str(Path(sys.modules["ergon_framework"].__file__).parent)

    def note(frame, event, _argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[0] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        consume(variant, COUNTED_TRANSACTIONS)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls[0] / COUNTED_TRANSACTIONS


def run_side():
    """Answer the requests of the parent, one for each line."""
    import ergon_framework  # noqa: PLC0415

    print(json.dumps({"package": ergon_framework.__file__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["action"] == "count":
            value = count_calls(request["variant"])
        else:
            value = consume(request["variant"], request["count"], with_middleware=request["action"] == "with")
        print(json.dumps({"value": value}), flush=True)


# -- both sides ------------------------------------------------------------------------------------


class Side:
    """A process that measures one tree."""

    def __init__(self, source):
        # An editable install is found after the folders of PYTHONPATH.
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "--side"],
            env={"PYTHONPATH": str(source)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        package = json.loads(self._process.stdout.readline())["package"]
        if not Path(package).is_relative_to(source):
            raise RuntimeError(f"{package} is not in {source}")

    def ask(self, action, variant, count=TRANSACTIONS):
        self._process.stdin.write(json.dumps({"action": action, "variant": variant, "count": count}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())["value"]

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def check_out(commit):
    """Check out *commit* into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "base"
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def measure(old, new, variant, rounds):
    for side in (old, new):
        side.ask("run", variant)
    best = {"old": float("inf"), "new": float("inf"), "with": float("inf")}
    for number in range(rounds):
        turns = [("old", old, "run"), ("new", new, "run")]
        # Alternate the order, because the first one always finds the machine in the same state.
        for name, side, action in [*(turns if number % 2 == 0 else turns[::-1]), ("with", new, "with")]:
            best[name] = min(best[name], side.ask(action, variant))
    calls_old, calls_new = old.ask("count", variant), new.ask("count", variant)
    figures = {
        "calls": [round(calls_old, 2), round(calls_new, 2)],
        "calls_ratio": round(calls_new / calls_old, 4),
        "processor_us": [round(best["old"] * 1e6, 2), round(best["new"] * 1e6, 2)],
        "processor_ratio": round(best["new"] / best["old"], 4),
        "with_middleware_us": round(best["with"] * 1e6, 2),
    }
    figures["ok"] = max(figures["calls_ratio"], figures["processor_ratio"]) <= MAX_RATIO
    print(f"{variant}: {figures}", file=sys.stderr, flush=True)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", help="the commit to compare with; by default the one before middleware was added")
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side()
        return 0
    added = git("log", "--diff-filter=A", "--format=%H", "-1", "--", ADDED_FILE)
    base = git("rev-parse", options.base or f"{added}^")
    with check_out(base) as tree:
        old, new = Side(tree / "src"), Side(ROOT / "src")
        try:
            rounds = ROUNDS // 5 if options.quick else ROUNDS
            variants = {variant: measure(old, new, variant, rounds) for variant in VARIANTS}
        finally:
            old.close()
            new.close()
    ok = all(figures["ok"] for figures in variants.values())
    summary = {"python": platform.python_version(), "base": base[:12], "bar": MAX_RATIO, "variants": variants, "ok": ok}
    print(json.dumps(summary))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
