#!/usr/bin/env bash
# What of the GPU's measurements needs fairseq, in three calls of at most nine minutes each, in bfloat16.
#
#   benchmarks/gpu_fairseq.sh timing|generation|recipes [--wheels DIR] [--data DATA_BIN] [--checkpoints DIR] [--out DIR]
#                             [--parts "environment build …"] [--updates N] [--configs NAME] [--plan]
#
#   timing           training of the big models of WMT'14 En-De beside fairseq's Transformer: first what a launch costs the
#                    host and where a step's time goes, then steps of 3,584, 16,384 and 32,768 tokens; with --data also
#                    steps of its batches, whose sentences differ in length
#   generation       the same models' search with and without CUDA graphs, for 1, 32 and 256 sentences; with --checkpoints
#                    also trained models on their test set, whose batches differ in size
#   recipes          short trainings of all four mixers on real text, at the same time
#   --wheels DIR     fairseq and what it needs, as benchmarks/wheels.sh collects them on a machine with a network. They go
#                    into an environment that is thrown away afterwards and sees torch and all else of python3's
#                    (or PYTHON's). Default: $WHEELS; without either, fairseq has to be installed there already
#   --data DATA_BIN  the folder that scripts/prepare.sh multi30k_en_de makes (data/multi30k_en_de/data-bin); the two folders above
#                    it, when they are there, have the references. Without it nothing is trained
#   --configs NAME   the folder of configs/ that recipes trains (default multi30k_en_de; iwslt15_en_vi is a row of the papers)
#   --checkpoints DIR  checkpoints DIR/dynamicconv.pt and DIR/transformer.pt, trained on --data
#   --updates N      of each of those trainings (default 1500)
#   --device cpu     everything at tiny sizes and without a GPU, to see that it runs; the figures mean nothing
#   --plan           print the parts and the seconds that each may take
#
# What is compiled stays in build/gpu (or LIGHTCONV_GPU_CACHE). Writes DIR/gpu_fairseq_timing.json or
# DIR/gpu_fairseq_recipes.json (everything measured, with card, driver and versions, and what became of each part) and a .log;
# DIR is $OUT, or benchmarks/results. A part that fails or takes too long costs the others nothing, and a call that is killed
# leaves the results of its parts; the exit status is 1 if a part failed.

# Functions are called through `run`:
# shellcheck disable=SC2317,SC2329

# shellcheck source=benchmarks/gpu_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/gpu_lib.sh"

case ${1:-} in
    -h | --help) usage && exit ;;
    timing) parts="environment 60 build 110 profile 90 training 80 training_16k 60 training_32k 60 ragged 40" ;;
    generation) parts="environment 60 build 110 generation 230 trained 100" ;;
    recipes) parts="environment 60 build 110 recipes 310" ;;
    *) die "the first argument must be timing, generation or recipes, got \"${1:-}\"" ;;
esac
call=$1
shift
read_parts

out=${OUT:-$ROOT/benchmarks/results}
wheels=${WHEELS:-} data='' device=cuda updates='' configs=multi30k_en_de checkpoints=''

while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --plan) plan && exit ;;
        --out | --parts | --wheels | --data | --updates | --device | --configs | --checkpoints)
            (($# > 1)) || die "$1 needs a value"
            case $1 in
                --out) out=$2 ;;
                --parts) chosen=$2 ;;
                --wheels) wheels=$2 ;;
                --data) data=$2 ;;
                --updates) updates=$2 ;;
                --device) device=$2 ;;
                --configs) configs=$2 ;;
                --checkpoints) checkpoints=$2 ;;
            esac
            shift 2
            ;;
        *) die "unknown argument $1 (--help lists them)" ;;
    esac
done
check_parts
[[ $device == cuda || $device == cpu ]] || die "--device must be cuda or cpu, got: $device"
[[ -f $ROOT/configs/$configs/dynamicconv.yaml ]] || die "--configs: configs/$configs has no dynamicconv.yaml"
[[ -z $checkpoints || -f $checkpoints/dynamicconv.pt ]] || die "--checkpoints: $checkpoints has no dynamicconv.pt"
[[ -z $updates || $updates =~ ^[1-9][0-9]{0,5}$ ]] || die "--updates must be a whole number from 1, got: $updates"
[[ -z $wheels ]] || (cd -- "$wheels" && compgen -G "*.whl" >/dev/null) || die "--wheels: $wheels has no *.whl (benchmarks/wheels.sh)"
[[ -z $data ]] || (cd -- "$data" && compgen -G "dict.*.txt" >/dev/null) || die "--data: $data is not a data-bin folder"
require_programs "$PYTHON" timeout
wheels=${wheels:+$(realpath "$wheels")} data=${data:+$(realpath "$data")} checkpoints=${checkpoints:+$(realpath "$checkpoints")}
out=$(realpath -m "$out")
cd "$ROOT"
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
if [[ $device == cuda ]]; then
    "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || die "torch finds no CUDA device here"
