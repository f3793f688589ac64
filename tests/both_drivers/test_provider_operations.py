"""Typed operations: a method call is a call of execute, with the same records, keys and errors on either variant."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel, Field, SecretStr
from typing_extensions import TypedDict

from ergon_framework import scope
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.providers import (
    MemoryProviderState,
    OperationAttempt,
    Provider,
    ProviderBadRequestError,
    ProviderCircuitOpenError,
    ProviderConnectionError,
    ProviderExecutionContext,
    ProviderExecutionResult,
    ProviderInternalError,
    ProviderPolicy,
    ProviderQuotaExceededError,
    ProviderResponseFormatError,
    ProviderTimeoutError,
    operation,
)
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction


class Currency(StrEnum):
    EUR = "EUR"


@dataclass(frozen=True)
class ChargeRequest:
    order: str
    amount: Decimal
    currency: Currency = Currency.EUR


@dataclass(frozen=True)
class ChargeResult:
    id: str
    paid_at: datetime


class Refund(BaseModel):
    charge: UUID
    day: date


class RefundReceipt(BaseModel):
    number: int
    lines: list[ChargeResult]


class Login(BaseModel):
    token: SecretStr


class Hollow(BaseModel):
    """A result that is stored without one of its required fields."""

    id: str = Field(exclude=True)


class Status(TypedDict):
    state: str
    amount: Decimal


PAID_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
REQUEST = ChargeRequest("17", Decimal("12.50"))
PAID = ChargeResult("ch_1", PAID_AT)


@dataclass
class Upstream:
    """What an attempt does, in order; afterwards each one succeeds. It records the arguments and the attempts."""

    errors: list[Exception] = field(default_factory=list)
    requests: list[tuple[Any, ...]] = field(default_factory=list)
    attempts: list[OperationAttempt] = field(default_factory=list)

    def take(self, attempt: OperationAttempt, *arguments: Any) -> None:
        self.attempts.append(attempt)
        self.requests.append(arguments)
        if self.errors:
            raise self.errors.pop(0)


class ThreadsPayments(Provider):
    provider_name = "payments"
    capability = "charging"

    def __init__(self, upstream: Upstream, **options: Any) -> None:
        super().__init__(**options)
        self.upstream = upstream
        self.token = "old"

    @operation
    def charge(self, request: ChargeRequest) -> ChargeResult:
        self.upstream.take(self.attempt, request)
        self.token = "new"
        self.attempt.http_status = 201
        return PAID

    @operation
    def refund(self, request: Refund) -> RefundReceipt:
        self.upstream.take(self.attempt, request)
        return RefundReceipt(number=7, lines=[PAID])

    @operation(reads=True)
    def status(self, charge: UUID, /, day: date, *, deep: bool = False) -> Status:
        self.upstream.take(self.attempt, charge, day, deep)
        return {"state": "paid", "amount": Decimal("12.50")}

    @operation(name="void")
    def cancel(self, charge: str, tags: list[str]) -> None:
        self.upstream.take(self.attempt, charge, tags)

    @operation
    def count(self, since: date) -> int:
        self.upstream.take(self.attempt, since)
        return 3

    @operation
    def broken(self, kind: str) -> ChargeResult:
        return {"data": {"id": 1}, "text": "ok", "object": ChargeResult("ch_1", "today")}[kind]  # type: ignore[return-value]

    @operation
    def login(self, request: Login) -> None:
        self.upstream.take(self.attempt, request)

    @operation
    def hollow(self) -> Hollow:
        return Hollow(id="1")

    @operation
    def nested(self, request: ChargeRequest) -> ChargeResult:
        return self.charge(request)

    @operation
    def recursive(self, kind: str) -> None:
        self.recursive(kind + kind)

    @operation
    def nested_generic(self, kind: str) -> None:
        self.execute(operation="cancel" if kind == "unknown" else "void", payload={})


class AsyncioPayments(Provider):
    provider_name = "payments"
    capability = "charging"

    def __init__(self, upstream: Upstream, **options: Any) -> None:
        super().__init__(**options)
        self.upstream = upstream
        self.token = "old"

    @operation
    async def charge(self, request: ChargeRequest) -> ChargeResult:
        self.upstream.take(self.attempt, request)
        self.token = "new"
        await asyncio.sleep(0)
        self.attempt.http_status = 201
        return PAID

    @operation
    async def refund(self, request: Refund) -> RefundReceipt:
        self.upstream.take(self.attempt, request)
        return RefundReceipt(number=7, lines=[PAID])

    @operation(reads=True)
    async def status(self, charge: UUID, /, day: date, *, deep: bool = False) -> Status:
        self.upstream.take(self.attempt, charge, day, deep)
        return {"state": "paid", "amount": Decimal("12.50")}

    @operation(name="void")
    async def cancel(self, charge: str, tags: list[str]) -> None:
        self.upstream.take(self.attempt, charge, tags)

    @operation
    async def count(self, since: date) -> int:
        self.upstream.take(self.attempt, since)
        return 3

    @operation
    async def broken(self, kind: str) -> ChargeResult:
        return {"data": {"id": 1}, "text": "ok", "object": ChargeResult("ch_1", "today")}[kind]  # type: ignore[return-value]

    @operation
    async def login(self, request: Login) -> None:
        self.upstream.take(self.attempt, request)

    @operation
    async def hollow(self) -> Hollow:
        return Hollow(id="1")

    @operation
    async def nested(self, request: ChargeRequest) -> ChargeResult:
        return await self.charge(request)

    @operation
    async def recursive(self, kind: str) -> None:
        await self.recursive(kind + kind)

    @operation
    async def nested_generic(self, kind: str) -> None:
        await self.execute(operation="cancel" if kind == "unknown" else "void", payload={})


class ThreadsOverride(ThreadsPayments):
    @operation
    def charge(self, request: ChargeRequest) -> ChargeResult:
        return ChargeResult("own-" + super().charge(request).id, PAID_AT)


class AsyncioOverride(AsyncioPayments):
    @operation
    async def charge(self, request: ChargeRequest) -> ChargeResult:
        return ChargeResult("own-" + (await super().charge(request)).id, PAID_AT)


class World:
    """A provider of one variant with its upstream and its state."""

    def __init__(self, variant: str, *errors: Exception, kind: str = "Payments", **policy: Any) -> None:
        self.upstream = Upstream(list(errors))
        self.state = MemoryProviderState()
        self.provider = globals()[variant.capitalize() + kind](
            self.upstream, state_store=self.state, policy=ProviderPolicy(**({"backoff": 0.0} | policy))
        )

    def call(self, method: str, *args: Any, handler_scope: Scope | None = None, provider: Any = None, **kwargs: Any):
        function = getattr(provider or self.provider, method)

        def run():
            scope.set_scope(handler_scope)
            try:
                if not self.provider.is_async:
                    return function(*args, **kwargs)

                async def main():
                    return await function(*args, **kwargs)

                return asyncio.run(main())
            finally:
                scope.set_scope(None)

        return run()

    def fail(self, kind: type[Exception], method: str, *args: Any, **kwargs: Any):
        with pytest.raises(kind) as caught:
            self.call(method, *args, **kwargs)
        return caught.value


def make_scope(tenant: str | None = "acme") -> Scope:
    return Scope(Transaction(id="order-7", source="shop", tenant=tenant, correlation="cor-1"), "process", 0)


# -- a call ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, arguments, result",
    [
        ("charge", (REQUEST,), PAID),
        ("refund", (Refund(charge=UUID(int=5), day=date(2026, 1, 2)),), RefundReceipt(number=7, lines=[PAID])),
        ("status", (UUID(int=5), date(2026, 1, 2)), {"state": "paid", "amount": Decimal("12.50")}),
        ("cancel", ("ch_1", ["a"]), None),
        ("count", (date(2026, 1, 2),), 3),
    ],
)
def test_arguments_and_results_keep_their_types(variant, method, arguments, result):
    world = World(variant)
    assert world.call(method, *arguments) == result
    (received,) = world.upstream.requests
    assert received[: len(arguments)] == arguments
    assert [type(value) for value in received[: len(arguments)]] == [type(value) for value in arguments]


@pytest.mark.spec("PRV-01", "PRV-02", "PRV-11")
def test_an_operation_is_recorded_like_a_generic_call(variant):
    world = World(variant, retries=1, timeout=20)
    provider = world.provider.with_options(
        tenant_id="acme", campaign_id="spring", correlation_id="c1", idempotency_key="k1"
    )
    assert world.call("charge", REQUEST, provider=provider) == PAID
    (row,) = world.state.list_attempts()
    assert (row.tenant_id, row.provider_name, row.capability, row.operation) == (
        "acme",
        "payments",
        "charging",
        "charge",
    )
    assert (row.idempotency_key, row.correlation_id, row.attempt_number, row.max_attempts) == ("k1", "c1", 1, 2)
    assert (row.http_status, row.timeout_budget_ms, row.retryable, row.reason_code) == (201, 20_000.0, False, None)
    (attempt,) = world.upstream.attempts
    assert (attempt.tenant_id, attempt.campaign_id, attempt.operation) == ("acme", "spring", "charge")
    assert (attempt.idempotency_key, attempt.correlation_id, attempt.number) == ("k1", "c1", 1)
    assert 0 < attempt.timeout <= 20


@pytest.mark.spec("PRV-01")
def test_the_payload_of_an_operation_is_the_json_form_of_its_request(variant):
    world = World(variant)
    keyed = world.provider.with_options(idempotency_key="k1")
    world.call("charge", REQUEST, provider=keyed)
    # The same payload under the same key: the stored result is replayed, so the fingerprints are equal.
    result = world.call(
        "execute",
        operation="charge",
        payload={"order": "17", "amount": "12.50", "currency": "EUR"},
        context=ProviderExecutionContext(idempotency_key="k1"),
    )
    assert isinstance(result, ProviderExecutionResult)
    assert (result.replayed, result.value) == (True, {"id": "ch_1", "paid_at": "2026-01-02T03:04:05Z"})
    assert (result.tenant_id, result.campaign_id) == ("default", None)


def test_a_body_gets_the_objects_of_the_caller_at_each_attempt(variant):
    world = World(variant, ConnectionResetError("gone"), retries=1)
    request = Login(token=SecretStr("hunter2"))  # masked in the payload
    world.call("login", request)
    assert [received is request for (received,) in world.upstream.requests] == [True, True]


def test_the_payload_of_several_arguments_names_each_of_them(variant):
    world = World(variant)
    payload = {"charge": str(UUID(int=5)), "day": "2026-01-02"}
    result = world.call("execute", operation="status", payload=payload)
    assert result.value == {"state": "paid", "amount": "12.50"}
    assert world.upstream.requests == [(UUID(int=5), date(2026, 1, 2), False)]
    world.call("execute", operation="status", payload={**payload, "deep": True})
    assert world.upstream.requests[1][2] is True
    assert world.call("execute", operation="count", payload={"since": "2026-01-02"}).value == {"result": 3}
    assert world.call("execute", operation="void", payload={"charge": "c", "tags": []}).value == {"result": None}


@pytest.mark.parametrize(
    "name, payload, text",
    [
        ("charge", {"order": "17"}, "request.amount: Field required"),
        ("charge", {"order": "17", "amount": "much"}, "request.amount"),
        ("void", {"charge": "c"}, "tags is missing"),
        ("void", {"charge": "c", "tags": [], "other": 1}, r"\['other'\] are not parameters"),
    ],
)
def test_a_generic_payload_that_does_not_match_is_rejected_without_a_request(variant, name, payload, text):
    world = World(variant)
    error = world.fail(ProviderBadRequestError, "execute", operation=name, payload=payload)
    assert (error.category, error.sent, error.code) == (Category.BUSINESS, False, "payload_invalid")
    assert re.match(f"the payload of {name} is invalid: {text}", str(error))
    assert world.upstream.requests == []


# -- tenant, campaign and keys --------------------------------------------------------------------


@pytest.mark.spec("PRV-01", "PRV-22")
def test_a_call_in_a_handler_gets_tenant_correlation_and_key_from_the_scope(variant):
    world, handler_scope = World(variant), make_scope()
    world.call("charge", REQUEST, handler_scope=handler_scope)
    (row,) = world.state.list_attempts()
    assert (row.tenant_id, row.correlation_id) == ("acme", "cor-1")
    assert row.idempotency_key == handler_scope.transaction.derive("payments.charge")
    assert world.upstream.attempts[0].campaign_id is None


@pytest.mark.spec("PRV-22")
def test_a_redelivery_gets_the_stored_result_with_its_type(variant):
    world = World(variant)
    results = [world.call("refund", Refund(charge=UUID(int=5), day=date(2026, 1, 2)), handler_scope=make_scope())]
    results.append(world.call("refund", Refund(charge=UUID(int=5), day=date(2026, 1, 2)), handler_scope=make_scope()))
    assert len(world.upstream.requests) == 1
    assert results[0] == results[1] == RefundReceipt(number=7, lines=[PAID])


def test_another_request_under_the_key_of_a_call_is_a_conflict(variant):
    world = World(variant)
    world.call("charge", REQUEST, handler_scope=make_scope())
    error = world.fail(ProviderBadRequestError, "charge", ChargeRequest("17", Decimal(13)), handler_scope=make_scope())
    assert (error.code, len(world.upstream.requests)) == ("idempotency_conflict", 1)


def test_a_second_call_in_one_handler_needs_a_name(variant):
    world, handler_scope = World(variant), make_scope()
    world.call("charge", REQUEST, handler_scope=handler_scope)
    with pytest.raises(ConfigurationError, match=r"effect name 'payments\.charge' is used twice"):
        world.call("charge", REQUEST, handler_scope=handler_scope)
    world.call("charge", REQUEST, handler_scope=handler_scope, provider=world.provider.with_options(name="second"))
    assert world.upstream.attempts[1].idempotency_key == handler_scope.transaction.derive("payments.charge/second")


def test_operations_that_read_and_renamed_ones_have_the_right_key(variant):
    world, handler_scope = World(variant), make_scope()
    world.call("status", UUID(int=5), date(2026, 1, 2), handler_scope=handler_scope)
    world.call("cancel", "ch_1", [], handler_scope=handler_scope)
    assert [attempt.idempotency_key for attempt in world.upstream.attempts] == [
        None,
        handler_scope.transaction.derive("payments.void"),
    ]


@pytest.mark.parametrize("tenant, expected", [(None, "default"), ("", "default"), ("acme", "acme")])
def test_the_tenant_of_a_generic_call_is_that_of_the_scope_else_the_default(variant, tenant, expected):
    world = World(variant)
    result = world.call(
        "execute", operation="charge", payload={"order": "1", "amount": 1}, handler_scope=make_scope(tenant)
    )
    assert (result.tenant_id, result.campaign_id) == (expected, None)


def test_a_tenant_that_the_caller_passes_replaces_that_of_the_scope(variant):
    world, handler_scope = World(variant), make_scope()
    provider = world.provider.with_options(tenant_id="globex")
    world.call("charge", REQUEST, handler_scope=handler_scope, provider=provider)
    assert world.upstream.attempts[0].tenant_id == "globex"
    result = world.call(
        "execute", provider=provider, operation="void", payload={"charge": "c", "tags": []}, tenant_id="initech"
    )
    assert result.tenant_id == "initech"


def test_options_are_added_to_those_of_the_object_and_change_only_the_new_one(variant):
    world = World(variant)
    provider = world.provider.with_options(tenant_id="acme", timeout=3).with_options(campaign_id="spring", timeout=2)
    world.call("charge", REQUEST, provider=provider)
    world.call("charge", REQUEST)
    first, second = world.upstream.attempts
    assert (first.tenant_id, first.campaign_id, second.tenant_id, second.campaign_id) == (
        "acme",
        "spring",
        "default",
        None,
    )
    assert (first.timeout <= 2, second.timeout > 3) == (True, True)


def test_a_context_that_the_caller_passes_replaces_the_options(variant):
    world = World(variant)
    provider = world.provider.with_options(correlation_id="c1", idempotency_key="k1", timeout=3)
    context = ProviderExecutionContext(idempotency_key="k2", timeout=2.0)
    payload = {"charge": "c", "tags": []}
    result = world.call("execute", provider=provider, operation="void", payload=payload, context=context)
    assert (result.idempotency_key, result.correlation_id) == ("k2", "c1")
    assert world.upstream.attempts[0].timeout <= 2


def test_a_body_sets_attributes_of_the_object_itself_also_with_options(variant):
    world = World(variant)
    provider = world.provider.with_options(tenant_id="acme").with_options(timeout=2)
    world.call("charge", REQUEST, provider=provider)
    assert world.provider.token == "new"
    assert isinstance(provider, type(world.provider))


# -- policy and errors ----------------------------------------------------------------------------


@pytest.mark.spec("PRV-03", "PRV-08")
def test_the_errors_of_a_body_are_mapped_and_retried(variant):
    world = World(variant, ConnectionResetError("gone"), ConnectionResetError("gone"), retries=2)
    assert world.call("charge", REQUEST) == PAID
    assert [attempt.number for attempt in world.upstream.attempts] == [1, 2, 3]
    exhausted = World(variant, *[ConnectionResetError("gone")] * 2, retries=1)
    error = exhausted.fail(ProviderConnectionError, "charge", REQUEST)
    assert (len(error.attempts), error.final, error.result.attempts) == (2, True, 2)


@pytest.mark.spec("PRV-05", "PRV-09")
def test_quota_and_breaker_apply_to_operations(variant):
    world = World(variant, calls_per_day=1)
    world.call("charge", REQUEST)
    world.fail(ProviderQuotaExceededError, "charge", REQUEST)
    broken = World(variant, ConnectionResetError("gone"), retries=0, breaker_threshold=1)
    broken.fail(ProviderConnectionError, "charge", REQUEST)
    broken.fail(ProviderCircuitOpenError, "charge", REQUEST)
    assert len(broken.upstream.requests) == 1


def test_a_call_without_time_left_is_not_made(variant):
    world = World(variant)
    error = world.fail(ProviderTimeoutError, "charge", REQUEST, provider=world.provider.with_options(timeout=0.0))
    assert (error.sent, world.upstream.requests) == (False, [])


@pytest.mark.parametrize(
    "kind, fault, text", [("data", True, "dict.*Field required"), ("text", False, "str.*"), ("object", False, ".*JSON")]
)
def test_a_result_of_another_type_is_invalid_and_not_retried(variant, kind, fault, text):
    world = World(variant)
    error = world.fail(ProviderResponseFormatError, "broken", kind)
    assert (error.fault, error.final, len(error.attempts)) == (fault, True, 1)
    assert re.match(f"the operation broken returned an invalid result: {text}", str(error))


def test_a_result_that_cannot_be_read_back_fails_at_the_first_call(variant):
    world = World(variant)
    error = world.fail(ProviderResponseFormatError, "hollow")
    assert (error.code, error.fault, len(error.attempts)) == ("response_invalid", False, 1)
    assert [row.reason_code for row in world.state.list_attempts()] == ["response_invalid"]


def test_a_stored_result_that_no_longer_matches_its_type_is_final(variant):
    world = World(variant)
    request = ({"order": "17", "amount": "12.50", "currency": "EUR"}, {"number": 7})
    stored = []

    class Earlier(type(world.provider)):
        """The earlier release returned another type."""

        def _execute_impl(self, **_):
            stored.append(request[1])
            if not self.is_async:
                return request[1]

            async def main():
                return request[1]

            return main()

    earlier = Earlier(world.upstream, state_store=world.state)
    keyed = {"context": ProviderExecutionContext(idempotency_key="k1")}
    world.call("execute", operation="charge", payload=request[0], provider=earlier, **keyed)
    error = world.fail(
        ProviderResponseFormatError, "charge", REQUEST, provider=world.provider.with_options(idempotency_key="k1")
    )
    assert (error.code, error.final, error.fault, stored) == ("result_invalid", True, False, [{"number": 7}])


@pytest.mark.parametrize(
    "method, arguments, text",
    [
        ("charge", ({"order": "17"},), "request: .*ChargeRequest"),
        ("charge", (ChargeRequest(17, Decimal(1)),), "request: it cannot be written as JSON"),
        ("cancel", ("ch_1", "tags"), "tags: Input should be a valid list"),
    ],
)
def test_an_argument_of_another_type_is_rejected_without_a_request(variant, method, arguments, text):
    world = World(variant)
    error = world.fail(ProviderBadRequestError, method, *arguments)
    assert (error.category, error.sent, error.code, world.upstream.requests) == (
        Category.BUSINESS,
        False,
        "payload_invalid",
        [],
    )
    assert re.search(text, str(error))


def test_arguments_that_do_not_fit_the_signature_are_a_type_error(variant):
    error = World(variant).fail(TypeError, "charge", REQUEST, tenant="acme")
    assert str(error) == f"{variant.capitalize()}Payments.charge(): got an unexpected keyword argument 'tenant'"


# -- calls inside a body --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, arguments, called",
    [("nested", (REQUEST,), "charge"), ("nested_generic", ("known",), "void"), ("recursive", ("a",), "recursive")],
)
def test_an_operation_that_calls_another_one_is_refused(variant, method, arguments, called):
    world = World(variant)
    error = world.fail(ProviderInternalError, method, *arguments)
    assert isinstance(error.__cause__, ConfigurationError)
    assert f"calls its operation '{called}'" in str(error.__cause__)
    assert (world.upstream.requests, len(world.state.list_attempts())) == ([], 1)


def test_an_unknown_operation_is_named_with_those_that_exist(variant):
    with pytest.raises(ConfigurationError, match=r"has no operation 'chrage': it has broken, charge, count"):
        World(variant).call("execute", operation="chrage", payload={})


def test_an_override_calls_the_body_that_it_overrides_within_one_attempt(variant):
    world = World(variant, kind="Override")
    assert world.call("charge", REQUEST).id == "own-ch_1"
    assert len(world.state.list_attempts()) == 1


def test_the_attempt_is_readable_only_in_a_body(variant):
    world = World(variant)
    with pytest.raises(ConfigurationError, match=r"attempt is read outside of an operation"):
        _ = world.provider.attempt
    world.call("charge", REQUEST)
    with pytest.raises(ConfigurationError, match=r"attempt is read outside"):
        _ = world.provider.attempt


class ThreadsShop(Provider):
    provider_name = "shop"
    capability = "orders"

    def __init__(self, payments: Any, **options: Any) -> None:
        super().__init__(**options)
        self.payments = payments

    @operation
    def order(self, request: ChargeRequest) -> str:
        before = self.attempt
        self.payments.charge(request)
        return f"{before is self.attempt} {self.attempt.operation}"


class AsyncioShop(Provider):
    provider_name = "shop"
    capability = "orders"

    def __init__(self, payments: Any, **options: Any) -> None:
        super().__init__(**options)
        self.payments = payments

    @operation
    async def order(self, request: ChargeRequest) -> str:
        before = self.attempt
        await self.payments.charge(request)
        return f"{before is self.attempt} {self.attempt.operation}"


def test_a_body_may_call_another_provider(variant):
    world = World(variant)
    shop = globals()[variant.capitalize() + "Shop"](world.provider, state_store=world.state)
    assert world.call("order", REQUEST, provider=shop) == "True order"
    assert [row.provider_name for row in world.state.list_attempts()] == ["payments", "shop"]


def test_a_call_back_into_a_provider_through_another_one_is_refused():
    class Mirror(Provider):
        provider_name = "mirror"
        capability = "orders"

        @operation
        def charge(self, request: ChargeRequest) -> str:
            return shop.order(request)

    state = MemoryProviderState()
    shop = ThreadsShop(Mirror(state_store=state), state_store=state)
    with pytest.raises(ProviderInternalError) as caught:
        shop.order(REQUEST)
    assert isinstance(caught.value.__cause__, ConfigurationError)
    assert [row.provider_name for row in state.list_attempts()] == ["mirror", "shop"]


def test_a_task_that_a_body_leaves_behind_is_no_longer_part_of_its_attempt():
    world = World("asyncio")
    results = []

    class Starter(AsyncioPayments):
        @operation
        async def start(self, request: ChargeRequest) -> None:
            release = asyncio.Event()

            async def later():
                await release.wait()
                results.append(await self.charge(request))

            self.later, self.release = asyncio.create_task(later()), release

    starter = Starter(world.upstream, state_store=world.state)

    async def main():
        await starter.start(REQUEST)
        starter.release.set()
        await starter.later

    asyncio.run(main())
    assert results == [PAID]


def test_calls_of_several_threads_have_separate_attempts():
    world = World("threads")
    barrier = threading.Barrier(4, timeout=30)
    tenants = []

    class Waiting(ThreadsPayments):
        @operation
        def wait(self, number: int) -> int:
            barrier.wait()
            tenants.append((number, self.attempt.tenant_id))
            return number

    provider = Waiting(world.upstream, state_store=world.state)
    threads = [
        threading.Thread(target=provider.with_options(tenant_id=f"t{number}").wait, args=(number,))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(tenants) == [(number, f"t{number}") for number in range(4)]
