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

# Functions are called through `run`:
# shellcheck disable=SC2317,SC2329

# shellcheck source=benchmarks/gpu_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/gpu_lib.sh"

out=${OUT:-$ROOT/benchmarks/results}
parts="build tests memcheck main short half sweep single options talk talk_single racecheck training generation"
chosen=$parts
fairseq=${FAIRSEQ_SOURCE:-} dynamic=${DYNAMIC_CONV1D:-} jet=${JET_NEMOTRON:-}
limit=${LIGHTCONV_GPU_SECONDS:-530} # for all of it; what has not begun by then is not begun

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
begin_run gpu

operators() {
    local name=$1
    shift
    "$PYTHON" -m benchmarks.operators --device cuda --json "$work/json/$name.json" "$@"
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

export -f operators sanitize

run build 120 build cuda
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
    note peers "$status" 0
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
big=(--device cuda --dtype bfloat16 --preset wmt_en_de_big)
run training 90 fairseq_program training "${big[@]}"
run generation 60 fairseq_program generation "${big[@]}" --beam 4 --sentences 256
end_run
