#!/usr/bin/env bash
# All that needs a GPU, in one call of at most nine minutes: the build, the tests, compute-sanitizer, the benchmarks.
#
#   benchmarks/gpu.sh [--out DIR] [--parts "build tests …"] [--fairseq-source DIR] [--dynamic-conv1d DIR] [--jet-nemotron DIR]
#
# Needs python3 (or what PYTHON names) with torch for CUDA, ninja, pytest and nvcc; no network, nothing installed of this
# checkout. With fairseq installed, training and generation are measured too. The three folders (or FAIRSEQ_SOURCE,
# DYNAMIC_CONV1D, JET_NEMOTRON) are checkouts of the projects whose kernels are compared: benchmarks/gpu_peers.py.
# Writes DIR/gpu.json (everything measured, with what became of each part) and DIR/gpu.log; DIR is $OUT, or benchmarks/results.
# A part that fails or takes too long costs the others nothing; the exit status is 1 if any did.

# Functions are called through `run` and `trap`:
# shellcheck disable=SC2317,SC2329

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
out=${OUT:-$ROOT/benchmarks/results}
parts="build tests memcheck main short half sweep single options talk talk_single racecheck training generation"
chosen=$parts
fairseq=${FAIRSEQ_SOURCE:-} dynamic=${DYNAMIC_CONV1D:-} jet=${JET_NEMOTRON:-}
limit=${LIGHTCONV_GPU_SECONDS:-530} # for all of it; what has not begun by then is not begun

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }
die() {
    printf '%s: error: %s\n' "${0##*/}" "$*" >&2
    exit 2
}

while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --out | --parts | --fairseq-source | --dynamic-conv1d | --jet-nemotron)
            (($# > 1)) || die "$1 needs a value"
            case $1 in
                --out) out=$2 ;;
                --parts) chosen=$2 ;;
                --fairseq-source) fairseq=$2 ;;
                --dynamic-conv1d) dynamic=$2 ;;
                --jet-nemotron) jet=$2 ;;
            esac
            shift 2
            ;;
        *) die "unknown argument $1 (--help lists them)" ;;
    esac
done
for part in $chosen; do
    [[ " $parts " == *" $part "* ]] || die "--parts: $part is none of: $parts"
done
for folder in "$fairseq" "$dynamic" "$jet"; do
    [[ -z $folder || -d $folder ]] || die "$folder is not a folder"
done
for program in "$PYTHON" timeout; do
    command -v "$program" >/dev/null || die "$program is needed"
done
fairseq=${fairseq:+$(realpath "$fairseq")} dynamic=${dynamic:+$(realpath "$dynamic")} jet=${jet:+$(realpath "$jet")}
mkdir -p "$out"
out=$(realpath "$out")
cd "$ROOT"
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || die "torch finds no CUDA device here"

work=$(mktemp -d)
background=''
tee_pid=''
finish() {
    [[ -z $background ]] || kill "$background" 2>/dev/null || true
    rm -rf -- "$work"
    exec >&3 2>&4
    [[ -z $tee_pid ]] || wait "$tee_pid" || true # it has written all of the log
}
exec 3>&1 4>&2
trap finish EXIT
# An empty cache, so that the build is measured; set TORCH_EXTENSIONS_DIR to keep what is compiled.
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$work/extensions}
mkdir -p "$work/json" "$TORCH_EXTENSIONS_DIR"
: >"$work/parts"
exec > >(tee "$out/gpu.log") 2>&1
tee_pid=$!

begin=$SECONDS
failed=0

# part NAME LIMIT COMMAND…: one part, under its own limit of seconds and what is left of all; notes what became of it.
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
    printf '%s\t%s\t%s\n' "$name" "$word" "$((SECONDS - start))" >>"$work/parts"
    "$PYTHON" -m benchmarks.collect "$work" "$out/gpu.json" || failed=1
}

operators() {
    local name=$1
    shift
    "$PYTHON" -m benchmarks.operators --device cuda --json "$work/json/$name.json" "$@"
}

build() {
    LIGHTCONV_BACKEND=cuda "$PYTHON" -c '
import time
start = time.perf_counter()
from lightconv_plugin.ops import native
decided = native.decision("cuda")
print(f"{decided.library}: built and loaded in {time.perf_counter() - start:.1f} s")'
}

