"""Gates: the first that objects is heard, and one that breaks objects."""

from __future__ import annotations

import pytest

from ergon_framework.task.gates import Pause, ask


@pytest.mark.spec("CON-47")
def test_the_first_pause_is_the_answer() -> None:
    first, second = Pause("breaker open", 2.0), Pause("disk full")
    assert ask(()) is None
    assert ask((lambda: None, lambda: first, lambda: second)) is first
    assert second.seconds == 1.0


@pytest.mark.spec("CON-47")
def test_a_gate_that_breaks_holds_the_loop_and_says_so() -> None:
    def broken() -> Pause | None:
        raise OSError("no such file")

    pause = ask((broken, lambda: None))
    assert pause is not None
    assert pause.because == "a gate failed: OSError: no such file"


@pytest.mark.spec("CON-47")
@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_a_pause_has_a_length(seconds: float) -> None:
    with pytest.raises(ValueError, match="finite number of seconds > 0"):
        Pause("because", seconds)


@pytest.mark.spec("CON-47")
def test_a_gate_that_answers_something_else_or_asks_to_leave_holds_the_loop() -> None:
    def leaves() -> Pause | None:
        raise SystemExit(3)

    for gate, because in ((lambda: True, "a gate answered with a bool"), (leaves, "a gate failed: SystemExit: 3")):
        pause = ask((gate,))  # type: ignore[arg-type]
        assert pause is not None
        assert pause.because == because
