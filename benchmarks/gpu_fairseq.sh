#!/usr/bin/env bash
# What of the GPU's measurements needs fairseq, in calls of at most nine minutes each, in bfloat16.
#
#   benchmarks/gpu_fairseq.sh timing|steps|compile|generation|recipes|rows [--wheels DIR] [--data DATA_BIN]
#                             [--checkpoints DIR] [--out DIR] [--parts "environment build …"] [--updates N] [--configs NAME] [--plan]
#
#   timing           training of the big models of WMT'14 En-De beside fairseq's Transformer: first what a launch costs the
#                    host and where a step's time goes, then steps of 3,584, 16,384 and 32,768 tokens; with --data also
#                    steps of its batches, whose sentences differ in length
#   steps            updates of the same models in other ways: small and large models in CUDA graphs, float16, and 28 batches
#                    of 16,384 tokens, a recipe's update
#   compile          steps with --compile-blocks, which is compiled first; what is compiled stays for the next call
#   generation       the same models' search with and without CUDA graphs, for 1, 32 and 256 sentences, and transformers'
#                    Marian; CTranslate2, if it is installed; with --checkpoints also trained models on their test set,
#                    whose batches differ in size
#   recipes          short trainings of all four mixers on real text, at the same time
#   rows             whole rows of the results, all four mixers at the same time. They are kept in build/gpu/rows, and the same
#                    call again goes on with them
#   --wheels DIR     fairseq and what it needs, as benchmarks/wheels.sh collects them on a machine with a network. They go
#                    into an environment that is thrown away afterwards and sees torch and all else of python3's
#                    (or PYTHON's). Default: $WHEELS; without either, fairseq has to be installed there already
#   --data DATA_BIN  the folder that scripts/prepare.sh multi30k_en_de makes (data/multi30k_en_de/data-bin); the two folders above
#                    it, when they are there, have the references. Without it nothing is trained
#   --configs NAME   the folder of configs/ that recipes and rows train (default multi30k_en_de; or iwslt15_en_vi)
#   --checkpoints DIR  checkpoints DIR/dynamicconv.pt and DIR/transformer.pt, trained on --data
#   --updates N      of each training of recipes (default 1500)
#   --device cpu     everything at tiny sizes and without a GPU, to see that it runs; the figures mean nothing. Needs --out
#   --plan           print the parts and the seconds that each may take
#
# What is compiled stays in build/gpu (or LIGHTCONV_GPU_CACHE). Writes DIR/gpu_fairseq_CALL.json (everything measured, with card,
# driver and versions, and what became of each part) and a .log; DIR is $OUT, or benchmarks/results. A part that fails or takes
# too long costs the others nothing, and a call that is killed leaves the results of its parts; the exit status is 1 if a part
# failed.

# Functions are called through `run`:
# shellcheck disable=SC2317,SC2329

# shellcheck source=benchmarks/gpu_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/gpu_lib.sh"

case ${1:-} in
    -h | --help) usage && exit ;;
    timing) parts="environment 60 build 110 profile 90 training 80 training_16k 60 training_32k 60 ragged 40" ;;
    steps) parts="environment 60 build 110 small_graphs 70 graphs 80 half 70 update_28 110" ;;
    compile) parts="environment 60 build 110 compiled 330" ;;
    generation) parts="environment 60 build 110 generation 200 ctranslate2 50 trained 80" ;;
    recipes) parts="environment 60 build 110 recipes 310" ;;
    rows) parts="environment 60 build 110 rows 330" ;;
    *) die "the first argument must be timing, steps, compile, generation, recipes or rows, got \"${1:-}\"" ;;
esac
call=$1
shift
read_parts

out=${OUT:-}
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
[[ $device == cuda || $out ]] || die "--device cpu needs --out DIR: its figures are no evidence"
[[ -f $ROOT/configs/$configs/dynamicconv.yaml ]] || die "--configs: configs/$configs has no dynamicconv.yaml"
[[ -z $checkpoints || -f $checkpoints/dynamicconv.pt ]] || die "--checkpoints: $checkpoints has no dynamicconv.pt"
[[ -z $updates || $updates =~ ^[1-9][0-9]{0,5}$ ]] || die "--updates must be a whole number from 1, got: $updates"
[[ -z $wheels ]] || (cd -- "$wheels" && compgen -G "*.whl" >/dev/null) || die "--wheels: $wheels has no *.whl (benchmarks/wheels.sh)"
[[ -z $data ]] || (cd -- "$data" && compgen -G "dict.*.txt" >/dev/null) || die "--data: $data is not a data-bin folder"
require_programs "$PYTHON" timeout
wheels=${wheels:+$(realpath "$wheels")} data=${data:+$(realpath "$data")} checkpoints=${checkpoints:+$(realpath "$checkpoints")}
out=$(realpath -m "${out:-$ROOT/benchmarks/results}")
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

