#!/usr/bin/env bash
# new_team.sh WHEEL: the path of a new team, from a wheel and an empty database (ERGON_POSTGRES__DSN) to a replay.
# lend.py gives it a database: python tests/docs/with_servers.py bash tests/docs/new_team.sh WHEEL
set -euo pipefail

wheel=$(realpath "${1:?usage: new_team.sh WHEEL}")
: "${ERGON_POSTGRES__DSN:?names no database; run it with tests/docs/with_servers.py}"
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d)
web=
trap 'if [ -n "$web" ]; then kill "$web" 2>/dev/null || true; fi; rm -rf "$folder"' EXIT
source "$root/tests/docs/checking.sh"

"${PYTHON:-python3}" -m venv "$folder/env"
check "the wheel installs with its extras, beside a web framework" \
    "$folder/env/bin/pip" install --quiet --disable-pip-version-check --constraint "$folder/constraints.txt" \
    "ergon-framework[cli,postgres] @ file://$wheel" fastapi uvicorn

cp -r "$root/examples/purchases" "$folder/shop"
cd "$folder/shop"
export PATH="$folder/env/bin:$PATH"
unset PYTHONPATH

free_port() { python -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])"; }
port=$(free_port)
# is WHAT SQL: the query gives exactly that.
is() { [ "$(psql -qAtX "$ERGON_POSTGRES__DSN" -c "$2")" = "$1" ] || { psql -X "$ERGON_POSTGRES__DSN" -c "$2"; false; }; }
exits() { local code=0; "${@:2}" || code=$?; [ "$code" -eq "$1" ]; }
# order WANTED ID CENTS CURRENCY: the answer has that status.
order() {
    [ "$(curl -sS -o "$folder/answer" -w '%{http_code}' "http://127.0.0.1:$port/orders" \
        --json "{\"id\": \"$2\", \"cents\": $3, \"currency\": \"$4\"}")" = "$1" ] || { cat "$folder/answer"; false; }
}
answers() { curl -sS --retry 60 --retry-delay 1 --retry-all-errors -o /dev/null "http://127.0.0.1:$port/openapi.json"; }
# ran SUCCEEDED FAILED: a worker empties the queue with these counts.
ran() { ergon run shop:charge --once --json | tail -n 1 | tee "$folder/report" | python -c "
import json, sys
counts = json.load(sys.stdin)['counts']
assert [counts['succeeded'], counts['failed']] == [int(word) for word in sys.argv[1:]], counts
" "$1" "$2"; }
# queued COUNT: so many are in the queue.
queued() { python -c "
import sys
from shop import charges
depth = charges.depth()
print(depth)
sys.exit(depth.ready + depth.delayed + depth.in_flight != int(sys.argv[1]))
" "$1"; }

check "an empty database needs an upgrade" exits 1 ergon db check
check "a worker reports the missing upgrade" \
    bash -c 'ergon run shop:charge --once 2>&1 | grep -F "run: ergon db upgrade"'
check "the database is upgraded by its owner" ergon db upgrade
check "then it is up to date" ergon db check
check "the shop's own tables are made" psql -qX --set ON_ERROR_STOP=1 "$ERGON_POSTGRES__DSN" -f tables.sql

python -m uvicorn --port "$port" web:app >"$folder/web.log" 2>&1 &
web=$!
check "the web application answers" answers
check "an order is taken" order 202 1 1000 EUR
check "another one" order 202 2 2500 EUR
check "one in a currency without a rate" order 202 3 9900 SEK
check "the same order again is refused" order 409 1 1000 EUR
check "and has put nothing into the queue" queued 3

check "the worker charges two and fails with one" ran 2 1
check "the queue is empty" queued 0
check "the dead letter is listed with its reason" bash -c 'ergon dlq list shop:charges | grep -E "charge-3 +no_rate"'
check "and explained" bash -c 'ergon dlq show shop:charges charge-3 | grep -F "there is no rate for SEK"'
check "the cause is mended" psql -qX "$ERGON_POSTGRES__DSN" -c "insert into rate values ('SEK', 0.09)"
check "the dead letter is replayed" bash -c 'ergon dlq replay shop:charges --dead-letter-reason no_rate --json | grep -F "\"replayed\": 1"'
check "the worker charges it" ran 1 0
check "every order was charged, once" is "1|1000 2|2500 3|891" \
    "select string_agg(id || '|' || euro_cents, ' ' order by id) from purchase"
check "no dead letter is left" is 0 "select count(*) from ergon.dead_letter"
check "each is remembered as done" is "charge-1 charge-2 charge-3" \
    "select string_agg(transaction_id, ' ' order by transaction_id) from ergon.inbox"
check "the web application is still there" kill -0 "$web"
check "all of it took less than ten minutes" [ "$SECONDS" -lt 600 ]

[ "$failed" -eq 0 ] || sed 's/^/web: /' "$folder/web.log"
echo "$passed passed, $failed failed, in $SECONDS s"
[ "$failed" -eq 0 ]
