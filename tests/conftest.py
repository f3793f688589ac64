"""Settings of every test: the plugins and the profiles of hypothesis."""

from __future__ import annotations

import os

from hypothesis import settings

# A server that is started as another user is forked. gRPC would start its threads in the child, without its files.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

pytest_plugins = ["tests.servers.fixtures", "tests.invariants", "tests.crowd"]

# Wall time on a shared machine says nothing about a rule, so no example has a deadline.
settings.register_profile("gate", deadline=None, max_examples=100, print_blob=True)
settings.register_profile("deep", deadline=None, max_examples=5_000, print_blob=True)
settings.load_profile("gate")