sanitize() {
    local tool=$1 program log status=0
    program=$(command -v compute-sanitizer || true)
    [[ -n $program ]] || program=$(dirname "$(realpath "$(command -v nvcc || echo /)")")/compute-sanitizer
    if [[ ! -x $program ]]; then
        echo "compute-sanitizer was not found, neither in PATH nor beside nvcc"
        return 77
    fi
    # Only our kernels: instrumenting torch's as well takes minutes. Nor what torch tries of the API and handles itself.
    local options=(--tool "$tool" --error-exitcode 9 --kernel-name kns=lightconv)
    [[ $tool != memcheck ]] || options+=(--report-api-errors no)
    log=$work/$tool.log
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$program" "${options[@]}" "$PYTHON" -m tests.gpu.sanitize 2>&1 | tee "$log" || status=$?
    if ((status)) && grep -q 'Device not supported' "$log"; then
        echo "compute-sanitizer does not support this machine's driver"
        return 77
    fi
    return "$status"
}

fairseq_program() {
    if ! "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("fairseq") is None)'; then
        echo "fairseq is not installed"
        return 77
    fi
    "$PYTHON" -m "benchmarks.$1" --device cuda --dtype bfloat16 --json "$work/json/$1.json" --preset wmt_en_de_big "${@:2}"
}

# The functions run under `timeout`, hence in shells of their own.
export -f operators build sanitize fairseq_program
export PYTHON work
run() { part "$1" "$2" bash -c 'set -euo pipefail; "$@"' "$1" "${@:3}"; }

run build 120 build
peers=(${fairseq:+--fairseq-source "$fairseq"} ${dynamic:+--dynamic-conv1d "$dynamic"} ${jet:+--jet-nemotron "$jet"})
if ((${#peers[@]})); then
    timeout 240 "$PYTHON" -m benchmarks.gpu_peers "${peers[@]}" >"$work/peers.log" 2>&1 &
    background=$!
fi
run tests 170 "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider tests/gpu
run memcheck 60 sanitize memcheck
# Nothing else may run while something is timed.
if [[ -n $background ]]; then
    printf '\n=== peers\n'
    status=ok
    wait "$background" || status=failed failed=1
    background=''
    cat "$work/peers.log"
    printf 'peers\t%s\t0\n' "$status" >>"$work/parts"
    [[ $status == ok ]] || fairseq='' dynamic='' jet='' # ours are measured all the same
fi

filters=(--operators lightconv dynamicconv)
run main 70 operators main "${filters[@]}" --dtype bfloat16 --shapes gpu --repeats 30
run short 60 operators short --dtype bfloat16 --shapes short --operators dynamicconv --repeats 30 \
    ${dynamic:+--dynamic-conv1d "$dynamic"} ${jet:+--jet-nemotron "$jet"}
run half 60 operators half "${filters[@]}" --dtype float16 --shapes 256,256,1024,16,7 256,256,1024,16,31 64,128,512,4,31 --repeats 20 \
    --without "our reference" ${fairseq:+--fairseq-source "$fairseq"}
run sweep 80 operators sweep "${filters[@]}" --dtype bfloat16 --shapes sweep 64,64,512,4,31 --variants causal --repeats 15 \
    --without "our reference" "fairseq band" "fairseq unfold"
run single 40 operators single "${filters[@]}" --dtype float32 --shapes 256,128,1024,16,7 256,128,1024,16,31 --repeats 15
run options 40 operators options "${filters[@]}" --dtype bfloat16 --shapes 256,256,1024,16,31 --variants glu dropout \
    --repeats 15
run talk 50 operators talk --operators talkconv --dtype bfloat16 --shapes gpu 4096,16,1024,16,63 \
    --variants plain causal --repeats 15 --without "our reference" "attention (flash)"
run talk_single 30 operators talk_single --operators talkconv --dtype float32 --shapes 256,128,1024,16,{7,31,63} \
    --repeats 15 --without "our reference"
run racecheck 60 sanitize racecheck
run training 90 fairseq_program training
run generation 60 fairseq_program generation --beam 4 --sentences 256

printf '\n'
"$PYTHON" -m benchmarks.collect "$work" "$out/gpu.json" --print || failed=1
printf '%s seconds; %s\n' "$((SECONDS - begin))" "$out/gpu.json"
exit "$failed"
