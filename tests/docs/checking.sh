# Sourced by the scripts that follow a document from a wheel; they have set $root, the checkout, and $folder, their own.
passed=0
failed=0

# check NAME COMMAND...: the command must succeed; what it printed is shown if it does not.
check() {
    local name=$1
    shift
    if "$@" >"$folder/said" 2>&1; then
        passed=$((passed + 1))
        echo "ok: $name"
    else
        failed=$((failed + 1))
        echo "FAILED: $name"
        sed 's/^/    /' "$folder/said"
    fi
}

# Constraints without their hashes: with hashes pip would want one for the wheel, which was just built.
sed -E '/^ +(--hash|#)/d; s/ *\\$//' "$root/constraints/dev.txt" >"$folder/constraints.txt"
