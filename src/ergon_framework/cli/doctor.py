"""``ergon doctor``: check all targets concurrently, each with a timeout, and print the diagnostics.

A target is a server, a queue, a task or this program; a diagnostic is the result of one check of it. The most severe
diagnostics come first, each with its remedy.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from ergon_framework.cli.dlq_view import sanitize
from ergon_framework.cli.doctor_targets import (
    Target,
    missing_extra_diagnostic,
    program_target,
    target_from_name,
    targets_from_settings,
)
from ergon_framework.cli.options import Config, Json, duration_option
from ergon_framework.cli.output import configure_logging
from ergon_framework.diagnostics import Diagnostic, DocPage, Severity, WallClock
from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError, MissingExtraError, error_message
from ergon_framework.redaction import hide_known_password, redact_address
from ergon_framework.runner import queues
from ergon_framework.runner.exit import ExitCode
from ergon_framework.runner.settings import load_settings

#: Maximum length of a text in the output.
_MAX_TEXT_CHARS: Final = 1_000
_COLOURS: Final = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}


def show(reports: Sequence[tuple[str, str, Sequence[Diagnostic]]], counts: Counter[Severity]) -> None:
    """Print the diagnostics of each target, and the number of diagnostics per severity."""
    printer = Printer()
    for name, address, diagnostics in reports:
        printer.print_line(f"{name} ({address})" if address else name, "bold")
        width = max((len(each.check) for each in diagnostics), default=0)
        for each in diagnostics:
            printer.print_line(
                f"  {each.severity.value:<7}  {each.check:<{width}}  {sanitize(each.observed, _MAX_TEXT_CHARS)}",
                _COLOURS[each.severity],
            )
            if each.remedy:
                printer.print_line(f"           {'':<{width}}  fix: {sanitize(each.remedy, _MAX_TEXT_CHARS)}")
    printer.print_line(", ".join(_format_count(counts[severity], severity) for severity in Severity))


def _format_count(count: int, severity: Severity) -> str:
    return f"{count} {severity.value}{'' if severity is Severity.OK or count == 1 else 's'}"


class Printer:
    """Prints coloured lines on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._console = Console() if sys.stdout.isatty() else None

    def print_line(self, line: str, style: str = "") -> None:
        if self._console is None:
            typer.echo(line)
        else:
            # Text, because a server's message may contain characters that rich reads as markup.
            self._console.print(Text(line, style=style), soft_wrap=True)


# -- checks -----------------------------------------------------------------------------------------

#: Share of the timeout for checks that have a timeout of their own: theirs ends first, and its error is more precise.
_INNER_TIMEOUT_SHARE: Final = 0.8
#: Most severe first.
_SEVERITY_ORDER: Final = (Severity.ERROR, Severity.WARNING, Severity.OK)


class DoctorExit(ExitCode):
    """Exit codes of ``ergon doctor`` and their meanings."""

    OK = 0, "no problem found"
    ERRORS = 1, "errors found: work is blocked or lost until they are fixed"
    USAGE = 2, "the command line is invalid"
    WARNINGS = 3, "warnings only, no errors"


@dataclass(frozen=True, slots=True)
class TargetReport:
    """The diagnostics of one target."""

    name: str
    setting: str
    #: Without credentials.
    address: str
    diagnostics: tuple[Diagnostic, ...]


def run_doctor(names: Sequence[str], *, config: Path | None, timeout: float, as_json: bool) -> DoctorExit:
    """Print the diagnostics of the targets in the settings and in *names*."""
    # Records of connectors are not logged, because the diagnostics contain the same errors.
    configure_logging("CRITICAL")
    try:
        reports = run_diagnostics(names, config=config, timeout=timeout)
    except ConfigurationError as error:
        return _report_usage_error(error_message(error), as_json=as_json)
    counts = Counter(diagnostic.severity for report in reports for diagnostic in report.diagnostics)
    code = (
        DoctorExit.ERRORS
        if counts[Severity.ERROR]
        else DoctorExit.WARNINGS
        if counts[Severity.WARNING]
        else DoctorExit.OK
    )
    if as_json:
        typer.echo(json.dumps(_to_dict(reports, counts, code)))
    else:
        show([(report.name, report.address, report.diagnostics) for report in reports], counts)
    return code


def run_diagnostics(
    names: Sequence[str], *, config: Path | None, timeout: float, wall: WallClock = time.time
) -> Sequence[TargetReport]:
    """Return the diagnostics; raise ConfigurationError if one of *names* refers to nothing."""
    try:
        settings = load_settings(config)
    except ConfigurationError as error:
        diagnostic = Diagnostic(
            "settings", Severity.ERROR, error_message(error), f"correct the settings; see {DocPage.CONFIGURE.label}"
        )
        return [TargetReport("this program", "", "", (diagnostic,))]
    queues.set_settings(settings)
    targets = [program_target(settings, config), *targets_from_settings(settings, _INNER_TIMEOUT_SHARE * timeout)]
    for name in names:
        targets += target_from_name(name, settings, _INNER_TIMEOUT_SHARE * timeout)
    return list(_build_reports(_run_checks(targets, timeout, wall)))


