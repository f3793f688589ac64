"""Every command and snippet of README and the guides runs against the installed wheel."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.lend import owned
from tests.docs.snippets import FUTURE, Bench, SnippetFailed, commands, matches, snippets
from tests.servers.postgres import free_port

ROOT = Path(__file__).parents[2]
#: Specification and decision records quote forms; they promise nothing that runs.
PROSE = ("docs/spec/", "docs/adr/")
DOCUMENTS = [
    name
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    if path.exists() and not (name := path.relative_to(ROOT).as_posix()).startswith(PROSE)
]


#: What a document says that needs a broker.
NEEDS_RABBITMQ = re.compile(r"RABBITMQ_URL|RabbitMQQueue\(")
NEEDS_NATS = re.compile(r"ERGON_NATS__URL")
NEEDS_REDIS = re.compile(r"RedisQueue\(")
#: What a document says that needs a database.
NEEDS_A_DATABASE = re.compile(r"Postgres(Queue|Books|Boundary)\(|^\$ ergon db ", re.MULTILINE)


@pytest.mark.spec("RUN-05")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_document_does_what_it_says(name, installed, tmp_path, request):
    text = (ROOT / name).read_text(encoding="utf-8")
    env = lent(request.getfixturevalue("new_postgres")(), name) if NEEDS_A_DATABASE.search(text) else {}
    if NEEDS_RABBITMQ.search(text):
        env["RABBITMQ_URL"] = env["ERGON_RABBITMQ__URL"] = request.getfixturevalue("new_rabbitmq")().url
    if NEEDS_NATS.search(text):
        env["ERGON_NATS__URL"] = request.getfixturevalue("new_nats")().url
    if NEEDS_REDIS.search(text):
        env["ERGON_REDIS__URL"] = request.getfixturevalue("new_redis")().url
    Bench(tmp_path, installed, name, env).run_all(snippets(text))


def lent(postgres, name):
    """An empty database for one document, owned by a role of its own, and a port for what it serves."""
    database = re.sub(r"\W+", "_", Path(name).stem.lower())
    return {
        "ERGON_POSTGRES__DSN": owned(postgres, f"of_{database}"),
        "PORT": str(free_port()),
        "PGCONNECT_TIMEOUT": "10",
    }


def test_the_snippets_see_the_wheel_and_not_the_checkout(installed, tmp_path):
    code = "import ergon_framework.errors as module; print(module.__file__)"
    done = subprocess.run([installed / "python", "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert Path(done.stdout).is_relative_to(installed.parent)


def run(text, installed, tmp_path):
    Bench(tmp_path, installed, "some.md").run_all(snippets(text))


def test_a_titled_snippet_is_a_file_for_the_commands_after_it(installed, tmp_path):
    file = '```python title="hello.py"\nprint("hello")\n```\n'
    run(file + "```console\n$ python hello.py\nhello\n$ ls \\\n> hello.py\n```\n", installed, tmp_path)


def test_untitled_snippets_of_a_document_are_one_program(installed, tmp_path):
    run(f"```python\nx = 1\n```\ntext\n```python\n{FUTURE}\n\nassert x == 1\n```\n", installed, tmp_path)


@pytest.mark.parametrize(
    "text, said",
    [
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", 'some.py", line 6'),
        ("```console\n$ echo one\ntwo\n```\n", "the document shows\ntwo"),
        ("```console\n$ echo one\n$ exit 3\n```\n", "exit code 3"),
        ("```bash\nfalse\ntrue\n```\n", "exit code 1"),
        ("1. item\n\n   ```bash\n   exit 4\n   ```\n", "exit code 4"),
    ],
)
def test_a_snippet_that_does_not_do_what_it_says_fails(text, said, installed, tmp_path):
    with pytest.raises(SnippetFailed) as caught:
        run(text, installed, tmp_path)
    assert said in str(caught.value)


def test_only_the_languages_that_run_are_snippets():
    text = "```text\na\n```\n```python\nb\n```\n```\nc\n```\n```console\n$ d\n```\n"
    assert [(s.language, s.line) for s in snippets(text)] == [("python", 5), ("console", 11)]


def test_output_belongs_to_the_command_above_it():
    assert [(c.line, c.expected) for c in commands("$ a\n1\n2\n$ b\n")] == [("a", "1\n2"), ("b", "")]


@pytest.mark.parametrize(
    "expected, actual, same",
    [
        ("done in ... ms", "done in 12 ms\n", True),
        ("first\n...\nlast", "first\n1\n2\nlast", True),
        ("one", "one  \n", True),
        ("one", "one more", False),
        ("a.c", "abc", False),
    ],
)
def test_dots_stand_for_anything(expected, actual, same):
    assert matches(expected, actual) is same
