#!/usr/bin/env bash
# Train a configuration with fairseq-hydra-train; the same command again resumes from the last checkpoint.
#
#   scripts/train.sh CONFIG.yaml [hydra overrides …]
#   scripts/train.sh configs/multi30k_en_de/dynamicconv.yaml optimization.max_epoch=30 common.seed=2
#
# Checkpoints and train.log go to checkpoint.save_dir, the data come from task.data: paths in a configuration are relative
# to the checkout, paths in an override to the working directory. All GPUs are used, or all cores (OMP_NUM_THREADS, if
# set). A configuration's max_tokens × update_freq is its tokens an update; with N GPUs they are divided by N.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
    '') usage >&2; exit 2 ;;
esac
[[ -f $1 ]] || die "no configuration $1; there are: $(cd "$ROOT" && find configs -name "*.yaml" | sort | xargs)"
config=$(absolute "$1")
shift
use_python

plan=$(mktemp)
trap 'rm -f "$plan"' EXIT
"$PY" "$SCRIPTS/train_plan.py" "$config" -- "$@" >"$plan"
mapfile -d '' -t planned <"$plan"
save_dir=${planned[0]}
mkdir -p "$save_dir"
# Held by everything started from here, so a training that outlives this script still keeps others out.
exec 9>"$save_dir/lock"
flock -n 9 || die "another training is writing to $save_dir"
"$PY" "$SCRIPTS/train_plan.py" --mend "$save_dir"

compute_environment
say "checkpoints and log: $save_dir ($OMP_NUM_THREADS threads)"
command=(
    "$PY" -u -m fairseq_cli.hydra_train
    --config-dir "$(dirname "$config")" --config-name "$(basename "$config" .yaml)"
    "hydra.run.dir='${save_dir//\'/\\\'}/hydra'"
    "common.user_dir='${ROOT//\'/\\\'}/lightconv_plugin'"
    "${planned[@]:1}"
)
"${command[@]}" 2>&1 | tee -a "$save_dir/train.log"
