"""Clock and random source, passed as a parameter to code that decides."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

#: Block the calling thread for a number of seconds.
block: Final = time.sleep


@dataclass(frozen=True, slots=True)
class Clock:
    """A monotonic clock, a wall clock, and a random source that returns numbers in [0, 1)."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    random: Callable[[], float] = random.random
