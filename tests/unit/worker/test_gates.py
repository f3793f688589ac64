"""Gates: the first that objects is heard, and one that breaks objects."""

from __future__ import annotations

import pytest

from ergon_framework.gates import Pause, first_pause


@pytest.mark.spec("CON-47")
def test_the_first_pause_is_returned() -> None:
    first, second = Pause("breaker open", 2.0), Pause("disk full")
    assert first_pause(()) is None
    assert first_pause((lambda: None, lambda: first, lambda: second)) is first
    assert second.seconds == 1.0


@pytest.mark.spec("CON-47")
def test_a_gate_that_raises_pauses_the_loop_with_its_error() -> None:
    def raise_error() -> Pause | None:
        raise OSError("no such file")

    pause = first_pause((raise_error, lambda: None))
    assert pause is not None
    assert pause.reason == "gate raised OSError: no such file: loop is paused"


@pytest.mark.spec("CON-47")
@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_a_pause_needs_a_positive_finite_duration(seconds: float) -> None:
    with pytest.raises(ValueError, match="finite number of seconds > 0"):
        Pause("because", seconds)


@pytest.mark.spec("CON-47")
def test_a_gate_with_an_invalid_return_type_or_system_exit_pauses_the_loop() -> None:
    def raise_system_exit() -> Pause | None:
        raise SystemExit(3)

    for gate, reason in (
        (lambda: True, "gate returned a bool, not a Pause"),
        (raise_system_exit, "gate raised SystemExit: 3: loop is paused"),
    ):
        pause = first_pause((gate,))  # type: ignore[arg-type]
        assert pause is not None
        assert pause.reason == reason