# rows DATA CONFIGS OPTIONS…: whole rows, which the next call goes on with.
rows() {
    if [[ -z $1 ]]; then
        echo "no --data: nothing to train on"
        return 77
    fi
    local names=("$2"/{dynamicconv,lightweightconv,talkconv,transformer})
    fairseq_program rows rows "${names[@]}" --data "$1" --folder "$cache/rows" "${@:3}"
}

# ctranslate2 OPTIONS…: the engine looks for the libraries of CUDA 12 by their names; those of 13 have the same functions.
ctranslate2() {
    if ! has ctranslate2 || [[ " $* " == *" --device cpu "* ]]; then
        echo "ctranslate2 is not installed, or without a GPU, where it has no bfloat16"
        return 77
    fi
    local library
    mkdir -p "$work/lib"
    while read -r library; do
        [[ ! -f ${library}13 ]] || ln -sf "${library}13" "$work/lib/${library##*/}12"
    done < <("$PYTHON" -c '
import pathlib, torch
for folder in pathlib.Path(torch.__file__).parents[1].glob("nvidia/*/lib"):
    print(*(f"{folder}/{name}.so." for name in ("libcublas", "libcublasLt")), sep="\n")')
    LD_LIBRARY_PATH=$work/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} fairseq_program ctranslate2 generation "$@"
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
export -f environment recipes rows ctranslate2 ragged trained

quick=()
[[ $device == cuda ]] || quick=(--quick)
half=()
options=(--device "$device" --dtype bfloat16)
big=("${options[@]}" --preset wmt_en_de_big "${quick[@]}")
run environment environment "$wheels"
[[ ! -x $work/env/bin/python ]] || export PYTHON=$work/env/bin/python
run build build "$device"
case $call in
    timing)
        steps=(training "${big[@]}" --repeats 50)
        run profile fairseq_program profile gpu_profile "${big[@]}"
        systems=(--systems "DynamicConv (ours)" "LightConv (ours)" "TaLK (ours)" "fairseq Transformer")
        run training fairseq_program training "${steps[@]}" "${systems[@]}" "fairseq DynamicConv" "fairseq LightConv"
        # Without fairseq's own convolutions: their share is known from the small batch.
        run training_16k fairseq_program training_16k "${steps[@]}" "${systems[@]}" --sentences 512 --length 32
        run training_32k fairseq_program training_32k "${steps[@]}" "${systems[@]}" --sentences 1024 --length 32
        run ragged ragged "$data" "${big[@]}" --repeats 50 "${systems[@]}" --max-tokens 16384
        ;;
    steps)
        both=(--systems "DynamicConv (ours)" "fairseq Transformer")
        graphs=("DynamicConv (ours), CUDA graphs" "fairseq Transformer, CUDA graphs")
        [[ $device == cuda ]] || graphs=()
        # The batches of the recipes of IWSLT's size: 4,096 tokens.
        run small_graphs fairseq_program small_graphs training "${options[@]}" --preset multi30k_en_de "${quick[@]}" \
            --repeats 50
        run graphs fairseq_program graphs training "${big[@]}" --repeats 50 "${both[@]}" "${graphs[@]}"
        [[ $device == cpu ]] || half=(--dtype float16)
        run half fairseq_program half training "${big[@]}" "${half[@]}" --repeats 30 "${both[@]}" --sentences 512 --length 32
        run update_28 fairseq_program update_28 training "${big[@]}" --repeats 5 "${both[@]}" --update-freq 28 \
            --sentences 512 --length 32
        ;;
    compile)
        run compiled fairseq_program compiled training "${big[@]}" --repeats 50 --compile-blocks --systems \
            "DynamicConv (ours)" "DynamicConv (ours), compiled" "fairseq Transformer"
        ;;
    generation)
        # Not fairseq's own convolutions: building models of 200 million parameters takes seconds each.
        searches=("DynamicConv (ours)" "LightConv (ours)" "TaLK (ours)" "fairseq Transformer" "fairseq Transformer, our search")
        ! has transformers || searches+=("transformers Marian")
        if [[ $device == cuda ]]; then
            searches+=("DynamicConv (ours), CUDA graphs" "LightConv (ours), CUDA graphs" "TaLK (ours), CUDA graphs"
                "fairseq Transformer, our search, CUDA graphs")
        fi
        run generation fairseq_program generation generation "${big[@]}" --beam 4 --sentences 1 32 256 --repeats 7 \
            --systems "${searches[@]}"
        run ctranslate2 ctranslate2 "${big[@]}" --beam 4 --sentences 256 --repeats 5 --systems "fairseq Transformer" \
            "CTranslate2 Transformer, bfloat16" "CTranslate2 Transformer, int8_bfloat16"
        run trained trained "$checkpoints" "$data" "${options[@]}" --beam 4
        ;;
    rows) run rows rows "$data" "$configs" --seconds 300 -- common.bf16=true ;;
    recipes) run recipes recipes "$data" "${options[@]}" --updates "${updates:-1500}" --seconds 285 --configs "$configs" ;;
esac
end_run
