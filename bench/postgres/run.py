"""PostgreSQL: rates, stability and idle cost; every target in one run on a private server.

python bench/postgres/run.py            all parts, one line of JSON at the end, exit 1 where a target is missed
python bench/postgres/run.py --quick    to see that it runs, not for figures
python bench/postgres/run.py --part writers
"""

from __future__ import annotations

import argparse
import json

from ground import run_part, say, server


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="little work, figures that mean nothing")
    parser.add_argument("--part", choices=("rate", "backlog", "writers", "idle"), help="only this one")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the old snapshot stays open")
    options = parser.parse_args()
    quick = options.quick
    part_arguments = {
        "rate": (2_000, 1) if quick else (20_000, 5),
        "writers": (1,) if quick else (5,),
        "idle": (5, 500) if quick else (100, 5_000),
        "backlog": (20_000, 0.1) if quick else (1_000_000, options.minutes),
    }
    results = {}
    for name, arguments in part_arguments.items():
        if options.part in (None, name):
            with server() as (_, dsn):
                results[name] = run_part(name, dsn, *arguments)
            say(f"{name}: {json.dumps(results[name], indent=2)}")
    ok = all(result["ok"] for result in results.values())
    print(json.dumps({"parts": results, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
