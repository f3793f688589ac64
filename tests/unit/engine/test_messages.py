"""The engine's messages contain no payloads when they are printed."""

from __future__ import annotations

from ergon_framework.engine.effects import Call, Err, Expired, Interrupted, Ok


def test_repr_of_results_shows_types_and_errors_but_no_values() -> None:
    call = Call("process", int, ())
    assert [repr(result) for result in (Ok({"card": "4111"}), Err(ValueError("no")), Expired(call), Interrupted())] == [
        "Ok(dict)",
        "Err(ValueError('no'))",
        "Expired(Call(process))",
        "Interrupted(None)",
    ]
