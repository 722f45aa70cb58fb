# shellcheck shell=bash
# Sourced by gpu.sh and gpu_fairseq.sh: a call made of parts, each with a share of the call's seconds. The caller sets `parts`
# ("build 110 tests 180 …", in the order in which they run) and `script`, reads its options, and then:
#
#   begin_run NAME         OUT/NAME.json and OUT/NAME.log from here on (OUT: `out`)
#   run PART COMMAND…      one part; a shell function that is exported, or a program
#   end_run                the tables; the exit status is 1 if any part failed
#
# A part may run until the shares of the parts up to and including itself have passed: it always gets its own share, and
# what those before it did not need. Results are written to OUT/NAME.parts while a part runs and collected in OUT/NAME.json
# after it, so that nothing which ends a part, or the whole call, takes the results of the parts before it.

# Variables here are the caller's and the other way round; functions are called through `trap`.
# shellcheck disable=SC2034,SC2154,SC2317,SC2329

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
background='' # the id of a process that the end of the run must not leave behind
kill_after=3  # seconds from SIGTERM to SIGKILL

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }
die() {
    printf '%s: error: %s\n' "${0##*/}" "$*" >&2
    exit 2
}

# Reads `parts` into `names`, `share` (seconds by name) and `total`.
read_parts() {
    local words word
    read -ra words <<<"${parts//$'\n'/ }"
    names=() total=0
    declare -gA share=()
    while ((${#words[@]})); do
        names+=("${words[0]}")
        share[${words[0]}]=${words[1]}
        total=$((total + words[1]))
        words=("${words[@]:2}")
    done
    chosen=${names[*]}
}

# Every word of `chosen` is a part of this call.
check_parts() {
    local word
    for word in $chosen; do
        [[ -n ${share[$word]:-} ]] || die "--parts: $word is none of: ${names[*]}"
    done
}

# What --plan prints: the parts and their seconds.
plan() {
    local name
    for name in "${names[@]}"; do printf '%-16s %4d s\n' "$name" "${share[$name]}"; done
    printf '%-16s %4d s\n' total "$total"
}

require_programs() {
    local program
    for program in "$@"; do
        command -v "$program" >/dev/null || die "$program is needed"
    done
}

milliseconds() {
    local now=${EPOCHREALTIME/[.,]/}
    printf '%s' "${now%???}"
}

seconds() { printf '%d.%03d' "$(($1 / 1000))" "$(($1 % 1000))"; }

collect() { "$PYTHON" -m benchmarks.collect "$work" "$result" "$@"; }

# finish: what a run leaves behind is its JSON and its log; the folder of the parts too if it could not be collected.
finish() {
    [[ -z $background ]] || kill "$background" 2>/dev/null || true
    if collect; then rm -rf -- "$work"; fi
    exec >&3 2>&4
    [[ -z $tee_pid ]] || wait "$tee_pid" || true # it has written all of the log
}

begin_run() {
    mkdir -p "$out"
    out=$(realpath "$out")
    result=$out/$1.json work=$out/$1.parts
    rm -rf -- "$work"
    mkdir -p "$work/json"
    # What is compiled and tuned stays: it takes longer than most measurements.
    export cache=${LIGHTCONV_GPU_CACHE:-$ROOT/build/gpu}
    export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$cache/extensions}
    export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton} TRITON_CACHE_AUTOTUNING=1
    mkdir -p "$TORCH_EXTENSIONS_DIR"
    : >"$work/parts"
    tee_pid=''
    exec 3>&1 4>&2
    trap finish EXIT
    exec > >(tee "$out/$1.log") 2>&1
    tee_pid=$!
    # Other seconds for the whole call stretch or shrink every share alike.
    limit=$((${LIGHTCONV_GPU_SECONDS:-$total} * 1000))
    begin=$(milliseconds) due=0 failed=0
    export PYTHON work out
}

# note PART STATUS MILLISECONDS: what became of a part, for the JSON; the last word on a part counts.
note() {
    printf '%s\t%s\t%s\n' "$1" "$2" "$(seconds "$3")" >>"$work/parts"
}

# Functions run under `timeout`, hence in shells of their own.
run() {
    local name=$1 start left status=0 word=ok
    shift
    [[ " $chosen " == *" $name "* ]] || return 0
    printf '\n=== %s\n' "$name"
    start=$(milliseconds) due=$((due + share[$name] * limit / total))
    left=$((begin + due - start))
    note "$name" "cut off" 0 # unless this call gets to say something else
    if ((left <= limit / 200)); then
        word="no time left" failed=1
    else
        timeout --kill-after="$kill_after" "$(seconds "$left")" bash -c 'set -euo pipefail; "$@"' "$name" "$@" \
            3>&- 4>&- || status=$? # whoever waits for this call's output need not wait for a part that outlives it
        if ((status == 124 || status == 137)); then
            word="out of time" failed=1
        elif ((status == 77)); then
            word="not here" # what it needs is not on this machine: said in the log
        elif ((status)); then
            word="failed ($status)" failed=1
        fi
    fi
    note "$name" "$word" "$(($(milliseconds) - start))"
    collect || failed=1
}

# build DEVICE: the kernels, compiled or found in the cache.
build() {
    LIGHTCONV_BACKEND=$1 "$PYTHON" -c '
import sys, time
start = time.perf_counter()
from lightconv_plugin.ops import backends
decided = backends.decision(sys.argv[1])
print(f"{decided.library}: built and loaded in {time.perf_counter() - start:.1f} s")' "$1"
}

# has PACKAGE: whether $PYTHON can import it.
has() { "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"; }

# fairseq_program NAME PROGRAM OPTIONS…: a benchmark that needs fairseq, into NAME.json.
fairseq_program() {
    if ! has fairseq; then
        echo "fairseq is not installed"
        return 77
    fi
    "$PYTHON" -m "benchmarks.$2" --json "$work/json/$1.json" "${@:3}"
}
export -f has build fairseq_program

end_run() {
    printf '\n'
    collect --print || failed=1
    printf '%s seconds; %s\n' "$(seconds "$(($(milliseconds) - begin))")" "$result"
    exit "$failed"
}
