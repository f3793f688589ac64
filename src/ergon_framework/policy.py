"""What every policy is: a frozen tree of numbers that refuses what it does not know."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ergon_framework.errors import ConfigurationError

Seconds: TypeAlias = Annotated[float, Field(ge=0)]
Count: TypeAlias = Annotated[int, Field(ge=1)]


class Policy(BaseModel):
    """What all policies share: frozen, defaults checked, ``"3"`` is no number, unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        strict=True,
        allow_inf_nan=False,
        # What was passed may hold secrets; a message must not repeat it.
        hide_input_in_errors=True,
    )

    @classmethod
    def load(cls, settings: Mapping[str, Any]) -> Self:
        """The policy that *settings*, plain mappings all the way down, describe.

        A part that names only some keys keeps the rest of that place's defaults, as a part that is passed as an
        object with only some fields set does.
        """
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise ConfigurationError(_explained(cls, error)) from error

    @model_validator(mode="before")
    @classmethod
    def _known_and_completed(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        unknown = [_unknown(key, cls) for key in given if key not in cls.model_fields]
        if unknown:
            raise ValueError("; ".join(unknown))
        return {key: cls._completed(key, value) for key, value in given.items()}

    @classmethod
    def _completed(cls, key: str, value: Any) -> Any:
        # Without this, raising max_attempts of the fetch step would silently change its timeout from
        # the fetch step's to the general one. A subclass brings defaults of its own.
        default = cls.model_fields[key].default
        if not isinstance(default, Policy):
            return value
        own = {name: getattr(default, name) for name in default.model_fields_set}
        if isinstance(value, Mapping):
            return own | dict(value)
        if type(value) is type(default) and own.keys() - value.model_fields_set:
            return value.model_copy(update={name: own[name] for name in own.keys() - value.model_fields_set})
        return value


def _unknown(key: object, policy: type[Policy]) -> str:
    near = get_close_matches(str(key), policy.model_fields, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(policy.model_fields)}"
    return f"unknown key {key!r} in {policy.__name__}; {hint}"


def _explained(policy: type[Policy], error: ValidationError) -> str:
    faults = []
    for fault in error.errors(include_url=False):
        place = ".".join(str(part) for part in fault["loc"]) or policy.__name__
        value = fault["input"]
        # Text and mappings are not repeated: they may hold secrets.
        shown = f", not {value!r:.40}" if isinstance(value, int | float | None) else ""
        faults.append(f"{place}: {fault['msg'].removeprefix('Value error, ')}{shown}")
    return f"{policy.__name__} cannot be loaded: " + "; ".join(faults)
