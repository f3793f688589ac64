"""Functions that make ids, sound ones and others; a fresh process imports them from here, and little else."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import sys
import time
import uuid
from datetime import UTC, date, datetime
from time import time as bare_time

_counter = itertools.count()


def sound(kind, number, note=""):
    print("made", kind, number)
    return f"{kind}:{number}"


def by_moment(kind, number, at):
    if not isinstance(at, date):
        raise TypeError(at)
    return f"{kind}:{number}:{at.isoformat()}"


def drawn(kind, number):
    return str(uuid.uuid4())


def counted(kind, number):
    return f"{kind}-{next(_counter)}"


def hashed(kind, number):
    return str(hash((kind, number)))


def by_process(kind, number):
    return f"{kind}-{os.getpid()}"


def seeded(kind, number):
    return str(random.Random(f"{kind}{number}").random())


def by_year(kind, number):
    return f"{number}-{time.gmtime().tm_year}"


def by_day(kind, number):
    return f"{number}-{datetime.now(UTC).date()}"


def by_today(kind, number):
    return f"{number}-{date.today()}"  # noqa: DTZ011 - that is what is wrong with it


def by_hour(kind, number):
    return f"{number}-{int(bare_time() // 3600)}"


def by_format(kind, number):
    return f"{number}-{time.strftime('%Y')}"


def by_uptime(kind, number):
    return f"{number}-{int(time.monotonic() // 3_600)}"


def of_everything(kind, number, note=""):
    return hashlib.sha256(json.dumps([kind, number, note]).encode()).hexdigest()


def failing(kind, number):
    if sys.argv[0].endswith("fresh.py"):
        raise RuntimeError("not here")
    return "id"
