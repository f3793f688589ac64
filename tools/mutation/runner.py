"""Runner: collects the tests once, and runs them against each mutant in a process forked for it.

A mutant in a function's body replaces the code of the live function, which takes no time. Code that runs when a module
is imported requires a fresh import of the modules and the tests; only such mutants get one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import os
import pickle
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import coverage
import pytest
from hypothesis import Phase, settings

from tools.mutation.operators import Mutant

#: The options of the project that a run needs, and nothing that makes it slow or random.
OPTIONS = ["-o", "addopts=", "--import-mode=importlib", "--strict-markers", "--assert=plain", "-s"]
OPTIONS += [f"-pno:{name}" for name in ("terminal", "cacheprovider", "randomly", "xdist", "looptime_plugin")]
OPTIONS += ["--hypothesis-profile=mutants"]
#: How often a test may hang on one mutant before it counts as noticed by a time limit only.
MAX_HANGS = 3
COLD, FAILED, PASSED = 3, 1, 0
#: The share of the patience that is spent on a mutant which is listed as equivalent.
EQUIVALENT_SHARE = 0.2
#: With fewer own tests than this, tests that only run a module also check its import.
MIN_OWN_TESTS = 30
#: Bytes of address space after which a mutant that grows without limit is ended.
MAX_ADDRESS_BYTES = 8 << 30

# Only the failure matters: no smaller example, no stored examples.
settings.register_profile(
    "mutants", deadline=None, database=None, derandomize=True, max_examples=50, phases=(Phase.explicit, Phase.generate)
)


@dataclass
class Baseline:
    """The tests without any mutant: how long each takes, which fail, which lines each runs."""

    seconds: dict[str, float] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)
    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    #: The lines that are run while modules are imported.
    imported: dict[str, set[int]] = field(default_factory=dict)


@dataclass
class Verdict:
    """The result of one mutant: killed, timeout or survived; and by which test, or why not."""

    mutant: Mutant
    word: str
    by: str
    seconds: float = 0.0


class FailFastReporter:
    """Reports the running test through a pipe, and ends the process at the first failure."""

    def __init__(self, pipe: int, order: Iterable[str] = ()) -> None:
        self._pipe = pipe
        self._order = {name: rank for rank, name in enumerate(order)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self._order), key=self._rank)

    def _rank(self, item: pytest.Item) -> int:
        return self._order[item.nodeid]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.write(self._pipe, f"{nodeid}\0".encode())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os._exit(FAILED)


class BaselineRecorder:
    """Records for each test its duration, whether it fails and, optionally, the lines it runs."""

    def __init__(self, traced: list[str]) -> None:
        self.baseline = Baseline()
        self._coverage = _create_tracer(traced) if traced else None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._coverage is not None:
            self._coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self.baseline.seconds.get(report.nodeid, 0.0)
        self.baseline.seconds[report.nodeid] = seconds + report.duration
        if not report.passed:
            self.baseline.failing.add(report.nodeid)

    def run(self, items: list[pytest.Item]) -> Baseline:
        if self._coverage is not None:
            self._coverage.start()
        _run_items(items)
        if self._coverage is not None:
            self._coverage.stop()
            data = self._coverage.get_data()
            for path in data.measured_files():
                by_line = data.contexts_by_lineno(path)
                self.baseline.lines[path] = {line: set(names) - {""} for line, names in by_line.items()}
        return self.baseline


def _create_tracer(paths: list[str]) -> coverage.Coverage:
    os.environ["COVERAGE_CORE"] = "ctrace"  # the other ways of tracing do not support contexts
    return coverage.Coverage(data_file=None, config_file=False, include=paths, concurrency="thread")


def _run_items(items: list[pytest.Item]) -> None:
    for item, after in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)


@dataclass
class MutantJob:
    """One mutant that is being tested."""

    mutant: Mutant
    order: list[str]
    done: Callable[[Verdict], None]
    cold: bool = False
    began: float = 0.0
    pid: int = 0
    pipe: int = -1
    output: bytes = b""
    running: str = ""
    suspect: str | None = None
    limit: float = 0.0
    hung: list[str] = field(default_factory=list)


class Runner:
    """Everything after the collection: the baseline, and the mutants, *workers* at a time."""

    def __init__(
        self, *, paths: list[Path], tests: list[str], workers: int, patience: float, timeless: str = ""
    ) -> None:
        self._timeless = timeless
        self._paths = [str(path) for path in paths]
        self._tests = tests
        self._workers = workers
        self._patience = patience
        self._items: dict[str, pytest.Item] = {}
        self._importing = _create_tracer(self._paths)
        self._work: Callable[[Runner], None] = lambda _: None
        self._kills: dict[object, Counter[str]] = defaultdict(Counter)
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
        self.baseline = Baseline()
        self.manager: Any = None

    def run(self, work: Callable[[Runner], None]) -> int:
        """Collect, measure, then call *work* with this runner."""
        self._work = work
        self._importing.start()
        return pytest.main([*OPTIONS, *self._tests], [self])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            print(report.longreprtext, file=sys.stderr)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._importing.stop()
        data = self._importing.get_data()
        imported = {path: set(data.lines(path) or ()) for path in data.measured_files()}
        if session.testsfailed:
            raise session.Interrupted("some tests cannot be collected")
        self._items = {item.nodeid: item for item in session.items}
        self.manager = session.config.pluginmanager
        gc.collect()
        for one in gc.get_objects():
            if isinstance(one, FunctionType) and one.__code__.co_filename in self._paths:
                self._functions[_to_code_key(one.__code__)].append(one)
        gc.freeze()
        self.baseline = self._measure_baseline()
        self.baseline.imported = imported
        self._work(self)
        return True

    def _measure_baseline(self) -> Baseline:
        """Measure in as many parallel runs as later: one records which test runs which line, the others durations.

        A test that fails in any of them is not used, because it would fail later without a reason.
        """
        readers = [
            self._start_measurement(self._paths),
            *(self._start_measurement([]) for _ in range(max(1, self._workers - 1))),
        ]
        traced, *timed = (pickle.loads(read_result()) for read_result in readers)  # noqa: S301 - written by our own child
        failing = traced.failing.union(*(one.failing for one in timed))
        return Baseline(timed[0].seconds, failing, traced.lines)

    def _start_measurement(self, traced: list[str]) -> Callable[[], bytes]:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is read
        pid = os.fork()
        if pid == 0:
            with _contain_child(print_errors=True):
                measure = BaselineRecorder(traced)
                self.manager.register(measure)
                pickle.dump(measure.run(list(self._items.values())), file)
                file.flush()
                os._exit(PASSED)

        def read_result() -> bytes:
            os.waitpid(pid, 0)
            with file:
                file.seek(0)
                return file.read() or sys.exit("the tests without a mutant ended their own process")

        return read_result

    # -- choice of tests --------------------------------------------------------------------------

    def _choose_tests(self, mutant: Mutant, names: Iterable[str]) -> list[str]:
        """Order by most kills of nearby mutants per time, then by speed; return as many as the patience allows."""
        kills, nearby_kills, seconds = self._kills[mutant.path], self._kills[mutant.function], self.baseline.seconds
        usable = [name for name in set(names) if name in seconds and name not in self.baseline.failing]
        patience = self._patience * (EQUIVALENT_SHARE if mutant.is_equivalent else 1)
        chosen, spent = [], 0.0

        def rank(name: str) -> tuple[float, ...]:
            return -nearby_kills[name], -kills[name] / (seconds[name] + 0.05), seconds[name]

        for name in sorted(usable, key=rank):
            spent += seconds[name]
            if spent > patience and chosen:
                break
            chosen.append(name)
        return chosen

    def _find_tests(self, mutant: Mutant) -> set[str]:
        lines = self.baseline.lines.get(str(mutant.path), {})
        return {name for line in mutant.lines for name in lines.get(line, ())}

    def _find_import_tests(self, mutant: Mutant) -> list[str]:
        """Return tests for a mutant of imported code: those that name its module, then those that run its file."""
        module = _module_name(mutant.path)
        own = {name for name, item in self._items.items() if _mentions_module(item, module)}
        lines = self.baseline.lines.get(str(mutant.path), {})
        others = {name for names in lines.values() for name in names} - own
        chosen = self._choose_tests(mutant, own)
        if len(chosen) < MIN_OWN_TESTS:
            chosen += self._choose_tests(mutant, others)
        return chosen or self._choose_tests(mutant, self._items)

    # -- running ----------------------------------------------------------------------------------

    def ask(self, mutants: Iterable[Mutant], done: Callable[[Verdict], None]) -> None:
        """Call *done* with the result of each mutant."""
        remaining = iter(mutants)
        jobs: dict[int, MutantJob] = {}
        has_more = True
        while has_more or jobs:
            while has_more and len(jobs) < self._workers:
                mutant = next(remaining, None)
                has_more = mutant is not None
                if mutant is not None:
                    self._start_job(mutant, jobs, done)
            self._poll_jobs(jobs)

    def _start_job(self, mutant: Mutant, jobs: dict[int, MutantJob], done: Callable[[Verdict], None]) -> None:
        order = self._choose_tests(mutant, self._find_tests(mutant)) if mutant.inside else []
        imported = bool(self.baseline.imported.get(str(mutant.path), set()) & set(mutant.lines))
        if order or imported or not mutant.inside:
            job = MutantJob(
                mutant, order or self._find_import_tests(mutant), done, cold=not order, began=time.monotonic()
            )
            self._fork(job, jobs)
        else:
            done(Verdict(mutant, "survived", "no test runs this line"))

    def _fork(self, job: MutantJob, jobs: dict[int, MutantJob]) -> None:
        job.pipe, write_end = os.pipe()
        job.output, job.running, job.limit = b"", "", time.monotonic() + 60
        job.pid = os.fork()
        if job.pid == 0:
            with _contain_child():
                os.close(job.pipe)
                os.setsid()
                resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
                (self._run_cold if job.cold else self._run_warm)(job, FailFastReporter(write_end, job.order))
        os.close(write_end)
        jobs[job.pipe] = job

    def _run_warm(self, job: MutantJob, watch: FailFastReporter) -> None:
        if not self._install_mutant(job.mutant):
            os._exit(COLD)
        self.manager.register(watch)
        _run_items([self._items[name] for name in job.order])
        os._exit(PASSED)

    def _install_mutant(self, mutant: Mutant) -> bool:
        """Give the live functions the mutant's code; return False where their closures do not fit."""
        installed = False
        for code in _iter_codes(mutant.code()):
            if mutant.function == code.co_qualname or mutant.function.startswith(f"{code.co_qualname}.<locals>"):
                for function in self._functions.get(_to_code_key(code), ()):
                    if function.__code__.co_freevars != code.co_freevars:
                        return False
                    function.__code__ = code
                    installed = True
        return installed

    def _run_cold(self, job: MutantJob, watch: FailFastReporter) -> None:
        sys.meta_path.insert(0, MutantFinder(_module_name(job.mutant.path), job.mutant.code()))
        for name in list(sys.modules):
            if name.partition(".")[0] in {"ergon_framework", "tests", "conftest"}:
                del sys.modules[name]
        files = list(dict.fromkeys(name.partition("::")[0] for name in job.order))
        code = pytest.main([*OPTIONS, *files], [watch])
        os._exit(PASSED if code == pytest.ExitCode.OK else FAILED)

    def _poll_jobs(self, jobs: dict[int, MutantJob]) -> None:
        if not jobs:
            return
        wait = max(0.0, min(job.limit for job in jobs.values()) - time.monotonic())
        ready, _, _ = select.select(list(jobs), [], [], wait)
        for pipe in ready:
            self._read_output(jobs[pipe], jobs)
        for job in list(jobs.values()):
            if time.monotonic() >= job.limit and job.pipe in jobs:
                self._reap(job, jobs)
                job.hung.append(job.running)
                self._continue_after_hang(job, jobs)

    def _read_output(self, job: MutantJob, jobs: dict[int, MutantJob]) -> None:
        data = os.read(job.pipe, 65536)
        if data:
            job.output += data
            job.running = job.output.split(b"\0")[-2].decode() if b"\0" in job.output else ""
            job.limit = time.monotonic() + max(3.0, 8 * self.baseline.seconds.get(job.running, 0.0))
            return
        status = self._reap(job, jobs)
        if status == COLD and not job.cold:
            job.cold, job.order = True, self._find_import_tests(job.mutant)
            self._fork(job, jobs)
        elif status == PASSED:
            self._handle_pass(job, jobs)
        else:
            self._handle_failure(job, jobs)

    def _handle_failure(self, job: MutantJob, jobs: dict[int, MutantJob]) -> None:
        """Count a failure when the same test fails again: on a busy machine a single one may have another cause."""
        if job.cold or job.running == job.suspect:
            self._kills[job.mutant.path][job.running] += 1
            self._kills[job.mutant.function][job.running] += 1
            self._report(job, "killed", job.running or "it cannot be imported")
        else:
            job.suspect = job.running
            job.order = [job.running, *self._list_remaining(job)]
            self._fork(job, jobs)

    def _reap(self, job: MutantJob, jobs: dict[int, MutantJob]) -> int:
        """End the remaining processes of a job; return the code with which it exited."""
        del jobs[job.pipe]
        os.close(job.pipe)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(job.pid, signal.SIGKILL) if job.limit <= time.monotonic() else None
        return os.waitstatus_to_exitcode(os.waitpid(job.pid, 0)[1])

    def _continue_after_hang(self, job: MutantJob, jobs: dict[int, MutantJob]) -> None:
        """After a hang: run the tests that have not run yet, unless too many hang."""
        # Where one test hangs its neighbours hang too; tests with virtual time cannot wait for long.
        job.order = sorted(self._list_remaining(job), key=lambda name: not name.startswith(self._timeless))
        if job.order and len(job.hung) < MAX_HANGS:
            self._fork(job, jobs)
        else:
            self._report(job, "timeout", job.hung[0])

    def _list_remaining(self, job: MutantJob) -> list[str]:
        started = {name.decode() for name in job.output.split(b"\0")}
        return [name for name in job.order if name not in started]

    def _handle_pass(self, job: MutantJob, jobs: dict[int, MutantJob]) -> None:
        imported = self.baseline.imported.get(str(job.mutant.path), set())
        if job.hung:
            self._report(job, "timeout", job.hung[0])
        elif not job.cold and imported & set(job.mutant.lines):
            job.cold, job.order = True, self._find_import_tests(job.mutant)
            self._fork(job, jobs)
        else:
            self._report(job, "survived", f"{len(job.order)} tests passed")

    def _report(self, job: MutantJob, word: str, by: str) -> None:
        job.done(Verdict(job.mutant, word, by, time.monotonic() - job.began))


class MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from the code of a mutant."""

    def __init__(self, name: str, code: CodeType) -> None:
        self._name = name
        self._code = code

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=self._code.co_filename)

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)  # noqa: S102 - the project's own source


@contextlib.contextmanager
def _contain_child(*, print_errors: bool = False) -> Any:
    """Keep a forked child from returning into the code of its parent, and hide how a mutant fails."""
    null, stderr = os.open(os.devnull, os.O_RDWR), os.dup(2)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    try:
        yield
    except BaseException:  # noqa: BLE001 - whatever it is, it must not reach the parent's code
        os.write(stderr if print_errors else null, traceback.format_exc().encode())
    finally:
        os._exit(FAILED)


def _to_code_key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _iter_codes(code: CodeType) -> Iterable[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _iter_codes(constant)


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[len(parts) - parts[::-1].index("ergon_framework") - 1 :])


def _mentions_module(item: pytest.Item, module: str) -> bool:
    values = vars(item.module).values() if isinstance(item, pytest.Function) else ()
    return any(
        getattr(value, "__module__", None) == module or getattr(value, "__name__", None) == module for value in values
    )
