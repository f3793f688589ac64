"""Find the snippets of a document and run them; the conventions are in CONTRIBUTING.md."""

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
TIMEOUT_SECONDS = 120.0
#: Each snippet shows it in its own first line; a program of several snippets needs it once, in its first line.
FUTURE_IMPORT = "from __future__ import annotations"


class SnippetFailed(AssertionError):
    """A snippet does not do what its document says."""


@dataclass(frozen=True, slots=True)
class Snippet:
    """One fenced block: its language, its text, its line, and its file name, if any."""

    language: str
    text: str
    line: int
    title: str | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """One `$ ` line with the output that the document shows for it; no output allows any."""

    line: str
    expected: str


def find_snippets(text: str) -> list[Snippet]:
    """Return the blocks of *text* that must run, in order."""
    blocks = []
    for match in FENCE.finditer(text):
        info = match["info"].split()
        title = TITLE.search(match["info"])
        if not info or (info[0] not in LANGUAGES and not title):
            continue
        body = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start()) + 2
        blocks.append(Snippet(info[0], body, line, title[1] if title else None))
    return blocks


def parse_commands(text: str) -> list[Command]:
    """Return the commands of a console block; a block without `$ ` is one script."""
    if not re.search(r"^\$ ", text, re.MULTILINE):
        return [Command(f"set -e\n{text}", "")]
    result = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        end = next((n for n, line in enumerate(lines) if not line.endswith("\\")), len(lines) - 1) + 1
        # A continued command may show the shell's own prompt.
        line = "\n".join([lines[0], *(more.removeprefix("> ") for more in lines[1:end])])
        result.append(Command(line, "\n".join(lines[end:]).strip()))
    return result


def matches(expected: str, actual: str) -> bool:
    """Return whether *actual* is what the document shows; `...` matches any text, trailing blanks are ignored."""
    pattern = ".*".join(re.escape(part) for part in _trim_lines(expected).split("..."))
    return re.fullmatch(pattern, _trim_lines(actual), re.DOTALL) is not None


def _trim_lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


@dataclass(frozen=True, slots=True)
class SnippetRunner:
    """Runs snippets in their own folder, with the programs of the environment that holds the wheel."""

    folder: Path
    bin: Path
    name: str = "document"
    #: Additional environment variables, such as the address of a database.
    env: Mapping[str, str] = field(default_factory=dict)

    def run_all(self, blocks: list[Snippet]) -> None:
        """Write titled files and run the consoles in order, then run all untitled Python as one program."""
        for snippet in blocks:
            if snippet.title:
                path = self.folder / snippet.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(snippet.text, encoding="utf-8")
            elif snippet.language != "python":
                for command in parse_commands(snippet.text):
                    self._run_command(command, snippet.line)
        self._run_python([s for s in blocks if s.language == "python" and not s.title])

    def _run_command(self, command: Command, line: int) -> None:
        process = self._run(["bash", "-c", command.line])
        if process.returncode:
            raise SnippetFailed(
                f"{self.name}:{line}: $ {command.line}\nexit code {process.returncode}\n{process.stdout}"
            )
        if command.expected and not matches(command.expected, process.stdout):
            difference = f"the document shows\n{command.expected}\nbut it prints\n{process.stdout}"
            raise SnippetFailed(f"{self.name}:{line}: $ {command.line}\n{difference}")

    def _run_python(self, blocks: list[Snippet]) -> None:
        if not blocks:
            return
        # Each block keeps the line it has in the document, so that a traceback points there.
        program = self.folder / f".{Path(self.name).stem}.py"
        lines = [FUTURE_IMPORT]
        for snippet in blocks:
            text = snippet.text.replace(FUTURE_IMPORT, "")
            lines += [""] * (snippet.line - 1 - len(lines)) + text.splitlines()
        program.write_text("\n".join(lines) + "\n", encoding="utf-8")
        process = self._run([str(self.bin / "python"), "-W", "error", program.name])
        if process.returncode:
            raise SnippetFailed(f"{self.name}: its Python exits with {process.returncode}\n{process.stdout}")

    def _run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_", "PYTEST"))}
        env |= {"PATH": f"{self.bin}{os.pathsep}{env['PATH']}", "VIRTUAL_ENV": str(self.bin.parent), "COLUMNS": "120"}
        env |= self.env
        return subprocess.run(
            arguments,
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