def _run_checks(
    targets: Sequence[Target], timeout: float, wall: WallClock
) -> Iterator[tuple[Target, list[Diagnostic]]]:
    """Check all targets concurrently: each has the whole timeout, and one that hangs delays no other."""
    checks = [(target, _start_check(target.diagnose, wall)) for target in targets]
    deadline = time.monotonic() + timeout
    for target, future in checks:
        try:
            yield target, list(future.result(max(0.0, deadline - time.monotonic())))
        except Exception as error:  # noqa: BLE001 - an error of one check becomes a diagnostic and stops no other
            yield target, [_failure_diagnostic(error, target, timeout)]


def _start_check(
    diagnose: Callable[[WallClock], Sequence[Diagnostic]], wall: WallClock
) -> Future[Sequence[Diagnostic]]:
    future: Future[Sequence[Diagnostic]] = Future()

    def run_check() -> None:
        try:
            future.set_result(diagnose(wall))
        except BaseException as error:  # noqa: BLE001 - passed on as data
            future.set_exception(error)

    # A daemon thread: the process does not wait for a check that hangs, not even at exit.
    Thread(target=run_check, name="ergon-doctor", daemon=True).start()
    return future


def _failure_diagnostic(error: Exception, target: Target, timeout: float) -> Diagnostic:
    """Return the diagnostic for a check that failed, with its remedy."""
    observed, fix_hint = error_message(error), f"check {target.setting}"
    if isinstance(error, TimeoutError):
        observed = f"no response within {timeout:g} s"
        return Diagnostic(
            "connection", Severity.ERROR, observed, f"check that the server responds; {fix_hint}", shared=False
        )
    if isinstance(error, MissingExtraError):
        return missing_extra_diagnostic(error)
    # PostgreSQL answers a wrong user, password or database with a message that contains FATAL: it is reachable.
    if isinstance(error, ConnectionLostError) and "FATAL" not in observed:
        remedy = f"check that the server runs and is reachable from here, or {fix_hint}"
        return Diagnostic("connection", Severity.ERROR, observed, remedy, shared=False)
    if not isinstance(error, ErgonError):
        observed = f"{type(error).__name__}: {observed}"
    # The framework's errors end with a remedy if there is a specific one.
    message, separator, remedy = observed.partition("; ")
    return Diagnostic(
        "rejected",
        Severity.ERROR,
        message,
        remedy if separator else f"correct the user, the password, the name or the permissions: see {target.setting}",
        shared=False,
    )


def _build_reports(results: Iterator[tuple[Target, list[Diagnostic]]]) -> Iterator[TargetReport]:
    """Build the reports without credentials; diagnostics about a server appear only with its first target."""
    known_addresses: set[str] = set()
    for target, diagnostics in results:
        selected = [each for each in diagnostics if not (each.shared and target.address in known_addresses)]
        if target.server_only:
            selected = [
                each
                for each in selected
                if each.shared or (each.severity is Severity.ERROR and each.check in _SERVER_CHECKS)
            ]
        if target.address and any(each.shared for each in diagnostics):
            known_addresses.add(target.address)
        # Show the most severe diagnostics first.
        selected.sort(key=lambda each: _SEVERITY_ORDER.index(each.severity))
        # A remedy that is a command is printed after "fix: ", and needs no "run: " before it.
        redacted = tuple(
            replace(
                each,
                observed=hide_known_password(each.observed, target.address),
                remedy=hide_known_password(each.remedy, target.address).removeprefix("run: "),
            )
            for each in selected
        )
        yield TargetReport(target.name, target.setting, redact_address(target.address), redacted)


#: Checks whose errors are shown for a server that has no queue in the settings, next to all diagnostics about it.
_SERVER_CHECKS: Final = frozenset({"connection", "rejected", "library"})


def _report_usage_error(message: str, *, as_json: bool) -> DoctorExit:
    if as_json:
        typer.echo(json.dumps({"error": message, "exit_code": int(DoctorExit.USAGE)}))
    else:
        typer.echo(f"ergon: {message}", err=True)
    return DoctorExit.USAGE


def _to_dict(reports: Sequence[TargetReport], counts: Counter[Severity], code: DoctorExit) -> dict[str, Any]:
    return {
        "exit_code": int(code),
        "counts": {severity.value: counts[severity] for severity in Severity},
        "targets": [
            {
                "name": report.name,
                "setting": report.setting,
                "address": report.address,
                "diagnostics": [
                    {key: value for key, value in asdict(each).items() if key != "shared"}
                    for each in report.diagnostics
                ],
            }
            for report in reports
        ],
    }


# -- command ----------------------------------------------------------------------------------------

doctor = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@doctor.command("doctor")
def doctor_(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODULE:NAME",
            help="Task (with its queue, policy and executors), connector or fact boundary to check too.",
        ),
    ] = None,
    *,
    config: Config = None,
    timeout: Annotated[float, duration_option("Timeout of each check.", minimum=0.1, maximum=600)] = "15s",  # type: ignore[assignment]  # typer parses the default too
    json: Json = False,
) -> None:
    """Check configuration, connections and brokers, and suggest fixes.

    The checks cover the database, the queues, and the RabbitMQ, NATS and Redis servers that are configured in
    ergon.toml or the environment: connections, versions, settings, topology, clocks and permissions. Nothing permanent
    is created, moved or changed (a temporary queue on RabbitMQ tests permissions), and no credential is shown.

    Exit codes: 0 no problems, 1 errors found, 2 invalid option, 3 warnings only.

    Example: ergon doctor app:charge --timeout 5s
    """
    raise typer.Exit(run_doctor(names or (), config=config, timeout=timeout, as_json=json))
