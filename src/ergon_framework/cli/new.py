"""``ergon new``: create the files of a project from the package's templates, all of them or none."""

from __future__ import annotations

import keyword
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from importlib.metadata import packages_distributions, version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import Annotated, Final

import typer

from ergon_framework.errors import ConfigurationError, error_message
from ergon_framework.runner.exit import ExitCode

#: The name is part of database, image and pod names, whose shortest limit is 63 characters.
MAX_NAME_CHARS: Final = 40
_NAME_PATTERN: Final = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
#: Reserved besides the standard library and installed packages: names of project folders, and of packages that the
#: project or its tests import. A package of that name would hide them.
_RESERVED_NAMES: Final = frozenset(
    {
        *("ergon", "ergon_framework", "ergon_pytest", "tests", "deploy", "build", "dist"),
        *("pytest", "ruff", "typer", "rich", "pydantic", "opentelemetry", "prometheus_client"),
        *("psycopg", "alembic", "sqlalchemy", "pika", "aiormq", "nats", "redis"),
    }
)

#: The suffix of template files, and a placeholder in them, such as {{name}}.
_SUFFIX: Final = ".tmpl"
_PLACEHOLDER: Final = re.compile(r"\{\{(\w+)\}\}")
#: Files renamed in the templates because tools that build and lint this package would read them.
_RENAMED_FILES: Final = {"gitignore": ".gitignore", "dockerignore": ".dockerignore"}


class Broker(StrEnum):
    """Brokers that a project can start with; each has a folder of templates."""

    POSTGRES = "postgres"
    RABBITMQ = "rabbitmq"
    NATS = "nats"
    REDIS = "redis"


class NewExit(ExitCode):
    """Exit codes of ``ergon new`` and their meanings."""

    OK = 0, "the project is written"
    FAILED = 1, "writing failed; no files remain"
    USAGE = 2, "the name is invalid, or the folder is not empty"


def create_project(name: str, broker: Broker) -> NewExit:
    """Write the project *name* into a new folder of that name; return the exit code."""
    try:
        check_name(name)
        _check_folder(Path(name))
        write(Path(name), render_files(name, broker))
    except ConfigurationError as error:
        typer.echo(f"ergon: {error_message(error)}", err=True)
        return NewExit.USAGE
    except OSError as error:
        typer.echo(f"ergon: writing {name} failed: {error.strerror}; no files remain", err=True)
        return NewExit.FAILED
    typer.echo(f"created {name} with its queue in {_load_broker_values(broker)['server']}")
    typer.echo(f"next: cd {name}, and read README.md")
    return NewExit.OK


