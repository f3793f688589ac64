"""What ``ergon doctor`` does: look at everything at once, each within its time, and say what was found."""

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
from ergon_framework.cli.doctor_patients import Patient, named, named_by, program, unavailable
from ergon_framework.cli.logs import configure
from ergon_framework.errors import ConfigurationError, ConnectionLost, ErgonError, MissingExtraError, text
from ergon_framework.finding import Finding, Page, Wall, Weight
from ergon_framework.redaction import hide_known, redact_address
from ergon_framework.runner import queues
from ergon_framework.runner.exits import ExitCode
from ergon_framework.runner.settings import settings

#: Of the time that one has, what those who keep time themselves are given of it: they say more about its end.
_INNER: Final = 0.8
#: The heaviest first.
_ORDER: Final = (Weight.BROKEN, Weight.WARNING, Weight.FINE)


class DoctorExit(ExitCode):
    """Every exit code of ``ergon doctor`` with what it means."""

    OK = 0, "all is well"
    BROKEN = 1, "something is broken: work stands still or is lost until it is mended"
    USAGE = 2, "the command line is wrong"
    WARNED = 3, "it works; there are warnings, and nothing is broken"


@dataclass(frozen=True, slots=True)
class Report:
    """What was found of one patient."""

    name: str
    setting: str
    #: Without credentials.
    address: str
    findings: tuple[Finding, ...]


def diagnosed(names: Sequence[str], *, config: Path | None, timeout: float, as_json: bool) -> DoctorExit:
    """Print what is wrong with what the settings and *names* name."""
    # What connectors say in their logs is told by the findings.
    configure("CRITICAL")
    try:
        reports = examined(names, config=config, timeout=timeout)
    except ConfigurationError as error:
        return _refused(text(error), as_json=as_json)
    counts = Counter(finding.weight for report in reports for finding in report.findings)
    code = (
        DoctorExit.BROKEN if counts[Weight.BROKEN] else DoctorExit.WARNED if counts[Weight.WARNING] else DoctorExit.OK
    )
    if as_json:
        typer.echo(json.dumps(_told(reports, counts, code)))
    else:
        view.show([(report.name, report.address, report.findings) for report in reports], counts)
    return code


def examined(names: Sequence[str], *, config: Path | None, timeout: float, wall: Wall = time.time) -> Sequence[Report]:
    """What was found; ConfigurationError where one of *names* stands for nothing."""
    try:
        found = settings(config)
    except ConfigurationError as error:
        finding = Finding("settings", Weight.BROKEN, text(error), f"mend it there; see {Page.CONFIGURE.named}")
        return [Report("this program", "", "", (finding,))]
    queues.use(found)
    patients = [program(found, config), *named_by(found, _INNER * timeout)]
    for name in names:
        patients += named(name, found, _INNER * timeout)
    return list(_once(_looked_at(patients, timeout, wall)))


def _looked_at(patients: Sequence[Patient], timeout: float, wall: Wall) -> Iterator[tuple[Patient, list[Finding]]]:
    """All at once: each has its whole time, and whoever hangs delays nobody else."""
    looks = [(patient, _begun(patient.examine, wall)) for patient in patients]
    until = time.monotonic() + timeout
    for patient, look in looks:
        try:
            yield patient, list(look.result(max(0.0, until - time.monotonic())))
        except Exception as error:  # noqa: BLE001 - whatever one look raises is a finding and ends no other
            yield patient, [_failed(error, patient, timeout)]


def _begun(examine: Callable[[Wall], Sequence[Finding]], wall: Wall) -> Future[Sequence[Finding]]:
    done: Future[Sequence[Finding]] = Future()

    def look() -> None:
        try:
            done.set_result(examine(wall))
        except BaseException as error:  # noqa: BLE001 - handed on as data
            done.set_exception(error)

    # Nobody waits for one that hangs, at the end of the program neither.
    Thread(target=look, name="ergon-doctor", daemon=True).start()
    return done


def _failed(error: Exception, patient: Patient, timeout: float) -> Finding:
    """Why it could not be looked at, and what to do about that."""
    seen, mend = text(error), f"mend {patient.setting}"
    if isinstance(error, TimeoutError):
        seen = f"no answer within {timeout:g} s"
        return Finding(
            "connection", Weight.BROKEN, seen, f"see whether the server hangs, and the way to it; {mend}", shared=False
        )
    if isinstance(error, MissingExtraError):
        return unavailable(error)
    if isinstance(error, ConnectionLost) and "FATAL" not in seen:
        do = f"see that the server runs and can be reached from here, or {mend}"
        return Finding("connection", Weight.BROKEN, seen, do, shared=False)
    if not isinstance(error, ErgonError):
        seen = f"{type(error).__name__}: {seen}"
    # Our own errors end with what to do, where there is something particular.
    words, semicolon, do = seen.partition("; ")
    return Finding(
        "refused",
        Weight.BROKEN,
        words,
        do if semicolon else f"mend the user, the password, the name or the rights: see {patient.setting}",
        shared=False,
    )


def _once(looks: Iterator[tuple[Patient, list[Finding]]]) -> Iterator[Report]:
    """What is of a server is told with the first that lives there; nothing shows a credential."""
    known: set[str] = set()
    for patient, findings in looks:
        told = [each for each in findings if not (each.shared and patient.address in known)]
        if patient.server_only:
            told = [each for each in told if each.shared or (each.weight is Weight.BROKEN and each.what in _REACHING)]
        if patient.address and any(each.shared for each in findings):
            known.add(patient.address)
        # What is broken is read first.
        told.sort(key=lambda each: _ORDER.index(each.weight))
        clean = tuple(
            replace(each, seen=hide_known(each.seen, patient.address), do=hide_known(each.do, patient.address))
            for each in told
        )
        yield Report(patient.name, patient.setting, redact_address(patient.address), clean)


#: What is found of a server although no queue of it is meant.
_REACHING: Final = frozenset({"connection", "refused", "library"})


def _refused(words: str, *, as_json: bool) -> DoctorExit:
    if as_json:
        typer.echo(json.dumps({"error": words, "exit_code": int(DoctorExit.USAGE)}))
    else:
        typer.echo(f"ergon: {words}", err=True)
    return DoctorExit.USAGE


def _told(reports: Sequence[Report], counts: Counter[Weight], code: DoctorExit) -> dict[str, Any]:
    return {
        "exit_code": int(code),
        **{weight.value: counts[weight] for weight in Weight},
        "examined": [
            {
                "name": report.name,
                "setting": report.setting,
                "address": report.address,
                "findings": [
                    {key: value for key, value in asdict(each).items() if key != "shared"} for each in report.findings
                ],
            }
            for report in reports
        ],
    }
