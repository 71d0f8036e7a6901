#!/bin/sh
# A gateway at work: status, a short replay of the packaged trace, status again.
# Uses the gateway that runs; where none does, it starts one in a temporary directory and ends it afterwards.
set -eu

gateway=${1:?usage: demo.sh PATH-OF-xkv-gateway}
limit=${XKV_DEMO_REQUESTS:-150}
unset XKV_DEMO_REQUESTS
state=
daemon=

finish() {
    if [ -n "$daemon" ]; then
        kill -TERM "$daemon" 2>/dev/null || true
        wait "$daemon" || true
    fi
    if [ -n "$state" ]; then
        rm -rf "$state"
    fi
}
trap finish EXIT
trap 'exit 130' INT TERM

code=0
"$gateway" status >/dev/null 2>&1 || code=$?
if [ "$code" -eq 3 ]; then
    state=$(mktemp -d "${TMPDIR:-/tmp}/xkv-demo.XXXXXX")
    echo "No gateway runs: starting one for the demo."
    "$gateway" serve --state-dir "$state" &
    daemon=$!
    tries=0
    until "$gateway" status >/dev/null 2>&1; do
        tries=$((tries + 1))
        if [ "$tries" -gt 60 ] || ! kill -0 "$daemon" 2>/dev/null; then
            echo "The gateway did not start." >&2
            exit 1
        fi
        sleep 0.5
    done
fi

"$gateway" replay --limit "$limit"
echo
"$gateway" status