fi
begin_run "gpu_fairseq_$call"

# An environment with the wheels before everything that python3 has. Without pip: python3's own, seen from in there, is
# enough. When python3 belongs to an environment too, --system-site-packages would show that one's base: hence the .pth.
environment() {
    if [[ -z $1 ]]; then
        echo "no --wheels: what $PYTHON has"
    else
        "$PYTHON" -m venv --without-pip --system-site-packages "$work/env"
        local python=$work/env/bin/python
        "$PYTHON" -c '
import site, sys
print(*[path for path in sys.path if path.endswith(("site-packages", "dist-packages"))], sep="\n")
' >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth"
        "$python" -m pip --disable-pip-version-check install --quiet --no-index --no-deps --ignore-installed \
            --no-warn-script-location "$1"/*.whl
        PYTHON=$python
    fi
    # A wheel of torch among the others would hide the one that knows the GPU.
    "$PYTHON" -c '
import sys
try:
    import fairseq
except ImportError as error:
    sys.exit(f"fairseq cannot be imported: {error}")
import torch
print(f"fairseq: {fairseq.__path__[0]}, torch {torch.__version__}: {torch.__path__[0]}")'
}

recipes() {
    if [[ -z $1 ]]; then
        echo "no --data: nothing to train on"
        return 77
    fi
    fairseq_program recipes recipes --data "$@"
}

# ragged DATA OPTIONS…: training on batches of real text.
ragged() {
    if [[ -z $1 ]]; then
        echo "no --data: no batches of real text"
        return 77
    fi
    fairseq_program ragged training --data "$@"
}

# trained CHECKPOINTS DATA OPTIONS…: trained models on their test set.
trained() {
    if [[ -z $1 || -z $2 ]]; then
        echo "no --checkpoints or no --data: no trained models"
        return 77
    fi
    local paths=() name
    for name in DynamicConv=dynamicconv Transformer=transformer; do
        [[ ! -f $1/${name#*=}.pt ]] || paths+=("${name%=*}=$1/${name#*=}.pt")
    done
    fairseq_program trained generation --data "$2" --path "${paths[@]}" "${@:3}"
}
export -f environment recipes ragged trained

quick=()
[[ $device == cuda ]] || quick=(--quick)
options=(--device "$device" --dtype bfloat16)
big=("${options[@]}" --preset wmt_en_de_big "${quick[@]}")
run environment environment "$wheels"
[[ ! -x $work/env/bin/python ]] || export PYTHON=$work/env/bin/python
run build build "$device"
case $call in
    timing)
        steps=(training "${big[@]}" --repeats 50)
        run profile fairseq_program profile gpu_profile "${big[@]}"
        run training fairseq_program training "${steps[@]}"
        # Without fairseq's own convolutions: their share is known from the small batch.
        systems=(--systems "DynamicConv (ours)" "LightConv (ours)" "TaLK (ours)" "fairseq Transformer")
        run training_16k fairseq_program training_16k "${steps[@]}" "${systems[@]}" --sentences 512 --length 32
        run training_32k fairseq_program training_32k "${steps[@]}" "${systems[@]}" --sentences 1024 --length 32
        run ragged ragged "$data" "${big[@]}" --repeats 50 "${systems[@]}" --max-tokens 16384
        ;;
    generation)
        # Not fairseq's own convolutions: building models of 200 million parameters takes seconds each.
        searches=("DynamicConv (ours)" "LightConv (ours)" "TaLK (ours)" "fairseq Transformer" "fairseq Transformer, our search")
        if [[ $device == cuda ]]; then
            searches+=("DynamicConv (ours), CUDA graphs" "LightConv (ours), CUDA graphs" "TaLK (ours), CUDA graphs"
                "fairseq Transformer, our search, CUDA graphs")
        fi
        run generation fairseq_program generation generation "${big[@]}" --beam 4 --sentences 1 32 256 --repeats 7 \
            --systems "${searches[@]}"
        run trained trained "$checkpoints" "$data" "${options[@]}" --beam 4
        ;;
    recipes) run recipes recipes "$data" "${options[@]}" --updates "${updates:-1500}" --seconds 285 --configs "$configs" ;;
esac
end_run
