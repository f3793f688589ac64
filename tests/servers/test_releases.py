"""The selection of the servers' release."""

from __future__ import annotations

import pytest

from tests.servers import redis, releases


def test_an_unknown_release_is_rejected_with_the_known_ones(monkeypatch):
    monkeypatch.setenv("ERGON_SERVERS", "debian99")
    with pytest.raises(releases.ReleaseError, match=r"debian99.*debian12, current, newest"):
        releases.find_root()


def test_a_release_that_is_not_installed_is_an_error_and_never_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("ERGON_SERVERS", "current")
    monkeypatch.setattr(releases, "_HOME", tmp_path)
    with pytest.raises(releases.ReleaseError, match="install-servers --current"):
        releases.in_release(["true"])


def test_without_a_selection_a_command_is_run_as_it_is(monkeypatch):
    monkeypatch.delenv("ERGON_SERVERS", raising=False)
    assert releases.in_release(["true", "x"], user=(1, 1)) == ["true", "x"]


def test_an_unknown_kind_of_redis_is_rejected_with_the_known_ones(monkeypatch):
    monkeypatch.setenv("ERGON_REDIS", "keydb")
    with pytest.raises(redis.RedisServerError, match=r"keydb.*redis, valkey"):
        redis.find_program()


def test_a_missing_valkey_is_an_error_and_never_redis(monkeypatch):
    monkeypatch.setenv("ERGON_REDIS", "valkey")
    monkeypatch.setattr(releases, "find_program", {"redis-server": "/usr/bin/redis-server"}.get)
    with pytest.raises(redis.RedisServerError, match="these tests need valkey-server"):
        redis.find_program()
