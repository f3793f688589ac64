"""Mistakes in calls and declarations of operations."""

from dataclasses import dataclass

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
    def charge(self, request: ChargeRequest) -> ChargeResult:
        self.attempt.idempotency_key.encode()  # E: "None" of "str \| None" has no attribute "encode"
        print(self.attempt.deadline)  # E: "OperationAttempt" has no attribute "deadline"
        return ChargeResult(request.amount)  # E: incompatible type "int"; expected "str"

    @operation(reads=True)
    def status(self, charge: str, *, deep: bool = False) -> int:
        return "paid"  # E: Incompatible return value type \(got "str", expected "int"\)

    @operation(read=True)  # E: Unexpected keyword argument "read"
    def count(self) -> int:
        return 1

    @operation("count")  # E: No overload variant of "operation"
    def total(self) -> int:
        return 1


payments = Payments()
payments.charge({"amount": 5})  # E: expected "ChargeRequest"
payments.charge(amount=5)  # E: Unexpected keyword argument "amount"
payments.charge()  # E: Missing positional argument "request"
payments.charge(ChargeRequest(5), tenant_id="acme")  # E: Unexpected keyword argument "tenant_id"
payments.chrage(ChargeRequest(5))  # E: "Payments" has no attribute "chrage"
print(payments.charge(ChargeRequest(5)).total)  # E: "ChargeResult" has no attribute "total"
payments.charge(ChargeRequest(5))["id"]  # E: Value of type "ChargeResult" is not indexable
payments.status(5)  # E: incompatible type "int"; expected "str"
payments.status("ch_1", True)  # E: Too many positional arguments
payments.status("ch_1", depe=True)  # E: Unexpected keyword argument "depe"
payments.with_options(tenant="acme")  # E: Unexpected keyword argument "tenant"
payments.with_options(timeout="2")  # E: expected "float \| None"
payments.with_options(timeout=2).refund()  # E: "Payments" has no attribute "refund"


class Narrower(Payments):
    @operation
    def charge(self, request: int) -> ChargeResult:  # E: incompatible with supertype "[\w.]*Payments"
        return ChargeResult(str(request))


class AsyncPayments(Provider):
    provider_name = "payments"
    capability = "charging"

    @operation
    async def charge(self, request: ChargeRequest) -> ChargeResult:
        return ChargeResult(str(request.amount))


async def main(payments: AsyncPayments) -> None:
    print(payments.charge(ChargeRequest(5)).id)  # E: has no attribute "id"
    payments.charge(ChargeRequest(5))  # E: must be used
    print((await payments.charge(ChargeRequest(5))).total)  # E: "ChargeResult" has no attribute "total"
