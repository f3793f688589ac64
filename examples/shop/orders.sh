# Starts the shop's web application, places three orders, one of them twice, and stops it.
python -m uvicorn web:app --port "${PORT:-8000}" --log-level warning & web=$!
trap 'kill $web' EXIT
place() {
    curl --silent --retry 30 --retry-connrefused --write-out '\n' \
        --json "{\"id\": \"$1\", \"cents\": $2, \"currency\": \"$3\"}" "http://127.0.0.1:${PORT:-8000}/orders"
}
place 1 1000 EUR
place 2 2500 EUR
place 3 9900 SEK
place 3 9900 SEK
