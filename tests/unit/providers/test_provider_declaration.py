"""The declaration of typed operations: what a class may contain, and the error of each mistake."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel, SecretStr

from ergon_framework.engine.inline import AsyncInlineRunner
from ergon_framework.errors import ConfigurationError
from ergon_framework.providers import AsyncProviderBase, MemoryProviderState, Provider, ProviderBase, operation
from ergon_framework.providers.operations import Operation
from ergon_framework.providers.state import AsyncProviderState, ProviderState

if TYPE_CHECKING:
    from decimal import Decimal as HiddenDecimal


@dataclass
class Request:
    amount: int


class Login(BaseModel):
    token: SecretStr


class Connection:
    """A type without a JSON form."""


class Payments(Provider):
    provider_name = "payments"
    capability = "charging"

    @operation
    def charge(self, request: Request) -> int:
        """Charge a card."""
        return request.amount

    @operation(reads=True)
    def status(self, number: int) -> int:
        return number


class AsyncPayments(Provider):
    provider_name = "payments"
    capability = "charging"

    @operation
    async def charge(self, request: Request) -> int:
        return request.amount


class Ordinary(ProviderBase):
    provider_name = "payments"
    capability = "charging"

    def _execute_impl(self, **fields: Any) -> dict[str, Any]:
        return {"tenant": fields["tenant_id"], "campaign": fields["campaign_id"], "payload": fields["payload"]}


def test_a_class_has_the_operations_of_its_own_and_its_bases():
    class Refunding(Payments):
        @operation
        def refund(self, request: Request) -> None: ...

        @operation
        def status(self, number: int) -> int:
            return -number

    assert sorted(Refunding.operations) == ["charge", "refund", "status"]
    assert sorted(Payments.operations) == ["charge", "status"]
    assert (Payments.reads, Refunding.reads) == ({"status"}, frozenset())
    assert (Payments.is_async, Refunding.is_async, AsyncPayments.is_async) == (False, False, True)


def test_a_class_with_two_bases_has_the_operations_of_both():
    class Mailing(Provider):
        @operation
        def mail(self, text: str) -> None: ...

    class Both(Payments, Mailing): ...

    assert sorted(Both.operations) == ["charge", "mail", "status"]


def test_an_operation_keeps_its_name_docstring_and_signature():
    assert (Payments.charge.__name__, Payments.charge.__doc__) == ("charge", "Charge a card.")
    assert repr(Payments.operations["charge"]) == "<operation 'charge': Payments.charge>"
    assert isinstance(Payments.operations["charge"], Operation)


def test_def_and_async_def_cannot_be_mixed():
    with pytest.raises(
        ConfigurationError, match=r"Mixed mixes operations with def \(charge, status\) and with async"
    ) as e:

        class Mixed(Payments):
            @operation
            async def refund(self, request: Request) -> None: ...

    assert str(e.value).endswith("write all of them in one way, or make two classes with one provider_name")


@pytest.mark.parametrize("base", [ProviderBase, AsyncProviderBase])
def test_a_class_that_implements_attempts_has_no_operations(base):
    with pytest.raises(ConfigurationError, match=r"derive a class with operations from Provider"):

        class Mixed(base):
            @operation
            def charge(self, request: Request) -> None: ...


def test_an_operation_does_not_replace_a_part_of_provider():
    with pytest.raises(ConfigurationError, match=r"Payments2.execute replaces a part of Provider: .*name='execute'"):

        class Payments2(Provider):
            @operation
            def execute(self, request: Request) -> None: ...


@pytest.mark.parametrize("name", ["provider_name", "capability"])
def test_a_provider_without_its_names_is_refused(name):
    kind = type("Nameless", (Payments,), {name: ""})
    with pytest.raises(ConfigurationError, match=f"Nameless has no {name}"):
        kind()


def test_a_provider_without_operations_is_refused():
    class Empty(Provider):
        provider_name = "empty"
        capability = "none"

    with pytest.raises(ConfigurationError, match=r"Empty has no operations: decorate a method with @operation, or"):
        Empty()


def test_the_body_must_be_a_function_that_returns_its_result():
    def generate(self: Any) -> Any:
        yield 1

    async def generate_async(self: Any) -> Any:
        yield 1

    for body in (generate, generate_async, property(generate), Request):
        with pytest.raises(ConfigurationError, match=r"@operation cannot decorate .*must be a function"):
            operation(body)


@pytest.mark.parametrize(
    "body, text",
    [
        ("def charge(self, request) -> int: ...", "the parameter 'request' of the operation charge has no annotation"),
        ("def charge(self, request: int): ...", "the operation charge has no return annotation"),
        ("def charge(self, *items: int) -> int: ...", "the operation charge takes any number of 'items'"),
        ("def charge(self, **items: int) -> int: ...", "the operation charge takes any number of 'items'"),
    ],
)
def test_a_signature_without_types_is_refused(body, text):
    namespace: dict[str, Any] = {}
    exec(body, namespace)
    with pytest.raises(ConfigurationError, match=text):
        operation(namespace["charge"])


def make_provider(body: Any) -> Provider:
    namespace = {"provider_name": "payments", "capability": "charging", "charge": operation(body)}
    return type("Made", (Provider,), namespace)()


def test_a_type_without_a_json_form_is_refused_when_the_provider_is_made():
    def charge(self: Any, connection: Connection) -> None: ...

    with pytest.raises(ConfigurationError, match=r"connection of .*charge has no JSON form: .*dataclass"):
        make_provider(charge)


def test_a_result_that_is_masked_in_json_is_refused_when_the_provider_is_made():
    def login(self: Any, name: str) -> Login: ...

    with pytest.raises(ConfigurationError, match=r"the return value of .*login has a secret field"):
        make_provider(login)


def test_a_type_that_exists_only_for_the_type_checker_is_refused():
    def charge(self: Any, amount: HiddenDecimal) -> None: ...

    with pytest.raises(ConfigurationError, match=r"charge cannot be resolved: .*HiddenDecimal.*at module level"):
        make_provider(charge)


class OnlyThreads(ProviderState):
    blocked_until = record = admit = complete = None


class OnlyAsyncio(AsyncProviderState):
    blocked_until = record = admit_async = complete_async = None


def test_a_state_store_of_the_other_variant_is_refused():
    with pytest.raises(ConfigurationError, match=r"Payments cannot use the state store OnlyAsyncio: .* ProviderState"):
        Payments(state_store=OnlyAsyncio())
    with pytest.raises(
        ConfigurationError, match=r"AsyncPayments cannot use the state store OnlyThreads: .* AsyncProviderState"
    ):
        AsyncPayments(state_store=OnlyThreads())
    Payments(state_store=OnlyThreads())
    AsyncPayments(state_store=OnlyAsyncio())


def test_a_runner_that_is_passed_is_used():
    runner = AsyncInlineRunner()
    assert AsyncPayments(runner=runner)._get_runner() is runner


def test_the_generic_classes_need_neither_tenant_nor_campaign_nor_context():
    provider = Ordinary(state_store=MemoryProviderState())
    result = provider.execute(operation="charge", payload={"amount": 1})
    assert result.value == {"tenant": "default", "campaign": None, "payload": {"amount": 1}}
    assert provider.with_options(tenant_id="acme", campaign_id="spring").call("charge") == {
        "tenant": "acme",
        "campaign": "spring",
        "payload": {},
    }
