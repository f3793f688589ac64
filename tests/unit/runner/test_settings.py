from __future__ import annotations

import json
from pathlib import Path

import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.runner import settings_sources
from ergon_framework.runner.settings import Settings, TaskSettings, load_settings
from ergon_framework.worker.policies import ConsumerPolicy

SETTINGS_FILE = """
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


def write_settings(folder, text, name="ergon.toml"):
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def get_error(path=None, **environ):
    with pytest.raises(ConfigurationError) as caught:
        load_settings(path, environ)
    return str(caught.value)


def test_without_a_file_and_without_variables_all_is_default(folder):
    loaded = load_settings(environ={"PATH": "/bin", "ERGON_PLANS": "3"})
    assert (loaded.run.processes, loaded.run.probes.port, loaded.logging.level) == (1, None, "info")
    assert loaded.policy("charge", default_policy := ConsumerPolicy()) is default_policy


def test_the_file_in_the_current_folder_is_found(folder):
    write_settings(folder, SETTINGS_FILE)
    loaded = load_settings(environ={})
    assert (loaded.run.processes, loaded.run.restart.backoff, loaded.run.restart.cap) == (3, 0.25, 30.0)
    assert (loaded.logging.format, loaded.postgres.dsn) == ("json", "postgresql://app@db/orders")


def test_another_file_can_be_named_and_must_exist(folder):
    path = write_settings(folder, SETTINGS_FILE, "other.toml")
    assert load_settings(path, {}).run.processes == 3
    assert "there is no configuration file" in get_error(folder / "none.toml")


def test_the_environment_overrides_single_keys_of_the_file(folder):
    write_settings(folder, SETTINGS_FILE)
    loaded = load_settings(environ={"ERGON_RUN__PROCESSES": "5", "ERGON_RUN__RESTART__CAP": "1.5"})
    assert (loaded.run.processes, loaded.run.restart.cap, loaded.run.restart.backoff) == (5, 1.5, 0.25)


def test_settings_change_only_the_named_keys_of_a_policy(folder):
    write_settings(folder, SETTINGS_FILE)
    default_policy = ConsumerPolicy.load({"loop": {"streaming": True, "concurrency": {"value": 1}}})
    environ = {"ERGON_TASKS__CHARGE__POLICY__LOOP__LIMIT": "9", "ERGON_TASKS__OTHER__POLICY__LOOP__LIMIT": "1"}
    policy = load_settings(environ=environ).policy("Charge", default_policy)
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
def test_a_variable_is_parsed_as_toml_if_valid_and_as_text_otherwise(text, value):
    assert settings_sources.parse_value(text) == value


@pytest.mark.spec("RUN-03")
@pytest.mark.parametrize(
    "text, message",
    [
        ("[run]\nproceses = 3", "ergon.toml: unknown key 'run.proceses'; did you mean 'run.processes'?"),
        ("[runn]\nprocesses = 3", "unknown key 'runn'; did you mean 'run'?"),
        ("processes = 3", "unknown key 'processes'; did you mean 'run.processes'?"),
        ("[run]\nzzzzz = 3", "known keys here: processes, drain_timeout, pausable, restart, probes"),
        (
            "[postgres]\nurl = 'x'",
            "unknown key 'postgres.url'; postgres has dsn, user_file, password_file; did you mean 'redis.url'?",
        ),
        ("[tasks.charge]\npolicies = 3", "did you mean 'tasks.charge.policy'?"),
        (
            "[tasks.charge.policy.loop]\nstreeming = true",
            "'tasks.charge.policy.loop.streeming'; did you mean 'tasks.charge.policy.loop.streaming'?",
        ),
    ],
)
def test_an_unknown_key_of_the_file_is_named_with_the_nearest_known_one(folder, text, message):
    write_settings(folder, text)
    assert message in get_error()


@pytest.mark.spec("RUN-03")
@pytest.mark.parametrize(
    "name, message",
    [
        ("ERGON_RUN__PROCESES", "ERGON_RUN__PROCESES: unknown key 'run.proceses'; did you mean 'run.processes'?"),
        ("ERGON_RUN_PROCESSES", "two underscores separate two keys; set ERGON_RUN__PROCESSES"),
        ("ERGON_RUN__", "contains no key"),
        ("ERGON_" + "A__" * 12 + "B", "contains no key"),
    ],
)
def test_an_unknown_variable_is_named_with_the_nearest_known_key(folder, name, message):
    assert message in get_error(**{name: "1"})


@pytest.mark.parametrize(
    "environ, message",
    [
        ({"ERGON_RUN__PROCESSES": "0"}, "ERGON_RUN__PROCESSES: run.processes: "),
        ({"ERGON_RUN__PROBES__PORT": "70000"}, "not 70000"),
        ({"ERGON_RUN__PROCESSES": "x" * 70_000}, "ERGON_RUN__PROCESSES is longer than"),
        ({"ERGON_RUN": "{processes = 2}", "ERGON_RUN__PROCESSES": "[", "ERGON_A": "1"}, "valid integer"),
        ({"ERGON_RUN__RESTART": "1", "ERGON_RUN__RESTART__CAP": "1"}, "keep one of the two"),
    ],
)
def test_the_error_for_an_invalid_value_names_its_variable(folder, environ, message):
    assert message in get_error(**environ)


def test_the_error_for_an_invalid_value_of_the_file_names_the_file(folder):
    write_settings(folder, "[run]\nprocesses = 0")
    assert get_error(ERGON_LOGGING__LEVEL="info").startswith("ergon.toml: run.processes: ")


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
def test_a_secret_in_the_file_is_rejected_without_being_repeated(folder, text, keys):
    write_settings(folder, text)
    message = get_error()
    assert keys in message
    assert "environment only" in message
    assert "hidden" not in message


def test_the_file_may_name_files_with_credentials(folder):
    write_settings(folder, '[postgres]\ndsn = "postgresql://db/orders"\npassword_file = "p"\nuser_file = "u"')
    loaded = load_settings(environ={})
    assert (loaded.postgres.password_file, loaded.postgres.user_file) == ("p", "u")


@pytest.mark.parametrize(
    "environ, message",
    [
        ({"USER_FILE": "u", "DSN": "postgresql://db/orders"}, "user_file is set without password_file"),
        ({"PASSWORD_FILE": "p"}, "password_file is set without dsn"),
    ],
)
def test_files_with_credentials_that_would_not_be_used_are_an_error(folder, environ, message):
    assert message in get_error(**{f"ERGON_POSTGRES__{name}": value for name, value in environ.items()})


def test_a_secret_in_the_environment_is_accepted(folder):
    loaded = load_settings(environ={"ERGON_POSTGRES__DSN": "postgresql://app:hidden@db/orders"})
    assert loaded.postgres.dsn == "postgresql://app:hidden@db/orders"
    assert "hidden" not in repr(loaded)


def test_the_error_for_an_invalid_secret_does_not_show_it(folder):
    assert "hidden" not in get_error(ERGON_POSTGRES__DSN='["hidden"]')


@pytest.mark.parametrize(
    "content, message",
    [(b"[run", "is not TOML"), (b"\xff", "is not TOML"), (b"#" * 1_000_001, "is longer than 1000000 bytes")],
)
def test_an_unreadable_file_is_an_error(folder, content, message):
    (folder / "ergon.toml").write_bytes(content)
    assert message in get_error()


def test_a_folder_instead_of_the_file_is_an_error(folder):
    (folder / "ergon.toml").mkdir()
    assert "cannot be read: Is a directory" in get_error()


def test_the_error_for_an_invalid_policy_names_its_task(folder):
    write_settings(folder, "[tasks.charge.policy.loop]\nlimit = -1")
    with pytest.raises(ConfigurationError, match=r"the settings of task 'charge' are invalid: .*loop.limit"):
        load_settings(environ={}).policy("charge", ConsumerPolicy())


def test_the_guide_lists_every_key_with_its_default_and_its_meaning():
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "configure.md").read_text(encoding="utf-8")
    for keys in settings_sources.known_keys(Settings, {}):
        model = Settings
        for key in keys[:-1]:
            model = model.model_fields[key].annotation
        field = model.model_fields[keys[-1]]
        row = f"| `{'.'.join(keys)}` | {json.dumps(field.default)} | {field.description} |"
        assert row in guide
    assert f"| `tasks.NAME.policy` | nothing | {TaskSettings.model_fields['policy'].description} |" in guide


@pytest.mark.spec("SEC-26")
@pytest.mark.parametrize("line", ['keys = "a:AAAA"', "require = true"])
def test_encryption_is_configured_by_the_environment_only(tmp_path, line):
    path = tmp_path / "ergon.toml"
    path.write_text(f"[encryption]\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"by the environment only.*ERGON_ENCRYPTION__KEYS") as caught:
        load_settings(path, {})
    assert "AAAA" not in str(caught.value)
    loaded = load_settings(environ={"ERGON_ENCRYPTION__KEYS": "2026-11:AAAA", "ERGON_ENCRYPTION__REQUIRE": "true"})
    assert (loaded.encryption.require, "AAAA" in repr(loaded)) == (True, False)
