"""Time and chance, handed to those who decide."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

#: Block the calling thread for so many seconds.
block: Final = time.sleep


@dataclass(frozen=True, slots=True)
class Senses:
    """A monotonic clock, a clock of the day, and dice that give numbers from 0 up to 1."""

    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    dice: Callable[[], float] = random.random
