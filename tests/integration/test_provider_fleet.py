"""Many processes at one quota, one breaker and one key, some of them killed: the fleet of tests/chaos, in small."""

from __future__ import annotations

import os

import pytest

from ergon_framework.schema.migrate import upgrade
from tests.chaos import providers

pytestmark = pytest.mark.invariant


@pytest.fixture(scope="module")
def dsn(postgres):
    address = postgres.create_database(f"fleet_{os.getpid()}")
    upgrade(address)
    return address


@pytest.mark.spec("PRV-16", "PRV-19")
@pytest.mark.parametrize("blocks", [None, {"size": 10, "lease": 2.0}])
def test_a_limit_holds_over_processes_and_what_the_dead_had_is_listed(dsn, blocks):
    small = {"limit": 60, "processes": 2, "threads": 4, "calls": 200}
    found = providers.quota(dsn, **small, blocks=blocks, kill=blocks is None)
    assert found["ok"], found


@pytest.mark.spec("PRV-18", "PRV-20")
def test_a_dead_upstream_is_left_alone_by_all_and_found_again_by_one(dsn, tmp_path):
    found = providers.breaker(dsn, tmp_path, processes=2, threads=2, latency=0.0, cooldown=0.8)
    assert found["ok"], found


@pytest.mark.spec("PRV-22")
def test_equal_keys_of_many_processes_make_one_call(dsn):
    found = providers.keys(dsn, processes=2, calls=32)
    assert found["ok"], found


@pytest.mark.spec("PRV-22")
def test_a_consumer_that_is_killed_around_its_calls_never_uses_a_second_key(dsn):
    found = providers.kills(dsn, count=5, transactions=12, seed=7)
    assert found["ok"], found
