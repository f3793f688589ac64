"""A provider of asyncio: operations are awaited and keep their types."""

from dataclasses import dataclass
from typing import assert_type

from ergon_framework.providers import Provider, operation


@dataclass
class ChargeRequest:
    amount: int


@dataclass
class ChargeResult:
    id: str


class Payments(Provider):
    provider_name = "payments"
    capability = "charging"

    @operation
    async def charge(self, request: ChargeRequest) -> ChargeResult:
        return ChargeResult(str(request.amount))

    @operation(reads=True)
    async def count(self) -> int:
        return 1


async def main(payments: Payments) -> None:
    assert_type(await payments.charge(ChargeRequest(5)), ChargeResult)
    assert_type(await payments.with_options(timeout=1).count(), int)
