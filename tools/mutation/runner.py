"""Runner: collects the tests once, and asks them about each mutant in a process forked for it.

A mutant in a function's body gives the live function other code, which takes no time at all. What
runs when a module is imported needs the modules and the tests anew; that is done only for those.
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

#: What a run needs of the project's own options, and nothing that makes it slow or random.
OPTIONS = ["-o", "addopts=", "--import-mode=importlib", "--strict-markers", "--assert=plain", "-s"]
OPTIONS += [f"-pno:{name}" for name in ("terminal", "cacheprovider", "randomly", "xdist", "looptime_plugin")]
OPTIONS += ["--hypothesis-profile=mutants"]
#: How often a test may hang on one mutant before it counts as noticed by a time limit only.
HANGS = 3
COLD, FAILED, PASSED = 3, 1, 0
#: The share of the patience that is spent on a mutant which is listed as equivalent.
KNOWN = 0.2
#: With fewer tests of its own than this, those who only run a module are asked about what it does on import.
FEW = 30
#: Bytes of address space after which a mutant that grows for ever is ended.
SPACE = 8 << 30

# A failure is all that is asked for: no smaller example, no memory of it.
settings.register_profile(
    "mutants", deadline=None, database=None, derandomize=True, max_examples=50, phases=(Phase.explicit, Phase.generate)
)


@dataclass
class Baseline:
    """The tests without any mutant: how long each takes, which fail, who runs which line."""

    seconds: dict[str, float] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)
    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    #: The lines that are run while modules are imported.
    imported: dict[str, set[int]] = field(default_factory=dict)


@dataclass
class Verdict:
    """What became of one mutant: killed, timeout or survived; and by which test, or why not."""

    mutant: Mutant
    word: str
    by: str
    seconds: float = 0.0


class Watch:
    """Tells through a pipe which test runs, and ends the process at the first failure."""

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


class Measure:
    """Notes for each test how long it takes, whether it fails and, if asked, which lines it runs."""

    def __init__(self, traced: list[str]) -> None:
        self.baseline = Baseline()
        self._coverage = _tracer(traced) if traced else None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._coverage is not None:
            self._coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = self.baseline.seconds.get(report.nodeid, 0.0)
        self.baseline.seconds[report.nodeid] = known + report.duration
        if not report.passed:
            self.baseline.failing.add(report.nodeid)

    def run(self, items: list[pytest.Item]) -> Baseline:
        if self._coverage is not None:
            self._coverage.start()
        _perform(items)
        if self._coverage is not None:
            self._coverage.stop()
            data = self._coverage.get_data()
            for path in data.measured_files():
                by_line = data.contexts_by_lineno(path)
                self.baseline.lines[path] = {line: set(names) - {""} for line, names in by_line.items()}
        return self.baseline


def _tracer(paths: list[str]) -> coverage.Coverage:
    os.environ["COVERAGE_CORE"] = "ctrace"  # the other ways of tracing know nothing of contexts
    return coverage.Coverage(data_file=None, config_file=False, include=paths, concurrency="thread")


def _perform(items: list[pytest.Item]) -> None:
    for item, after in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)


@dataclass
class Job:
    """One mutant that is being asked about."""

    mutant: Mutant
    order: list[str]
    done: Callable[[Verdict], None]
    cold: bool = False
    began: float = 0.0
    pid: int = 0
    pipe: int = -1
    heard: bytes = b""
    running: str = ""
    doubted: str | None = None
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
        self._importing = _tracer(self._paths)
        self._work: Callable[[Runner], None] = lambda _: None
        self._kills: dict[object, Counter[str]] = defaultdict(Counter)
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
        self.baseline = Baseline()
        self.manager: Any = None

    def run(self, work: Callable[[Runner], None]) -> int:
        """Collect, measure, then let *work* do what it wants with this runner."""
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
                self._functions[_key(one.__code__)].append(one)
        gc.freeze()
        self.baseline = self._measured()
        self.baseline.imported = imported
        self._work(self)
        return True

    def _measured(self) -> Baseline:
        """As many runs at once as there will be: one says who runs which line, the others how long it takes.

        What fails in any of them would fail for no reason later, so nothing is asked of it.
        """
        answers = [self._measuring(self._paths), *(self._measuring([]) for _ in range(max(1, self._workers - 1)))]
        traced, *timed = (pickle.loads(answer()) for answer in answers)  # noqa: S301 - written by our own child
        failing = traced.failing.union(*(one.failing for one in timed))
        return Baseline(timed[0].seconds, failing, traced.lines)

    def _measuring(self, traced: list[str]) -> Callable[[], bytes]:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is read
        pid = os.fork()
        if pid == 0:
            with _last_words(complains=True):
                measure = Measure(traced)
                self.manager.register(measure)
                pickle.dump(measure.run(list(self._items.values())), file)
                file.flush()
                os._exit(PASSED)

        def answer() -> bytes:
            os.waitpid(pid, 0)
            with file:
                file.seek(0)
                return file.read() or sys.exit("the tests without a mutant ended their own process")

        return answer

    # -- which tests ------------------------------------------------------------------------------

    def _order(self, mutant: Mutant, names: Iterable[str]) -> list[str]:
        """Who killed most neighbours in the least time, then the fastest; as many as the patience allows."""
        kills, near, seconds = self._kills[mutant.path], self._kills[mutant.function], self.baseline.seconds
        usable = [name for name in set(names) if name in seconds and name not in self.baseline.failing]
        patience = self._patience * (KNOWN if mutant.known else 1)
        chosen, spent = [], 0.0

        def rank(name: str) -> tuple[float, ...]:
            return -near[name], -kills[name] / (seconds[name] + 0.05), seconds[name]

        for name in sorted(usable, key=rank):
            spent += seconds[name]
            if spent > patience and chosen:
                break
            chosen.append(name)
        return chosen

    def _asked(self, mutant: Mutant) -> set[str]:
        lines = self.baseline.lines.get(str(mutant.path), {})
        return {name for line in mutant.lines for name in lines.get(line, ())}

    def _near(self, mutant: Mutant) -> list[str]:
        """The tests for a mutant of what is imported: those whose files name its module, and who run its file."""
        module = _module(mutant.path)
        own = {name for name, item in self._items.items() if _names(item, module)}
        lines = self.baseline.lines.get(str(mutant.path), {})
        others = {name for names in lines.values() for name in names} - own
        chosen = self._order(mutant, own)
        if len(chosen) < FEW:
            chosen += self._order(mutant, others)
        return chosen or self._order(mutant, self._items)

    # -- asking -----------------------------------------------------------------------------------

    def ask(self, mutants: Iterable[Mutant], done: Callable[[Verdict], None]) -> None:
        """Tell *done* what became of each mutant."""
        waiting = iter(mutants)
        jobs: dict[int, Job] = {}
        more = True
        while more or jobs:
            while more and len(jobs) < self._workers:
                mutant = next(waiting, None)
                more = mutant is not None
                if mutant is not None:
                    self._begin(mutant, jobs, done)
            self._listen(jobs)

    def _begin(self, mutant: Mutant, jobs: dict[int, Job], done: Callable[[Verdict], None]) -> None:
        order = self._order(mutant, self._asked(mutant)) if mutant.inside else []
        imported = bool(self.baseline.imported.get(str(mutant.path), set()) & set(mutant.lines))
        if order or imported or not mutant.inside:
            job = Job(mutant, order or self._near(mutant), done, cold=not order, began=time.monotonic())
            self._fork(job, jobs)
        else:
            done(Verdict(mutant, "survived", "no test runs this line"))

    def _fork(self, job: Job, jobs: dict[int, Job]) -> None:
        job.pipe, theirs = os.pipe()
        job.heard, job.running, job.limit = b"", "", time.monotonic() + 60
        job.pid = os.fork()
        if job.pid == 0:
            with _last_words():
                os.close(job.pipe)
                os.setsid()
                resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))
                (self._ask_anew if job.cold else self._ask_here)(job, Watch(theirs, job.order))
        os.close(theirs)
        jobs[job.pipe] = job

    def _ask_here(self, job: Job, watch: Watch) -> None:
        if not self._put_in(job.mutant):
            os._exit(COLD)
        self.manager.register(watch)
        _perform([self._items[name] for name in job.order])
        os._exit(PASSED)

    def _put_in(self, mutant: Mutant) -> bool:
        """Give the live functions the mutant's code; False where their closures do not fit."""
        put = False
        for code in _codes(mutant.code()):
            if mutant.function == code.co_qualname or mutant.function.startswith(f"{code.co_qualname}.<locals>"):
                for function in self._functions.get(_key(code), ()):
                    if function.__code__.co_freevars != code.co_freevars:
                        return False
                    function.__code__ = code
                    put = True
        return put

    def _ask_anew(self, job: Job, watch: Watch) -> None:
        sys.meta_path.insert(0, Finder(_module(job.mutant.path), job.mutant.code()))
        for name in list(sys.modules):
            if name.partition(".")[0] in {"ergon_framework", "tests", "conftest"}:
                del sys.modules[name]
        files = list(dict.fromkeys(name.partition("::")[0] for name in job.order))
        code = pytest.main([*OPTIONS, *files], [watch])
        os._exit(PASSED if code == pytest.ExitCode.OK else FAILED)

    def _listen(self, jobs: dict[int, Job]) -> None:
        if not jobs:
            return
        wait = max(0.0, min(job.limit for job in jobs.values()) - time.monotonic())
        ready, _, _ = select.select(list(jobs), [], [], wait)
        for pipe in ready:
            self._hear(jobs[pipe], jobs)
        for job in list(jobs.values()):
            if time.monotonic() >= job.limit and job.pipe in jobs:
                self._left(job, jobs)
                job.hung.append(job.running)
                self._go_on(job, jobs)

    def _hear(self, job: Job, jobs: dict[int, Job]) -> None:
        piece = os.read(job.pipe, 65536)
        if piece:
            job.heard += piece
            job.running = job.heard.split(b"\0")[-2].decode() if b"\0" in job.heard else ""
            job.limit = time.monotonic() + max(3.0, 8 * self.baseline.seconds.get(job.running, 0.0))
            return
        status = self._left(job, jobs)
        if status == COLD and not job.cold:
            job.cold, job.order = True, self._near(job.mutant)
            self._fork(job, jobs)
        elif status == PASSED:
            self._passed(job, jobs)
        else:
            self._failed(job, jobs)

    def _failed(self, job: Job, jobs: dict[int, Job]) -> None:
        """A failure counts when the same test fails again: on a busy machine one may be nobody's fault."""
        if job.cold or job.running == job.doubted:
            self._kills[job.mutant.path][job.running] += 1
            self._kills[job.mutant.function][job.running] += 1
            self._tell(job, "killed", job.running or "it cannot be imported")
        else:
            job.doubted = job.running
            job.order = [job.running, *self._unasked(job)]
            self._fork(job, jobs)

    def _left(self, job: Job, jobs: dict[int, Job]) -> int:
        """End whatever is left of a job's processes; the code with which it ended by itself."""
        del jobs[job.pipe]
        os.close(job.pipe)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(job.pid, signal.SIGKILL) if job.limit <= time.monotonic() else None
        return os.waitstatus_to_exitcode(os.waitpid(job.pid, 0)[1])

    def _go_on(self, job: Job, jobs: dict[int, Job]) -> None:
        """After a hang: ask those who have not been asked, unless too many hang."""
        # Where one waits in vain its neighbours will too; a world of its own time cannot wait for long.
        job.order = sorted(self._unasked(job), key=lambda name: not name.startswith(self._timeless))
        if job.order and len(job.hung) < HANGS:
            self._fork(job, jobs)
        else:
            self._tell(job, "timeout", job.hung[0])

    def _unasked(self, job: Job) -> list[str]:
        asked = {name.decode() for name in job.heard.split(b"\0")}
        return [name for name in job.order if name not in asked]

    def _passed(self, job: Job, jobs: dict[int, Job]) -> None:
        imported = self.baseline.imported.get(str(job.mutant.path), set())
        if job.hung:
            self._tell(job, "timeout", job.hung[0])
        elif not job.cold and imported & set(job.mutant.lines):
            job.cold, job.order = True, self._near(job.mutant)
            self._fork(job, jobs)
        else:
            self._tell(job, "survived", f"{len(job.order)} tests passed")

    def _tell(self, job: Job, word: str, by: str) -> None:
        job.done(Verdict(job.mutant, word, by, time.monotonic() - job.began))


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
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
def _last_words(*, complains: bool = False) -> Any:
    """A forked child never returns into the code of its parent, and a mutant's way to fall over is nobody's news."""
    nowhere, complaints = os.open(os.devnull, os.O_RDWR), os.dup(2)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    try:
        yield
    except BaseException:  # noqa: BLE001 - whatever it is, it must not reach the parent's code
        os.write(complaints if complains else nowhere, traceback.format_exc().encode())
    finally:
        os._exit(FAILED)


def _key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> Iterable[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[len(parts) - parts[::-1].index("ergon_framework") - 1 :])


def _names(item: pytest.Item, module: str) -> bool:
    names = vars(item.module).values() if isinstance(item, pytest.Function) else ()
    return any(getattr(one, "__module__", None) == module or getattr(one, "__name__", None) == module for one in names)
