# shellcheck shell=bash
# Sourced by gpu.sh and gpu_fairseq.sh: a run of parts, each under its own limit of seconds and what is left of all, none
# of which costs the others anything. The caller sets `parts` and `limit`, reads its options, and then:
#
#   begin_run NAME          OUT/NAME.json and OUT/NAME.log from here on (OUT: `out`); `work` is a folder that goes away
#   run PART LIMIT COMMAND…  one part; a shell function that is exported, or a program
#   end_run                 the tables; the exit status is 1 if any part failed

# Variables here are the caller's and the other way round; functions are called through `trap`.
# shellcheck disable=SC2034,SC2154,SC2317,SC2329

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
background='' # the id of a process that the end of the run must not leave behind

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }
die() {
    printf '%s: error: %s\n' "${0##*/}" "$*" >&2
    exit 2
}

# Every word of `chosen` is one of `parts`.
check_parts() {
    local part
    for part in $chosen; do
        [[ " $parts " == *" $part "* ]] || die "--parts: $part is none of: $parts"
    done
}

require_programs() {
    local program
    for program in "$@"; do
        command -v "$program" >/dev/null || die "$program is needed"
    done
}

# finish: what a run leaves behind is its JSON and its log.
finish() {
    [[ -z $background ]] || kill "$background" 2>/dev/null || true
    rm -rf -- "$work"
    exec >&3 2>&4
    [[ -z $tee_pid ]] || wait "$tee_pid" || true # it has written all of the log
}

begin_run() {
    mkdir -p "$out"
    out=$(realpath "$out")
    result=$out/$1.json
    work=$(mktemp -d)
    tee_pid=''
    exec 3>&1 4>&2
    trap finish EXIT
    # An empty cache, so that the build is measured; set TORCH_EXTENSIONS_DIR to keep what is compiled.
    export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$work/extensions}
    mkdir -p "$work/json" "$TORCH_EXTENSIONS_DIR"
    : >"$work/parts"
    exec > >(tee "$out/$1.log") 2>&1
    tee_pid=$!
    begin=$SECONDS
    failed=0
    export PYTHON work
}

# note PART STATUS SECONDS: what became of a part, for the JSON.
note() {
    printf '%s\t%s\t%s\n' "$@" >>"$work/parts"
    "$PYTHON" -m benchmarks.collect "$work" "$result" || failed=1
}

part() {
    local name=$1 seconds=$2 start=$SECONDS status=0 left=$((limit - SECONDS + begin)) word=ok
    shift 2
    [[ " $chosen " == *" $name "* ]] || return 0
    printf '\n=== %s\n' "$name"
    if ((left < 5)); then
        word="no time left" failed=1
    else
        timeout --kill-after=5 "$((seconds < left ? seconds : left))" "$@" || status=$?
        if ((status == 124 || status == 137)); then
            word="out of time" failed=1
        elif ((status == 77)); then
            word="not here" # what it needs is not on this machine: said in the log
        elif ((status)); then
            word="failed ($status)" failed=1
        fi
    fi
    note "$name" "$word" "$((SECONDS - start))"
}

# Functions run under `timeout`, hence in shells of their own.
run() { part "$1" "$2" bash -c 'set -euo pipefail; "$@"' "$1" "${@:3}"; }

# build DEVICE: the kernels, compiled or found in the cache.
build() {
    LIGHTCONV_BACKEND=$1 "$PYTHON" -c '
import sys, time
start = time.perf_counter()
from lightconv_plugin.ops import native
decided = native.decision(sys.argv[1])
print(f"{decided.library}: built and loaded in {time.perf_counter() - start:.1f} s")' "$1"
}

# fairseq_program PROGRAM OPTIONS…: a benchmark that needs fairseq.
fairseq_program() {
    if ! "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("fairseq") is None)'; then
        echo "fairseq is not installed"
        return 77
    fi
    "$PYTHON" -m "benchmarks.$1" --json "$work/json/$1.json" "${@:2}"
}
export -f build fairseq_program

end_run() {
    printf '\n'
    "$PYTHON" -m benchmarks.collect "$work" "$result" --print || failed=1
    printf '%s seconds; %s\n' "$((SECONDS - begin))" "$result"
    exit "$failed"
}
