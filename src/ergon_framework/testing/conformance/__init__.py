"""The conformance suites: what every connector, boundary, content store and executor must do."""

from typing import TYPE_CHECKING

from ergon_framework._util.exports import lazy_exports

if TYPE_CHECKING:
    from ergon_framework.testing.conformance.boundary.client import BoundaryUnderTest
    from ergon_framework.testing.conformance.boundary.suite import pytest_suite as pytest_boundary_suite
    from ergon_framework.testing.conformance.boundary.suite import run_suite as run_boundary_suite
    from ergon_framework.testing.conformance.check import CheckOutcome, CheckResult
    from ergon_framework.testing.conformance.connector.adapter import ConnectorUnderTest, Server
    from ergon_framework.testing.conformance.connector.suite import pytest_suite as pytest_connector_suite
    from ergon_framework.testing.conformance.connector.suite import run_suite as run_connector_suite
    from ergon_framework.testing.conformance.content_store.fixture import ContentStoreUnderTest
    from ergon_framework.testing.conformance.content_store.suite import pytest_suite as pytest_content_store_suite
    from ergon_framework.testing.conformance.content_store.suite import run_suite as run_content_store_suite
    from ergon_framework.testing.conformance.executor.suite import report as format_executor_results
    from ergon_framework.testing.conformance.executor.suite import run_suite as run_executor_suite
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "boundary.client": ("BoundaryUnderTest",),
            "boundary.suite": ("pytest_suite as pytest_boundary_suite", "run_suite as run_boundary_suite"),
            "check": ("CheckOutcome", "CheckResult"),
            "connector.adapter": ("ConnectorUnderTest", "Server"),
            "connector.suite": ("pytest_suite as pytest_connector_suite", "run_suite as run_connector_suite"),
            "content_store.fixture": ("ContentStoreUnderTest",),
            "content_store.suite": (
                "pytest_suite as pytest_content_store_suite",
                "run_suite as run_content_store_suite",
            ),
            "executor.suite": ("report as format_executor_results", "run_suite as run_executor_suite"),
        },
    )

__all__ = [
    "BoundaryUnderTest",
    "CheckOutcome",
    "CheckResult",
    "ConnectorUnderTest",
    "ContentStoreUnderTest",
    "Server",
    "format_executor_results",
    "pytest_boundary_suite",
    "pytest_connector_suite",
    "pytest_content_store_suite",
    "run_boundary_suite",
    "run_connector_suite",
    "run_content_store_suite",
    "run_executor_suite",
]
