"""Check many processes on one quota, one breaker and one key, some of them killed: a short form of tests/chaos."""

from __future__ import annotations

import os

import pytest

from ergon_framework.database.migrate import upgrade
from tests.chaos import providers

pytestmark = pytest.mark.invariant


@pytest.fixture(scope="module")
def dsn(postgres):
    address = postgres.create_database(f"fleet_{os.getpid()}")
    upgrade(address)
    return address


@pytest.mark.spec("PRV-16", "PRV-19")
@pytest.mark.parametrize("blocks", [None, {"size": 10, "lease": 2.0}])
def test_a_limit_applies_to_all_processes_and_reservations_of_dead_ones_are_listed(dsn, blocks):
    options = {"limit": 60, "processes": 2, "threads": 4, "calls": 200}
    result = providers.run_quota(dsn, **options, blocks=blocks, kill=blocks is None)
    assert result["ok"], result


@pytest.mark.spec("PRV-18", "PRV-20")
def test_a_dead_upstream_is_called_by_none_until_one_probe_finds_it_again(dsn, tmp_path):
    result = providers.run_breaker(dsn, tmp_path, processes=2, threads=2, latency=0.0, cooldown=0.8)
    assert result["ok"], result


@pytest.mark.spec("PRV-22")
def test_equal_keys_of_many_processes_make_one_call(dsn):
    result = providers.run_keys(dsn, processes=2, calls=32)
    assert result["ok"], result


@pytest.mark.spec("PRV-22")
def test_a_consumer_that_is_killed_around_its_calls_never_uses_a_second_key(dsn):
    result = providers.run_kills(dsn, count=5, transactions=12, seed=7)
    assert result["ok"], result
