"""Payloads: a transaction's payload, read as the type that its task declares."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from ergon_framework.errors import Category, ConfigurationError, explain_fault
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException


class PayloadReader:
    """Reads payloads as the declared type of a task."""

    def __init__(self, model: Any = None) -> None:
        self._adapter: TypeAdapter[Any] | None = None if model is None else TypeAdapter(model)

    @classmethod
    def for_annotation(cls, model: Any, *, owner: str) -> PayloadReader:
        """Return a reader for *model*; ConfigurationError if no payload can be read as that type."""
        try:
            return cls(model)
        except PydanticUserError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise ConfigurationError(
                f"the payload type of {owner} cannot be read from a message: {reason}; annotate the payload with a "
                "dataclass, a pydantic model, a TypedDict or a plain type, or pass payload="
            ) from error

    def read(self, transaction: Transaction) -> Any:
        """Return the typed payload; one that does not fit is a final BUSINESS failure: no attempt can succeed."""
        if self._adapter is None:
            return transaction.payload
        try:
            return self._adapter.validate_python(transaction.payload)
        except ValidationError as error:
            # Locations and rules, not values: messages end up in logs.
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc'])) or 'payload'}: {explain_fault(fault)}"
                for fault in error.errors(include_url=False, include_input=False)
            )
            raise TransactionException(
                f"payload is invalid: {faults}", Category.BUSINESS, final=True, code="invalid_payload"
            ) from None

    def is_valid(self, transaction: Transaction) -> bool:
        """Return whether the payload can be read."""
        try:
            self.read(transaction)
        except TransactionException:
            return False
        return True
