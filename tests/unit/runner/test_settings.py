from __future__ import annotations

import json
from pathlib import Path

import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.runner import sources
from ergon_framework.runner.settings import Settings, TaskSettings, settings
from ergon_framework.task.mixins.policies import ConsumerPolicy

FILE = """
[run]
processes = 3
drain_timeout = 7
restart.backoff = 0.25

[logging]
format = "json"

[postgres]
dsn = "postgresql://app@db/orders"

[tasks.Charge.policy.loop]
concurrency.value = 4
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder, text, name="ergon.toml"):
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def refusal(path=None, **environ):
    with pytest.raises(ConfigurationError) as caught:
        settings(path, environ)
    return str(caught.value)


def test_without_a_file_and_without_variables_all_is_default(folder):
    found = settings(environ={"PATH": "/bin", "ERGON_PLANS": "3"})
    assert (found.run.processes, found.run.probes.port, found.logging.level) == (1, None, "info")
    assert found.policy("charge", own := ConsumerPolicy()) is own


def test_the_file_in_the_current_folder_is_found(folder):
    written(folder, FILE)
    found = settings(environ={})
    assert (found.run.processes, found.run.restart.backoff, found.run.restart.cap) == (3, 0.25, 30.0)
    assert (found.logging.format, found.postgres.dsn) == ("json", "postgresql://app@db/orders")


def test_another_file_can_be_named_and_must_then_be_there(folder):
    path = written(folder, FILE, "other.toml")
    assert settings(path, {}).run.processes == 3
    assert "there is no configuration file" in refusal(folder / "none.toml")


def test_the_environment_wins_over_the_file_and_leaves_the_rest_of_it(folder):
    written(folder, FILE)
    found = settings(environ={"ERGON_RUN__PROCESSES": "5", "ERGON_RUN__RESTART__CAP": "1.5"})
    assert (found.run.processes, found.run.restart.cap, found.run.restart.backoff) == (5, 1.5, 0.25)


def test_a_policy_differs_only_where_it_was_said_to(folder):
    written(folder, FILE)
    own = ConsumerPolicy.load({"loop": {"streaming": True, "concurrency": {"value": 1}}})
    environ = {"ERGON_TASKS__CHARGE__POLICY__LOOP__LIMIT": "9", "ERGON_TASKS__OTHER__POLICY__LOOP__LIMIT": "1"}
    policy = settings(environ=environ).policy("Charge", own)
    assert (policy.loop.streaming, policy.loop.concurrency.value, policy.loop.limit) == (True, 4, 9)
    assert policy.loop.drain_timeout == 7.0


@pytest.mark.parametrize(
    "text, value",
    [
        ("4", 4),
        ("0.5", 0.5),
        ("true", True),
        ("null", None),
        ('"4"', "4"),
        ("[1, 2]", [1, 2]),
        ("postgresql://app:s@db/x", "postgresql://app:s@db/x"),
        ("1\nother = 2", "1\nother = 2"),
        ("2026-01-01", "2026-01-01"),
        ("", ""),
    ],
)
def test_a_variable_is_read_as_toml_where_it_is_some_and_as_text_otherwise(text, value):
    assert sources.read(text) == value


@pytest.mark.spec("RUN-03")
@pytest.mark.parametrize(
    "text, said",
    [
        ("[run]\nproceses = 3", "ergon.toml: unknown key 'run.proceses'; did you mean 'run.processes'?"),
        ("[runn]\nprocesses = 3", "unknown key 'runn'; did you mean 'run'?"),
        ("processes = 3", "unknown key 'processes'; did you mean 'run.processes'?"),
        ("[run]\nzzzzz = 3", "known here are processes, drain_timeout, pausable, restart, probes"),
        ("[postgres]\nurl = 'x'", "unknown key 'postgres.url'; postgres has dsn; did you mean 'redis.url'?"),
        ("[tasks.charge]\npolicies = 3", "did you mean 'tasks.charge.policy'?"),
        (
            "[tasks.charge.policy.loop]\nstreeming = true",
            "'tasks.charge.policy.loop.streeming'; did you mean 'tasks.charge.policy.loop.streaming'?",
        ),
    ],
)
def test_an_unknown_key_of_the_file_is_named_with_the_nearest_known_one(folder, text, said):
    written(folder, text)
    assert said in refusal()


@pytest.mark.spec("RUN-03")
@pytest.mark.parametrize(
    "name, said",
    [
        ("ERGON_RUN__PROCESES", "ERGON_RUN__PROCESES: unknown key 'run.proceses'; did you mean 'run.processes'?"),
        ("ERGON_RUN_PROCESSES", "between two keys stand two underscores: ERGON_RUN__PROCESSES"),
        ("ERGON_RUN__", "names no key"),
        ("ERGON_" + "A__" * 12 + "B", "names no key"),
    ],
)
def test_an_unknown_variable_is_named_with_the_nearest_known_key(folder, name, said):
    assert said in refusal(**{name: "1"})


@pytest.mark.parametrize(
    "environ, said",
    [
        ({"ERGON_RUN__PROCESSES": "0"}, "ERGON_RUN__PROCESSES: run.processes: "),
        ({"ERGON_RUN__PROBES__PORT": "70000"}, "not 70000"),
        ({"ERGON_RUN__PROCESSES": "x" * 70_000}, "ERGON_RUN__PROCESSES is longer than"),
        ({"ERGON_RUN": "{processes = 2}", "ERGON_RUN__PROCESSES": "[", "ERGON_A": "1"}, "valid integer"),
        ({"ERGON_RUN__RESTART": "1", "ERGON_RUN__RESTART__CAP": "1"}, "keep one of the two"),
    ],
)
def test_a_value_that_does_not_fit_is_told_with_its_variable(folder, environ, said):
    assert said in refusal(**environ)


def test_a_value_of_the_file_that_does_not_fit_is_told_with_the_file(folder):
    written(folder, "[run]\nprocesses = 0")
    assert refusal(ERGON_LOGGING__LEVEL="info").startswith("ergon.toml: run.processes: ")


@pytest.mark.parametrize(
    "text, keys",
    [
        ('[postgres]\npassword = "x"', "postgres.password"),
        ('[postgres]\ndsn = "postgresql://app:hidden@db/orders"', "postgres.dsn"),
        ('[postgres]\ndsn = "host=db password=hidden"', "postgres.dsn"),
        ('[postgres]\ndsn = "postgresql://db/orders?user=a&password=hidden"', "postgres.dsn"),
        (
            '[tasks.charge.policy.steps.fetch.extra]\napi_token = "hidden"',
            "tasks.charge.policy.steps.fetch.extra.api_token",
        ),
        ('[tasks.charge.policy.steps.fetch.extra]\nurls = ["amqp://a:hidden@b"]', "urls"),
    ],
)
def test_a_secret_in_the_file_is_refused_without_being_repeated(folder, text, keys):
    written(folder, text)
    said = refusal()
    assert keys in said
    assert "environment only" in said
    assert "hidden" not in said


def test_a_secret_in_the_environment_is_where_it_belongs(folder):
    found = settings(environ={"ERGON_POSTGRES__DSN": "postgresql://app:hidden@db/orders"})
    assert found.postgres.dsn == "postgresql://app:hidden@db/orders"
    assert "hidden" not in repr(found)


def test_what_is_wrong_with_a_secret_is_told_without_it(folder):
    assert "hidden" not in refusal(ERGON_POSTGRES__DSN='["hidden"]')


@pytest.mark.parametrize(
    "content, said",
    [(b"[run", "is no TOML"), (b"\xff", "is no TOML"), (b"#" * 1_000_001, "is longer than 1000000 bytes")],
)
def test_a_file_that_cannot_be_read_is_told(folder, content, said):
    (folder / "ergon.toml").write_bytes(content)
    assert said in refusal()


def test_a_folder_in_the_place_of_the_file_is_told(folder):
    (folder / "ergon.toml").mkdir()
    assert "cannot be read: Is a directory" in refusal()


def test_a_policy_that_does_not_fit_is_told_with_its_task(folder):
    written(folder, "[tasks.charge.policy.loop]\nlimit = -1")
    with pytest.raises(ConfigurationError, match=r"the settings of the task 'charge': .*loop.limit"):
        settings(environ={}).policy("charge", ConsumerPolicy())


def test_the_guide_lists_every_key_with_its_default_and_its_meaning():
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "configure.md").read_text(encoding="utf-8")
    for keys in sources.known(Settings, {}):
        model = Settings
        for key in keys[:-1]:
            model = model.model_fields[key].annotation
        field = model.model_fields[keys[-1]]
        row = f"| `{'.'.join(keys)}` | {json.dumps(field.default)} | {field.description} |"
        assert row in guide
    assert f"| `tasks.NAME.policy` | nothing | {TaskSettings.model_fields['policy'].description} |" in guide


@pytest.mark.spec("SEC-26")
@pytest.mark.parametrize("said", ['keys = "a:AAAA"', "require = true"])
def test_encryption_is_configured_by_the_environment_only(tmp_path, said):
    path = tmp_path / "ergon.toml"
    path.write_text(f"[encryption]\n{said}\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"by the environment only.*ERGON_ENCRYPTION__KEYS") as caught:
        settings(path, {})
    assert "AAAA" not in str(caught.value)
    found = settings(environ={"ERGON_ENCRYPTION__KEYS": "2026-11:AAAA", "ERGON_ENCRYPTION__REQUIRE": "true"})
    assert (found.encryption.require, "AAAA" in repr(found)) == (True, False)
