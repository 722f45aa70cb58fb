#!/usr/bin/env bash
# All that needs a GPU and not fairseq, in two calls of at most nine minutes each: first whether the kernels are correct, then
# how fast they are.
#
#   benchmarks/gpu.sh correctness|timing [--out DIR] [--parts "build tests …"] [--plan]
#                     [--fairseq-source DIR] [--dynamic-conv1d DIR] [--jet-nemotron DIR]
#
#   correctness   the build, the tests in several processes, compute-sanitizer; and the peers' kernels are compiled
#   timing        the operators beside torch's, then beside each of the peers
#   --plan        print the parts and the seconds that each may take
#
# Needs python3 (or what PYTHON names) with torch for CUDA, ninja, pytest and nvcc; no network, nothing installed of this
# checkout. The three folders (or FAIRSEQ_SOURCE, DYNAMIC_CONV1D, JET_NEMOTRON) are checkouts of the projects whose kernels are
# compared: benchmarks/gpu_peers.py. Name them in both calls. What is compiled stays in build/gpu (or LIGHTCONV_GPU_CACHE).
# Writes DIR/gpu_correctness.json or DIR/gpu_timing.json (everything measured, with what became of each part) and a .log; DIR
# is $OUT, or benchmarks/results. A part that fails or takes too long costs the others nothing, and a call that is killed
# leaves the results of its parts; the exit status is 1 if a part failed.

# Functions are called through `run`:
# shellcheck disable=SC2317,SC2329

# shellcheck source=benchmarks/gpu_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/gpu_lib.sh"

case ${1:-} in
    -h | --help) usage && exit ;;
    correctness) parts="build 110 tests 180 memcheck 60 racecheck 60 peers 90" ;;
    # dynamic_conv1d: Triton tries 36 variants of two kernels at four sizes, a minute of it.
    timing) parts="build 80 main 60 short 25 sweep 50 half 30 dynamic_conv1d 110 jet_nemotron 30 fairseq 30
        options 25 single 20 talk 25 talk_single 15" ;;
    *) die "the first argument must be correctness or timing, got \"${1:-}\"" ;;
esac
call=$1
shift
read_parts

out=${OUT:-$ROOT/benchmarks/results}
fairseq=${FAIRSEQ_SOURCE:-} dynamic=${DYNAMIC_CONV1D:-} jet=${JET_NEMOTRON:-}
while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --plan) plan && exit ;;
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
check_parts
for folder in "$fairseq" "$dynamic" "$jet"; do
    [[ -z $folder || -d $folder ]] || die "$folder is not a folder"
done
require_programs "$PYTHON" timeout
fairseq=${fairseq:+$(realpath "$fairseq")} dynamic=${dynamic:+$(realpath "$dynamic")} jet=${jet:+$(realpath "$jet")}
out=$(realpath -m "$out")
cd "$ROOT"
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || die "torch finds no CUDA device here"
begin_run "gpu_$call"

# The tests, shared out among processes; OUT/gpu_correctness.tests.N.log has every test's outcome, here are the ends of them.
tests() {
    local count=$(($(nproc) * 3 / 4)) number status=0 processes=()
    count=$((count < 1 ? 1 : count > 12 ? 12 : count))
    rm -f -- "$out"/gpu_correctness.tests.*.log
    for ((number = 0; number < count; ++number)); do
        LIGHTCONV_TEST_SHARE=$number/$count "$PYTHON" -m pytest -v -m gpu -p no:cacheprovider --durations=15 tests/gpu \
            >"$out/gpu_correctness.tests.$number.log" 2>&1 &
        processes+=($!)
    done
    trap 'tail -n 3 "$out"/gpu_correctness.tests.*.log; exit 143' TERM
    for number in "${processes[@]}"; do
        wait "$number" || status=$?
    done
    tail -n 40 "$out"/gpu_correctness.tests.*.log
    return "$status"
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

# await_peers PROCESS: what the compilation in the background says, until it ends.
await_peers() {
    tail --pid="$1" -n +1 -f "$work/peers.log"
    return "$(<"$work/peers.status")"
}

# operators NAME OPTIONS…: into NAME.json, case by case.
operators() {
    "$PYTHON" -m benchmarks.operators --device cuda --json "$work/json/$1.json" "${@:2}"
}

# peer FOLDER NAME OPTIONS…: `operators` beside the kernels of a folder, which has to be named.
peer() {
    if [[ -z $1 ]]; then
        echo "no folder was named (--help)"
        return 77
    fi
    operators "${@:2}"
}
export -f tests sanitize await_peers operators peer

run build build cuda

if [[ $call == correctness ]]; then
    # In the background, as it takes minutes of single cores. Nothing is timed in this call.
    peers=(${fairseq:+--fairseq-source "$fairseq"} ${dynamic:+--dynamic-conv1d "$dynamic"} ${jet:+--jet-nemotron "$jet"})
    if ((${#peers[@]})) && [[ " $chosen " == *" peers "* ]]; then
        : >"$work/peers.log"
        # shellcheck disable=SC2016
        timeout "$total" bash -c 'status=0; "$PYTHON" -m benchmarks.gpu_peers "$@" >"$work/peers.log" 2>&1 || status=$?
            echo "$status" >"$work/peers.status"' peers "${peers[@]}" &
        background=$!
    fi
    run tests tests
    run memcheck sanitize memcheck
    run racecheck sanitize racecheck
    [[ -z $background ]] || run peers await_peers "$background"
    end_run
fi

filters=(--operators lightconv dynamicconv)
bfloat16=(--dtype bfloat16)
# shellcheck disable=SC2054 # the commas are the shapes
half=(--dtype float16 --shapes 256,256,1024,16,7 256,256,1024,16,31 64,128,512,4,31)
run main operators main "${filters[@]}" "${bfloat16[@]}" --shapes gpu --repeats 30
run short operators short "${bfloat16[@]}" --shapes short --operators dynamicconv --repeats 30
run sweep operators sweep "${filters[@]}" "${bfloat16[@]}" --shapes sweep 64,64,512,4,31 --variants causal --repeats 15 \
    --without "our reference" "fairseq band" "fairseq unfold"
run half operators half "${filters[@]}" "${half[@]}" --repeats 20 --without "our reference"
# Each beside ours alone: a peer whose kernels end the process takes nobody else's results.
alone=(--without "our reference" "fairseq band" "fairseq unfold" "conv1d depthwise" "attention (flash)")
run dynamic_conv1d peer "$dynamic" dynamic_conv1d "${bfloat16[@]}" --shapes short --operators dynamicconv --repeats 30 \
    "${alone[@]}" --dynamic-conv1d "$dynamic"
run jet_nemotron peer "$jet" jet_nemotron "${bfloat16[@]}" --shapes short --operators dynamicconv --repeats 30 \
    "${alone[@]}" --jet-nemotron "$jet"
run fairseq peer "$fairseq" fairseq "${filters[@]}" "${half[@]}" "${alone[@]}" --repeats 20 --fairseq-source "$fairseq"
run options operators options "${filters[@]}" "${bfloat16[@]}" --shapes 256,256,1024,16,31 --variants glu dropout --repeats 15
run single operators single "${filters[@]}" --dtype float32 --shapes 256,128,1024,16,7 256,128,1024,16,31 --repeats 15
run talk operators talk --operators talkconv "${bfloat16[@]}" --shapes gpu 4096,16,1024,16,63 \
    --variants plain causal --repeats 15 --without "our reference" "attention (flash)"
run talk_single operators talk_single --operators talkconv --dtype float32 --shapes 256,128,1024,16,{7,31,63} \
    --repeats 15 --without "our reference"
end_run
