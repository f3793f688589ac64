#!/usr/bin/env bash
# new_project.sh WHEEL: what `ergon new` writes, from a wheel and an empty database (ERGON_POSTGRES__DSN): linted,
# tested, and one order charged. lend.py gives it a database: python tests/docs/with_servers.py bash tests/docs/new_project.sh WHEEL
set -euo pipefail

wheel=$(realpath "${1:?usage: new_project.sh WHEEL}")
: "${ERGON_POSTGRES__DSN:?names no database; run it with tests/docs/with_servers.py}"
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
source "$root/tests/docs/checking.sh"
install() {
    "$folder/env/bin/pip" install --quiet --disable-pip-version-check --constraint "$folder/constraints.txt" "$@"
}

"${PYTHON:-python3}" -m venv "$folder/env"
export PATH="$folder/env/bin:$PATH"
unset PYTHONPATH
cd "$folder"

check "the wheel installs with its command" install "ergon-framework[cli] @ file://$wheel"
for broker in postgres rabbitmq nats redis; do
    check "a project for $broker is written" ergon new "shop_$broker" --broker "$broker"
done
check "a second one of the same name is refused" bash -c '! ergon new shop_postgres'

cd shop_postgres
# Its own package and tools; what it needs of ours is the wheel that was just built.
check "the project installs, with its tools" install --find-links "$(dirname "$wheel")" \
    "ergon-framework[cli,postgres,prometheus,testing] @ file://$wheel" --editable '.[dev]'
check "it is linted" ruff check .
check "it is formatted" ruff format --check .
check "it is tested" pytest

export ERGON_QUEUES__SHOP_POSTGRES_ORDERS__URL=$ERGON_POSTGRES__DSN
# ran SUCCEEDED FAILED: a worker empties the queue with these counts.
ran() { ergon run shop_postgres.tasks:charge --policy policy.toml --once --json | tail -n 1 | python -c "
import json, sys
counts = json.load(sys.stdin)['counts']
assert [counts['succeeded'], counts['failed']] == [int(word) for word in sys.argv[1:]], counts
" "$1" "$2"; }

check "the tables are made" ergon db upgrade
check "an order is sent" python -m shop_postgres.send 1 2000
check "and one without a price" python -m shop_postgres.send 2 0
check "the worker charges one and puts the other aside" ran 1 1
check "the dead letter is listed with its reason" \
    bash -c 'ergon dlq list shop_postgres_orders | grep -E "order-2 +no_price"'
check "nothing is left to do" ran 0 0

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
