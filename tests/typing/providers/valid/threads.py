"""A provider of threads: the types of requests, results, options and the generic call."""

from dataclasses import dataclass
from decimal import Decimal
from typing import TypedDict, assert_type

from pydantic import BaseModel

from ergon_framework.providers import Provider, ProviderPolicy, operation


@dataclass
class ChargeRequest:
    amount: Decimal


@dataclass
class ChargeResult:
    id: str


class Refund(BaseModel):
    charge: str


class Status(TypedDict):
    state: str


class Payments(Provider):
    provider_name = "payments"
    capability = "charging"
    policy = ProviderPolicy(retries=2, timeout=5, calls_per_minute=600, breaker_threshold=3)

    def __init__(self, url: str, *, policy: ProviderPolicy | None = None) -> None:
        super().__init__(policy=policy)
        self.url = url

    @operation
    def charge(self, request: ChargeRequest) -> ChargeResult:
        assert_type(self.attempt.timeout, float)
        assert_type(self.attempt.tenant_id, str)
        assert_type(self.attempt.idempotency_key, str | None)
        self.attempt.http_status = 201
        return ChargeResult(self.url)

    @operation
    def refund(self, request: Refund) -> None: ...

    @operation(reads=True)
    def status(self, charge: str, *, deep: bool = False) -> Status:
        return {"state": charge}

    @operation(name="void", reads=False)
    def cancel(self, charge: str, tags: list[str]) -> int:
        return len(tags)


payments = Payments("https://payments.example", policy=ProviderPolicy(retries=0, attempt_timeout=1.5))
assert_type(payments.charge(ChargeRequest(Decimal(5))), ChargeResult)
assert_type(payments.status("ch_1", deep=True)["state"], str)
assert_type(payments.cancel("ch_1", tags=["a"]), int)
payments.refund(Refund(charge="ch_1"))

quick = payments.with_options(tenant_id="acme", campaign_id="spring", timeout=2, idempotency_key="k", name="n")
assert_type(quick, Payments)
assert_type(quick.charge(ChargeRequest(Decimal(5))).id, str)


class Stricter(Payments):
    @operation
    def charge(self, request: ChargeRequest) -> ChargeResult:
        return super().charge(request)


assert_type(Stricter("").charge(ChargeRequest(Decimal(5))), ChargeResult)
