"""The base of every policy: a frozen tree of settings that rejects unknown keys."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Final, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ergon_framework.errors import ConfigurationError

Seconds: TypeAlias = Annotated[float, Field(ge=0)]
Count: TypeAlias = Annotated[int, Field(ge=1)]

#: The new key of each renamed one, by the name of the class that had it. An old key is rejected with its new name.
RENAMED_KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "RetryPolicy": {"hold": "max_inline_delay", "abandon_grace": "exit_grace"},
    "ConsumerLoopPolicy": {"identity_delay": "duplicate_delay"},
    "SettlePolicy": {"group": "batch_size", "pending": "max_pending"},
    "JournalSettings": {"on": "enabled", "room": "max_buffered"},
    "ProbeSettings": {"silent": "heartbeat_timeout", "blocked": "event_loop_timeout"},
    "RestartSettings": {"steady": "stable_after"},
}


class Policy(BaseModel):
    """The base of all policies: frozen, validates defaults, rejects unknown keys and ``"3"`` as a number."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        strict=True,
        allow_inf_nan=False,
        # The input may hold secrets; error messages must not repeat it.
        hide_input_in_errors=True,
    )

    @classmethod
    def load(cls, settings: Mapping[str, Any]) -> Self:
        """Load the policy that *settings*, nested plain mappings, describe.

        A section that names only some keys keeps the defaults of its place for the others, as does a section that is
        passed as an object with only some fields set: if settings name only max_attempts of the fetch step, its timeout
        stays the default of a fetch step, and does not become that of all steps.
        """
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise ConfigurationError(_explain_errors(cls, error)) from error

    @model_validator(mode="before")
    @classmethod
    def _check_and_complete(cls, values: Any) -> Any:
        """Reject unknown keys, and complete each section with the defaults of its place."""
        if not isinstance(values, Mapping):
            return values
        unknown = [_describe_unknown_key(key, cls) for key in values if key not in cls.model_fields]
        if unknown:
            raise ValueError("; ".join(unknown))
        return {key: cls._complete_section(key, value) for key, value in values.items()}

    @classmethod
    def _complete_section(cls, key: str, value: Any) -> Any:
        # The fields that are set in the default of this place are its own defaults. A value of another class, such as a
        # subclass, has defaults too, and is not completed.
        default = cls.model_fields[key].default
        if not isinstance(default, Policy):
            return value
        own_defaults = {name: getattr(default, name) for name in default.model_fields_set}
        if isinstance(value, Mapping):
            return own_defaults | dict(value)
        if type(value) is type(default) and own_defaults.keys() - value.model_fields_set:
            return value.model_copy(
                update={name: own_defaults[name] for name in own_defaults.keys() - value.model_fields_set}
            )
        return value


def find_renamed_key(key: object, policy: type[Policy]) -> str | None:
    """Return the new name of *key* in *policy* or a class derived from it; None if it was not renamed there."""
    for kind in policy.__mro__:
        new = RENAMED_KEYS.get(kind.__name__, {}).get(str(key))
        # Classes elsewhere may have the same name.
        if new in policy.model_fields:
            return new
    return None


def _describe_unknown_key(key: object, policy: type[Policy]) -> str:
    new = find_renamed_key(key, policy)
    if new is not None:
        return f"unknown key {key!r} in {policy.__name__}: it is called {new!r}"
    close_matches = get_close_matches(str(key), policy.model_fields, n=1)
    hint = f"did you mean {close_matches[0]!r}?" if close_matches else f"valid keys: {', '.join(policy.model_fields)}"
    return f"unknown key {key!r} in {policy.__name__}; {hint}"


def _explain_errors(policy: type[Policy], error: ValidationError) -> str:
    faults = []
    for fault in error.errors(include_url=False):
        location = ".".join(str(part) for part in fault["loc"]) or policy.__name__
        value = fault["input"]
        # Texts and mappings may hold secrets, so the message does not repeat them.
        value_text = f", not {value!r:.40}" if isinstance(value, int | float | None) else ""
        faults.append(f"{location}: {fault['msg'].removeprefix('Value error, ')}{value_text}")
    return f"{policy.__name__} cannot be loaded: " + "; ".join(faults)