def check_name(name: str) -> None:
    """Reject a name that is invalid for a package, a database, an image or a pod."""
    if len(name) > MAX_NAME_CHARS:
        raise ConfigurationError(
            f"project name {name!r:.40} has {len(name)} characters; the maximum is {MAX_NAME_CHARS}"
        )
    if not _NAME_PATTERN.fullmatch(name):
        suggestion = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        hint = f", for example {suggestion!r}" if _NAME_PATTERN.fullmatch(suggestion) else ""
        raise ConfigurationError(
            f"invalid name {name!r}; use lower-case letters, digits and single underscores, beginning with a "
            f"letter{hint}. The project is created in the current folder; change the folder first if needed"
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise ConfigurationError(f"{name!r} is a Python keyword; use another name, such as '{name}_worker'")
    if name in sys.stdlib_module_names or name in _RESERVED_NAMES or _is_installed(name):
        raise ConfigurationError(
            f"a package called {name!r} would hide an existing package; use another name, such as '{name}_worker'"
        )


def _is_installed(name: str) -> bool:
    """Return whether a third-party package has that name; an earlier project of the same name does not count."""
    slug = name.replace("_", "-")
    owners = packages_distributions().get(name, ())
    return any(re.sub(r"[-_.]+", "-", owner).lower() != slug for owner in owners)


def _check_folder(folder: Path) -> None:
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise ConfigurationError(f"{str(folder)!r} exists and is not a folder; use another name, or move it away")
    existing = next(folder.iterdir(), None)
    if existing is not None:
        raise ConfigurationError(
            f"the folder {str(folder)!r} is not empty, it contains {existing.name!r}; use another name, or move it away"
        )


# -- templates --------------------------------------------------------------------------------------


def render_files(name: str, broker: Broker) -> dict[PurePosixPath, str]:
    """Return the text of every file of the project."""
    values = _build_values(name, broker)
    contents = {}
    for part in ("common", broker.value):
        for path, template in _iter_templates(_get_template_root() / part, PurePosixPath()):
            contents[_to_project_path(path, name)] = _fill_template(template, values, str(path))
    return contents


def _get_template_root() -> Traversable:
    return files("ergon_framework.cli") / "templates"


def _iter_templates(folder: Traversable, base: PurePosixPath) -> Iterator[tuple[PurePosixPath, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _iter_templates(entry, base / entry.name)
        elif entry.name.endswith(_SUFFIX):
            yield base / entry.name.removesuffix(_SUFFIX), entry.read_text(encoding="utf-8")


def _to_project_path(path: PurePosixPath, name: str) -> PurePosixPath:
    """Return the path in the project: the templates' folder ``package`` is the project's own Python package."""
    parts = [_RENAMED_FILES.get(part, part) for part in path.parts]
    return PurePosixPath(*([name, *parts[1:]] if parts[0] == "package" else parts))


def _load_broker_values(broker: Broker) -> dict[str, str]:
    """Load the fragments of text that differ between the brokers, by the placeholder that they fill."""
    values: dict[str, str] = tomllib.loads(
        (_get_template_root() / broker.value / "words.toml").read_text(encoding="utf-8")
    )
    return values


def _build_values(name: str, broker: Broker) -> Mapping[str, str]:
    queue = f"{name}_orders"
    project_values = {
        "name": name,
        "slug": name.replace("_", "-"),
        "queue": queue,
        "variable": f"ERGON_QUEUES__{queue.upper()}__URL",
        "version": version("ergon-framework"),
    }
    # Fragments contain placeholders too.
    return project_values | {
        key: _fill_template(text, project_values, key).strip("\n") for key, text in _load_broker_values(broker).items()
    }


def _fill_template(text: str, values: Mapping[str, str], source: str) -> str:
    """Fill the placeholders of *text*; a line with only an empty placeholder is removed with a following blank line."""
    lines: list[str] = []
    skip_blank = False
    for line in text.splitlines():
        placeholder = _PLACEHOLDER.fullmatch(line)
        filled = (
            _lookup_value(placeholder, values, source)
            if placeholder
            else _PLACEHOLDER.sub(lambda match: _lookup_value(match, values, source), line)
        )
        if (placeholder and not filled) or (skip_blank and not line and lines and not lines[-1]):
            skip_blank = True
            continue
        skip_blank = False
        lines.append(filled)
    return "\n".join(lines) + "\n"


def _lookup_value(match: re.Match[str], values: Mapping[str, str], source: str) -> str:
    try:
        return values[match[1]]
    except KeyError:
        raise AssertionError(f"the template {source} uses the undefined placeholder {match[1]!r}") from None


# -- files ------------------------------------------------------------------------------------------


def write(folder: Path, contents: Mapping[PurePosixPath, str]) -> None:
    """Write all files into *folder*, which is missing or empty, or write none of them."""
    staging_folder = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        staged_project = staging_folder / folder.name
        for path, text in contents.items():
            target = staged_project / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        try:
            # The rename is atomic, and the system rejects it if the folder was filled in the meantime.
            staged_project.rename(folder)
        except OSError as error:
            raise ConfigurationError(
                f"creating the folder {str(folder)!r} failed: {error.strerror}; use another name, or move it away"
            ) from error
    finally:
        shutil.rmtree(staging_folder, ignore_errors=True)


# -- command ----------------------------------------------------------------------------------------

new = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@new.command("new")
def new_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the project and its package, for example shop.")],
    *,
    broker: Annotated[
        Broker, typer.Option(help="Broker of the queue; to change it later, edit one line of ergon.toml.")
    ] = Broker.POSTGRES,
) -> None:
    """Create a ready-to-run project in the folder NAME.

    The project has a task with its policy, a test with a simulated clock, pyproject.toml, Dockerfile, compose.yaml, and
    manifests for Kubernetes with probes and scaling by queue depth. An existing folder must be empty: nothing is
    overwritten.

    Exit codes: 0 created, 1 writing failed; no files remain, 2 invalid name, option or folder.

    Example: ergon new shop --broker redis
    """
    raise typer.Exit(create_project(name, broker))
