"""Functions that create ids, stable ones and others; a fresh process imports them from here, and little else."""

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


def make_stable_id(kind, number, note=""):
    print("made", kind, number)
    return f"{kind}:{number}"


def make_id_of_moment(kind, number, at):
    if not isinstance(at, date):
        raise TypeError(at)
    return f"{kind}:{number}:{at.isoformat()}"


def make_random_id(kind, number):
    return str(uuid.uuid4())


def make_counter_id(kind, number):
    return f"{kind}-{next(_counter)}"


def make_hash_id(kind, number):
    return str(hash((kind, number)))


def make_process_id(kind, number):
    return f"{kind}-{os.getpid()}"


def make_seeded_id(kind, number):
    return str(random.Random(f"{kind}{number}").random())


def make_year_id(kind, number):
    return f"{number}-{time.gmtime().tm_year}"


def make_utc_day_id(kind, number):
    return f"{number}-{datetime.now(UTC).date()}"


def make_local_day_id(kind, number):
    return f"{number}-{date.today()}"  # noqa: DTZ011 - that is what is wrong with it


def make_hour_id(kind, number):
    return f"{number}-{int(bare_time() // 3600)}"


def make_formatted_year_id(kind, number):
    return f"{number}-{time.strftime('%Y')}"


def make_uptime_id(kind, number):
    return f"{number}-{int(time.monotonic() // 3_600)}"


def make_id_of_all_arguments(kind, number, note=""):
    return hashlib.sha256(json.dumps([kind, number, note]).encode()).hexdigest()


def fail_in_fresh_process(kind, number):
    if sys.argv[0].endswith("determinism_probe.py"):
        raise RuntimeError("not here")
    return "id"
