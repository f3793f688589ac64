"""An old key is refused with its new name, wherever a policy or a setting comes from."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from pydantic import ValidationError

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.policy import AppendRetry
from ergon_framework.policy import RENAMED_KEYS, Policy
from ergon_framework.providers.retry import RetryPolicy as ProviderRetryPolicy
from ergon_framework.runner import settings
from ergon_framework.runner.loading import load_policy
from ergon_framework.runner.settings import JournalSettings, ProbeSettings, RestartSettings, RunSettings, load_settings
from ergon_framework.worker import policies
from ergon_framework.worker.policies import ConsumerLoopPolicy, ConsumerPolicy, RetryPolicy, SettlePolicy


class Rename(NamedTuple):
    """A renamed key, the type and the section that it is in, and a value for it."""

    kind: type[Policy]
    section: tuple[str, ...]
    old: str
    new: str
    value: Any

    @property
    def refusal(self):
        return f"unknown key {self.old!r} in {self.kind.__name__}: it is called {self.new!r}"

    @property
    def settings_section(self):
        return self.section if self.section[0] == "run" else ("tasks", "charge", "policy", *self.section)

    @property
    def settings_refusal(self):
        section = ".".join(self.settings_section)
        return f"unknown key '{section}.{self.old}': it is called '{section}.{self.new}'"

    def make_variable_name(self, key):
        return "ERGON_" + "__".join((*self.settings_section, key)).upper()


POLICY_RENAMES = [
    Rename(RetryPolicy, ("steps", "process", "retry"), "hold", "max_inline_delay", 2.0),
    Rename(RetryPolicy, ("steps", "process", "retry"), "abandon_grace", "exit_grace", 2.0),
    Rename(ConsumerLoopPolicy, ("loop",), "identity_delay", "duplicate_delay", 2.0),
    Rename(SettlePolicy, ("steps", "settle"), "group", "batch_size", 2),
    Rename(SettlePolicy, ("steps", "settle"), "pending", "max_pending", 200),
]
RENAMES = [
    *POLICY_RENAMES,
    Rename(JournalSettings, ("run", "journal"), "on", "enabled", True),
    Rename(JournalSettings, ("run", "journal"), "room", "max_buffered", 2),
    Rename(ProbeSettings, ("run", "probes"), "silent", "heartbeat_timeout", 2.0),
    Rename(ProbeSettings, ("run", "probes"), "blocked", "event_loop_timeout", 2.0),
    Rename(RestartSettings, ("run", "restart"), "steady", "stable_after", 2.0),
]

with_each_rename = pytest.mark.parametrize("rename", RENAMES, ids=lambda rename: rename.old)


def nest(keys, value):
    for key in reversed(keys):
        value = {key: value}
    return value


def format_toml(section, key, value):
    return f"[{'.'.join(section)}]\n{key} = {json.dumps(value)}\n"


def get_error(load, *args, **options):
    with pytest.raises(ConfigurationError) as caught:
        load(*args, **options)
    return str(caught.value)


@pytest.mark.spec("RUN-03")
@with_each_rename
def test_an_old_argument_is_refused_with_the_new_name(rename):
    with pytest.raises(ValidationError, match=rename.refusal):
        rename.kind(**{rename.old: rename.value})


@pytest.mark.spec("RUN-03")
@with_each_rename
def test_an_old_key_of_a_mapping_is_refused_with_the_new_name(rename):
    assert get_error(rename.kind.load, {rename.old: rename.value}).endswith(rename.refusal)


@with_each_rename
def test_the_new_key_is_accepted(rename):
    assert getattr(rename.kind.load({rename.new: rename.value}), rename.new) == rename.value


@pytest.mark.spec("RUN-03")
@pytest.mark.parametrize("name", ["policy.toml", "policy.json"])
@pytest.mark.parametrize("rename", POLICY_RENAMES, ids=lambda rename: rename.old)
def test_an_old_key_of_a_policy_file_is_refused_with_its_place_and_the_new_name(tmp_path, name, rename):
    tree = json.dumps(nest((*rename.section, rename.old), rename.value))
    toml = format_toml(rename.section, rename.old, rename.value)
    (tmp_path / name).write_text(tree if name.endswith(".json") else toml, encoding="utf-8")
    message = get_error(load_policy, tmp_path / name, ConsumerPolicy)
    assert message.startswith(str(tmp_path / name))
    assert message.endswith(f"{'.'.join(rename.section)}: {rename.refusal}")


@pytest.mark.spec("RUN-03")
@with_each_rename
def test_an_old_key_of_the_settings_file_is_refused_with_its_place_and_the_new_name(tmp_path, rename):
    path = tmp_path / "ergon.toml"
    path.write_text(format_toml(rename.settings_section, rename.old, rename.value), encoding="utf-8")
    assert get_error(load_settings, path, {}) == f"{path}: {rename.settings_refusal}"


@pytest.mark.spec("RUN-03")
@with_each_rename
def test_an_old_variable_is_refused_with_the_new_key(tmp_path, monkeypatch, rename):
    monkeypatch.chdir(tmp_path)
    name = rename.make_variable_name(rename.old)
    error = get_error(load_settings, environ={name: json.dumps(rename.value)})
    assert error == f"{name}: {rename.settings_refusal}"


@with_each_rename
def test_the_variable_of_the_new_key_is_accepted(tmp_path, monkeypatch, rename):
    monkeypatch.chdir(tmp_path)
    loaded = load_settings(environ={rename.make_variable_name(rename.new): json.dumps(rename.value)})
    section = loaded if rename.section[0] == "run" else loaded.policy("charge", ConsumerPolicy())
    for key in (*rename.section, rename.new):
        section = getattr(section, key)
    assert section == rename.value


# -- the table ------------------------------------------------------------------------------------


def test_the_table_has_these_keys_and_no_others():
    listed = {(kind, old, new) for kind, keys in RENAMED_KEYS.items() for old, new in keys.items()}
    assert listed == {(rename.kind.__name__, rename.old, rename.new) for rename in RENAMES}


def test_the_table_is_of_types_that_have_the_new_key_and_not_the_old_one():
    for kind_name, keys in RENAMED_KEYS.items():
        kind = getattr(policies, kind_name, None) or getattr(settings, kind_name)
        assert keys.keys().isdisjoint(kind.model_fields)
        assert set(keys.values()) <= kind.model_fields.keys()


def test_a_derived_type_refuses_the_old_keys_of_its_base():
    message = get_error(AppendRetry.load, {"hold": 1.0})
    assert message.endswith("unknown key 'hold' in AppendRetry: it is called 'max_inline_delay'")


@pytest.mark.parametrize(
    "kind, key",
    [(RestartSettings, "on"), (RunSettings, "room"), (SettlePolicy, "hold"), (ProviderRetryPolicy, "hold")],
)
def test_an_old_key_in_another_section_is_an_ordinary_unknown_key(kind, key):
    message = get_error(kind.load, {key: 1})
    assert f"unknown key {key!r} in {kind.__name__}; " in message
    assert "it is called" not in message


def test_another_type_may_have_a_key_with_an_old_name():
    class Room(Policy):
        room: int = 3
        on: bool = False

    assert Room.load({"room": 4, "on": True}) == Room(room=4, on=True)
