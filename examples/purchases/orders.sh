# Starts the shop's web application, places three orders, one of them twice, and stops it.
python -m uvicorn web:app --port "${PORT:-8000}" --log-level warning & web=$!
trap 'kill $web 2>/dev/null' EXIT
until curl --silent --output /dev/null "http://127.0.0.1:${PORT:-8000}/"; do
    kill -0 $web 2>/dev/null || { echo "the application did not start; it says why above" >&2; exit 1; }
    sleep 0.2
done
place() {
    curl --silent --write-out '\n' \
        --json "{\"id\": \"$1\", \"cents\": $2, \"currency\": \"$3\"}" "http://127.0.0.1:${PORT:-8000}/orders"
}
place 1 1000 EUR
place 2 2500 EUR
place 3 9900 SEK
place 3 9900 SEK
