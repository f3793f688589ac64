"""Finds the snippets of a document and runs them; the conventions are in CONTRIBUTING.md."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
TITLE = re.compile(r'\btitle="([^"]+)"')
LANGUAGES = {"python", "console", "bash"}
LIMIT = 120.0
#: Python wants it in the first line of a program, a reader in the first line of a snippet.
FUTURE = "from __future__ import annotations"


class SnippetFailed(AssertionError):
    """A snippet does not do what its document says."""


@dataclass(frozen=True, slots=True)
class Snippet:
    """One fenced block: its language, its text, where it stands, and the file it wants to be, if any."""

    language: str
    text: str
    line: int
    title: str | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """One `$ ` line with the output that the document shows for it; no output shown means any."""

    line: str
    expected: str


def snippets(text: str) -> list[Snippet]:
    """The blocks of *text* that must run, in order."""
    found = []
    for match in FENCE.finditer(text):
        words = match["info"].split()
        title = TITLE.search(match["info"])
        if not words or (words[0] not in LANGUAGES and not title):
            continue
        body = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start()) + 2
        found.append(Snippet(words[0], body, line, title[1] if title else None))
    return found


def commands(text: str) -> list[Command]:
    """The commands of a console block; a block without `$ ` is one script."""
    if not re.search(r"^\$ ", text, re.MULTILINE):
        return [Command(f"set -e\n{text}", "")]
    found = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        end = next((n for n, line in enumerate(lines) if not line.endswith("\\")), len(lines) - 1) + 1
        # A continued command may show the shell's own prompt.
        line = "\n".join([lines[0], *(more.removeprefix("> ") for more in lines[1:end])])
        found.append(Command(line, "\n".join(lines[end:]).strip()))
    return found


def matches(expected: str, actual: str) -> bool:
    """Whether *actual* is what the document shows; `...` stands for anything, ends of lines for nothing."""
    pattern = ".*".join(re.escape(part) for part in _trimmed(expected).split("..."))
    return re.fullmatch(pattern, _trimmed(actual), re.DOTALL) is not None


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


@dataclass(frozen=True, slots=True)
class Bench:
    """Where snippets run: a folder of their own, and the programs of the environment that holds the wheel."""

    folder: Path
    bin: Path
    name: str = "document"
    #: What the environment says besides, as the address of a database.
    env: Mapping[str, str] = field(default_factory=dict)

    def run_all(self, found: list[Snippet]) -> None:
        """Write titled files and run the consoles in order, then run all untitled Python as one program."""
        for snippet in found:
            if snippet.title:
                path = self.folder / snippet.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(snippet.text, encoding="utf-8")
            elif snippet.language != "python":
                for command in commands(snippet.text):
                    self._console(command, snippet.line)
        self._python([s for s in found if s.language == "python" and not s.title])

    def _console(self, command: Command, line: int) -> None:
        done = self._run(["bash", "-c", command.line])
        if done.returncode:
            raise SnippetFailed(f"{self.name}:{line}: $ {command.line}\nexit code {done.returncode}\n{done.stdout}")
        if command.expected and not matches(command.expected, done.stdout):
            shown = f"the document shows\n{command.expected}\nbut it prints\n{done.stdout}"
            raise SnippetFailed(f"{self.name}:{line}: $ {command.line}\n{shown}")

    def _python(self, found: list[Snippet]) -> None:
        if not found:
            return
        # Each block keeps the line it has in the document, so that a traceback points there.
        program = self.folder / f".{Path(self.name).stem}.py"
        lines = [FUTURE]
        for snippet in found:
            text = snippet.text.replace(FUTURE, "")
            lines += [""] * (snippet.line - 1 - len(lines)) + text.splitlines()
        program.write_text("\n".join(lines) + "\n", encoding="utf-8")
        done = self._run([str(self.bin / "python"), "-W", "error", program.name])
        if done.returncode:
            raise SnippetFailed(f"{self.name}: its Python exits with {done.returncode}\n{done.stdout}")

    def _run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_", "PYTEST"))}
        env |= {"PATH": f"{self.bin}{os.pathsep}{env['PATH']}", "VIRTUAL_ENV": str(self.bin.parent), "COLUMNS": "120"}
        env |= self.env
        return subprocess.run(
            words,
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            check=False,
        )
