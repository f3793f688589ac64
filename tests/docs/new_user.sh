#!/usr/bin/env bash
# new_user.sh WHEEL: README's first five minutes, from a wheel, in an environment that has nothing else.
set -euo pipefail

wheel=$(realpath "${1:?usage: new_user.sh WHEEL}")
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
source "$root/tests/docs/checking.sh"

"${PYTHON:-python3}" -m venv "$folder/env"
check "the wheel installs with its extra" \
    "$folder/env/bin/pip" install --quiet --disable-pip-version-check \
    --constraint "$folder/constraints.txt" "ergon-framework[cli] @ file://$wheel"

mkdir "$folder/first"
cd "$folder/first"
# README's own files, so that what is checked is what a reader types.
"$folder/env/bin/python" - "$root/README.md" <<'END'
import pathlib, re, sys

text = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")
for title, body in re.findall(r'^```python title="([^"]+)"\n(.*?)^```', text, re.MULTILINE | re.DOTALL):
    pathlib.Path(title).write_text(body, encoding="utf-8")
END

export PATH="$folder/env/bin:$PATH"
unset PYTHONPATH
run() { ergon run app:charge >output 2>&1; }
report() { ergon run app:charge --json | tail -n 1 | python -c "
import json, sys
report = json.load(sys.stdin)
assert report['counts']['succeeded'] == 2 and report['counts']['failed'] == 1, report
assert report['failures'][0]['code'] == 'declined', report
"; }

check "the command is there" ergon --version
check "the help has an example" bash -c 'ergon run --help | grep -F "ergon run app:charge"'
check "the task runs and ends well" run
check "an order was charged" grep -Fx "charged 30" output
check "the transient error was retried" grep -Fx "charged 10" output
check "the permanent error was not retried" bash -c '[ "$(grep -c "transaction_id=order-2" output)" = 1 ]'
check "the summary names what failed" grep -F "BUSINESS: card declined (1 attempt)" output
check "the report is there as JSON" report

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
