"""Every command and snippet of README and the guides runs against the installed wheel."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.snippets import FUTURE_IMPORT, SnippetFailed, SnippetRunner, find_snippets, matches, parse_commands
from tests.docs.with_servers import create_owned_database
from tests.servers.postgres import free_port

ROOT = Path(__file__).parents[2]
#: Specification and decision records quote forms; their snippets are not run.
NOT_RUN_FOLDERS = ("docs/spec/", "docs/adr/")
DOCUMENTS = [
    name
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    if path.exists() and not (name := path.relative_to(ROOT).as_posix()).startswith(NOT_RUN_FOLDERS)
]


#: Texts of documents that need a broker.
NEEDS_RABBITMQ = re.compile(r"RABBITMQ_URL|RabbitMQQueue\(")
NEEDS_NATS = re.compile(r"ERGON_NATS__URL")
NEEDS_REDIS = re.compile(r"RedisQueue\(")
#: Texts of documents that need a database.
NEEDS_A_DATABASE = re.compile(r"Postgres(Queue|ProviderState|Boundary)\(|^\$ ergon db ", re.MULTILINE)


@pytest.mark.spec("RUN-05")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_document_does_what_it_says(name, wheel_bin, tmp_path, request):
    text = (ROOT / name).read_text(encoding="utf-8")
    env = create_environment(request.getfixturevalue("new_postgres")(), name) if NEEDS_A_DATABASE.search(text) else {}
    if NEEDS_RABBITMQ.search(text):
        env["RABBITMQ_URL"] = env["ERGON_RABBITMQ__URL"] = request.getfixturevalue("new_rabbitmq")().url
    if NEEDS_NATS.search(text):
        env["ERGON_NATS__URL"] = request.getfixturevalue("new_nats")().url
    if NEEDS_REDIS.search(text):
        env["ERGON_REDIS__URL"] = request.getfixturevalue("new_redis")().url
    SnippetRunner(tmp_path, wheel_bin, name, env).run_all(find_snippets(text))


def create_environment(postgres, name):
    """Return the addresses of an empty database for one document, owned by its own role, and of a free port."""
    database = re.sub(r"\W+", "_", Path(name).stem.lower())
    return {
        "ERGON_POSTGRES__DSN": create_owned_database(postgres, f"of_{database}"),
        "PORT": str(free_port()),
        "PGCONNECT_TIMEOUT": "10",
    }


def test_the_snippets_import_the_wheel_and_not_the_checkout(wheel_bin, tmp_path):
    code = "import ergon_framework.errors as module; print(module.__file__)"
    process = subprocess.run(
        [wheel_bin / "python", "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert Path(process.stdout).is_relative_to(wheel_bin.parent)


def run_snippets(text, installed, tmp_path):
    SnippetRunner(tmp_path, installed, "some.md").run_all(find_snippets(text))


def test_a_titled_snippet_is_a_file_for_the_commands_after_it(wheel_bin, tmp_path):
    file = '```python title="hello.py"\nprint("hello")\n```\n'
    run_snippets(file + "```console\n$ python hello.py\nhello\n$ ls \\\n> hello.py\n```\n", wheel_bin, tmp_path)


def test_untitled_snippets_of_a_document_are_one_program(wheel_bin, tmp_path):
    run_snippets(
        f"```python\nx = 1\n```\ntext\n```python\n{FUTURE_IMPORT}\n\nassert x == 1\n```\n", wheel_bin, tmp_path
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", 'some.py", line 6'),
        ("```console\n$ echo one\ntwo\n```\n", "the document shows\ntwo"),
        ("```console\n$ echo one\n$ exit 3\n```\n", "exit code 3"),
        ("```bash\nfalse\ntrue\n```\n", "exit code 1"),
        ("1. item\n\n   ```bash\n   exit 4\n   ```\n", "exit code 4"),
    ],
)
def test_a_snippet_that_does_not_do_what_it_says_fails(text, message, wheel_bin, tmp_path):
    with pytest.raises(SnippetFailed) as caught:
        run_snippets(text, wheel_bin, tmp_path)
    assert message in str(caught.value)


def test_only_the_languages_that_run_are_snippets():
    text = "```text\na\n```\n```python\nb\n```\n```\nc\n```\n```console\n$ d\n```\n"
    assert [(s.language, s.line) for s in find_snippets(text)] == [("python", 5), ("console", 11)]


def test_output_belongs_to_the_command_above_it():
    assert [(c.line, c.expected) for c in parse_commands("$ a\n1\n2\n$ b\n")] == [("a", "1\n2"), ("b", "")]


@pytest.mark.parametrize(
    "expected, actual, is_match",
    [
        ("done in ... ms", "done in 12 ms\n", True),
        ("first\n...\nlast", "first\n1\n2\nlast", True),
        ("one", "one  \n", True),
        ("one", "one more", False),
        ("a.c", "abc", False),
    ],
)
def test_dots_stand_for_anything(expected, actual, is_match):
    assert matches(expected, actual) is is_match
