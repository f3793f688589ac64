"""Work of ``ergon doctor``: check all targets concurrently, each with a timeout, and print the diagnostics."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any, Final

import typer

from ergon_framework.cli import doctor_view as view
from ergon_framework.cli.doctor_patients import (
    Target,
    missing_extra_diagnostic,
    program_target,
    target_from_name,
    targets_from_settings,
)
from ergon_framework.cli.logs import configure_logging
from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError, MissingExtraError, error_message
from ergon_framework.finding import Diagnostic, DocPage, Severity, WallClock
from ergon_framework.redaction import hide_known_password, redact_address
from ergon_framework.runner import queues
from ergon_framework.runner.exits import ExitCode
from ergon_framework.runner.settings import load_settings

#: Share of the timeout given to checks that time out themselves, because their errors are more precise.
_INNER_TIMEOUT_SHARE: Final = 0.8
#: Most severe first.
_SEVERITY_ORDER: Final = (Severity.ERROR, Severity.WARNING, Severity.OK)


class DoctorExit(ExitCode):
    """Exit codes of ``ergon doctor`` and their meanings."""

    OK = 0, "all is well"
    BROKEN = 1, "something is broken: work stands still or is lost until it is mended"
    USAGE = 2, "the command line is wrong"
    WARNINGS = 3, "it works; there are warnings, and nothing is broken"


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
    # The diagnostics contain what connectors log.
    configure_logging("CRITICAL")
    try:
        reports = run_diagnostics(names, config=config, timeout=timeout)
    except ConfigurationError as error:
        return _report_usage_error(error_message(error), as_json=as_json)
    counts = Counter(diagnostic.weight for report in reports for diagnostic in report.diagnostics)
    code = (
        DoctorExit.BROKEN
        if counts[Severity.ERROR]
        else DoctorExit.WARNINGS
        if counts[Severity.WARNING]
        else DoctorExit.OK
    )
    if as_json:
        typer.echo(json.dumps(_to_dict(reports, counts, code)))
    else:
        view.show([(report.name, report.address, report.diagnostics) for report in reports], counts)
    return code


def run_diagnostics(
    names: Sequence[str], *, config: Path | None, timeout: float, wall: WallClock = time.time
) -> Sequence[TargetReport]:
    """Return the diagnostics; raise ConfigurationError if one of *names* refers to nothing."""
    try:
        settings = load_settings(config)
    except ConfigurationError as error:
        diagnostic = Diagnostic(
            "settings", Severity.ERROR, error_message(error), f"mend it there; see {DocPage.CONFIGURE.label}"
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
    observed, fix_hint = error_message(error), f"mend {target.setting}"
    if isinstance(error, TimeoutError):
        observed = f"no answer within {timeout:g} s"
        return Diagnostic(
            "connection",
            Severity.ERROR,
            observed,
            f"see whether the server hangs, and the way to it; {fix_hint}",
            shared=False,
        )
    if isinstance(error, MissingExtraError):
        return missing_extra_diagnostic(error)
    if isinstance(error, ConnectionLostError) and "FATAL" not in observed:
        remedy = f"see that the server runs and can be reached from here, or {fix_hint}"
        return Diagnostic("connection", Severity.ERROR, observed, remedy, shared=False)
    if not isinstance(error, ErgonError):
        observed = f"{type(error).__name__}: {observed}"
    # The framework's errors end with a remedy if there is a specific one.
    message, separator, remedy = observed.partition("; ")
    return Diagnostic(
        "refused",
        Severity.ERROR,
        message,
        remedy if separator else f"mend the user, the password, the name or the rights: see {target.setting}",
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
                if each.shared or (each.weight is Severity.ERROR and each.what in _SERVER_CHECKS)
            ]
        if target.address and any(each.shared for each in diagnostics):
            known_addresses.add(target.address)
        # Show the most severe diagnostics first.
        selected.sort(key=lambda each: _SEVERITY_ORDER.index(each.weight))
        redacted = tuple(
            replace(
                each,
                observed=hide_known_password(each.observed, target.address),
                remedy=hide_known_password(each.remedy, target.address),
            )
            for each in selected
        )
        yield TargetReport(target.name, target.setting, redact_address(target.address), redacted)


#: Diagnostics shown for a server that has no queue in the settings.
_SERVER_CHECKS: Final = frozenset({"connection", "refused", "library"})


def _report_usage_error(message: str, *, as_json: bool) -> DoctorExit:
    if as_json:
        typer.echo(json.dumps({"error": message, "exit_code": int(DoctorExit.USAGE)}))
    else:
        typer.echo(f"ergon: {message}", err=True)
    return DoctorExit.USAGE


#: The JSON keys of the fields of a Diagnostic that have another name.
_JSON_KEYS = {"observed": "seen", "remedy": "do"}


def _to_dict(reports: Sequence[TargetReport], counts: Counter[Severity], code: DoctorExit) -> dict[str, Any]:
    return {
        "exit_code": int(code),
        **{weight.value: counts[weight] for weight in Severity},
        "examined": [
            {
                "name": report.name,
                "setting": report.setting,
                "address": report.address,
                "findings": [
                    {_JSON_KEYS.get(key, key): value for key, value in asdict(each).items() if key != "shared"}
                    for each in report.diagnostics
                ],
            }
            for report in reports
        ],
    }
