"""What ``ergon new`` does: templates of the package become the files of a project, all of them or none."""

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
from typing import Final

import typer

from ergon_framework.errors import ConfigurationError, text
from ergon_framework.runner.exits import ExitCode

#: Names of databases, images and pods are made of it, and the shortest limit among theirs is 63.
LONGEST: Final = 40
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
#: What a package of that name would hide, besides the standard library and what is installed: folders of the project,
#: and what it or its tests import.
_TAKEN: Final = frozenset(
    {
        *("ergon", "ergon_framework", "ergon_pytest", "tests", "deploy", "build", "dist"),
        *("pytest", "ruff", "typer", "rich", "pydantic", "opentelemetry", "prometheus_client"),
        *("psycopg", "alembic", "sqlalchemy", "pika", "aiormq", "nats", "redis"),
    }
)

_SUFFIX: Final = ".tmpl"
_WORD: Final = re.compile(r"\{\{(\w+)\}\}")
#: Names that would mean something to those who build and lint this package, and so are other ones here.
_HIDDEN: Final = {"gitignore": ".gitignore", "dockerignore": ".dockerignore"}


class Broker(StrEnum):
    """The brokers that a project can begin with; each has a folder of templates."""

    POSTGRES = "postgres"
    RABBITMQ = "rabbitmq"
    NATS = "nats"
    REDIS = "redis"


class NewExit(ExitCode):
    """Every exit code of ``ergon new`` with what it means."""

    OK = 0, "the project is written"
    FAILED = 1, "it could not be written; nothing is left of it"
    USAGE = 2, "the name cannot be used, or the folder is not empty"


def created(name: str, broker: Broker) -> NewExit:
    """Write the project *name* into a folder of that name here; how it went."""
    try:
        check_name(name)
        _check_folder(Path(name))
        write(Path(name), rendered(name, broker))
    except ConfigurationError as error:
        typer.echo(f"ergon: {text(error)}", err=True)
        return NewExit.USAGE
    except OSError as error:
        typer.echo(f"ergon: {name} cannot be written here: {error.strerror}; nothing is left of it", err=True)
        return NewExit.FAILED
    typer.echo(f"{name} is written, with its queue in {_words(broker)['server']}")
    typer.echo(f"next: cd {name}, and read README.md")
    return NewExit.OK


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a package, a database, an image and a pod at once."""
    if len(name) > LONGEST:
        raise ConfigurationError(f"a name of {len(name)} characters is too long; take one of at most {LONGEST}")
    if not _NAME.fullmatch(name):
        made = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        hint = f", as {made!r}" if _NAME.fullmatch(made) else ""
        raise ConfigurationError(
            f"{name!r} cannot be a name; take small letters, digits and single underscores, beginning with a "
            f"letter{hint}. It is written into the current folder: go to another one first if it belongs there"
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise ConfigurationError(f"{name!r} is a word of Python's; take another name, as '{name}_worker'")
    if name in sys.stdlib_module_names or name in _TAKEN or _installed(name):
        raise ConfigurationError(
            f"a package called {name!r} would hide another one of that name; take another, as '{name}_worker'"
        )


def _installed(name: str) -> bool:
    """Whether a package of somebody else's has that name; one of a project that was called so before has not."""
    slug = name.replace("_", "-")
    owners = packages_distributions().get(name, ())
    return any(re.sub(r"[-_.]+", "-", owner).lower() != slug for owner in owners)


def _check_folder(folder: Path) -> None:
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise ConfigurationError(f"{str(folder)!r} is there and is no folder; take another name, or move it away")
    there = next(folder.iterdir(), None)
    if there is not None:
        raise ConfigurationError(
            f"the folder {str(folder)!r} is not empty, it has {there.name!r} in it; take another name, or move it away"
        )


# -- templates ------------------------------------------------------------------------------------


def rendered(name: str, broker: Broker) -> dict[PurePosixPath, str]:
    """Every file of the project with its text."""
    words = _all_words(name, broker)
    made = {}
    for part in ("common", broker.value):
        for path, template in _templates(_root() / part, PurePosixPath()):
            made[_place(path, name)] = _filled(template, words, str(path))
    return made


def _root() -> Traversable:
    return files("ergon_framework.cli") / "templates"


def _templates(folder: Traversable, at: PurePosixPath) -> Iterator[tuple[PurePosixPath, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _templates(entry, at / entry.name)
        elif entry.name.endswith(_SUFFIX):
            yield at / entry.name.removesuffix(_SUFFIX), entry.read_text(encoding="utf-8")


def _place(path: PurePosixPath, name: str) -> PurePosixPath:
    parts = [_HIDDEN.get(part, part) for part in path.parts]
    return PurePosixPath(*([name, *parts[1:]] if parts[0] == "package" else parts))


def _words(broker: Broker) -> dict[str, str]:
    found: dict[str, str] = tomllib.loads((_root() / broker.value / "words.toml").read_text(encoding="utf-8"))
    return found


def _all_words(name: str, broker: Broker) -> Mapping[str, str]:
    queue = f"{name}_orders"
    own = {
        "name": name,
        "slug": name.replace("_", "-"),
        "queue": queue,
        "variable": f"ERGON_QUEUES__{queue.upper()}__URL",
        "version": version("ergon-framework"),
    }
    # Fragments have words of their own in them.
    return own | {key: _filled(text, own, key).strip("\n") for key, text in _words(broker).items()}


def _filled(text: str, words: Mapping[str, str], where: str) -> str:
    """*text* with its words in; an empty one that stands alone takes its line, and a blank one below, with it."""
    lines: list[str] = []
    dropped = False
    for line in text.splitlines():
        alone = _WORD.fullmatch(line)
        said = _word(alone, words, where) if alone else _WORD.sub(lambda found: _word(found, words, where), line)
        if (alone and not said) or (dropped and not line and lines and not lines[-1]):
            dropped = True
            continue
        dropped = False
        lines.append(said)
    return "\n".join(lines) + "\n"


def _word(found: re.Match[str], words: Mapping[str, str], where: str) -> str:
    try:
        return words[found[1]]
    except KeyError:
        raise AssertionError(f"the template {where} names {found[1]!r}, which nobody says") from None


# -- files ----------------------------------------------------------------------------------------


def write(folder: Path, made: Mapping[PurePosixPath, str]) -> None:
    """Put the files into *folder*, which is not there or empty: all of them, or none."""
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        inside = beside / folder.name
        for path, text in made.items():
            target = inside / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        try:
            # In one step, and the system refuses it if somebody has put something there meanwhile.
            inside.rename(folder)
        except OSError as error:
            raise ConfigurationError(
                f"the folder {str(folder)!r} cannot be made: {error.strerror}; take another name, or move it away"
            ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
