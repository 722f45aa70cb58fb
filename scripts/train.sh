#!/usr/bin/env bash
# Train a configuration with fairseq-hydra-train; the same command again resumes from the last checkpoint.
#
#   scripts/train.sh CONFIG.yaml [hydra overrides …]
#   scripts/train.sh configs/multi30k_en_de/dynamicconv.yaml optimization.max_epoch=30 common.seed=2
#   scripts/train.sh --processes 2 configs/multi30k_en_de/dynamicconv.yaml
#
#   --processes N        processes on this machine; default: one for each GPU, without a GPU (or with common.cpu=true) one.
#                        Several without a GPU exchange gradients by gloo
#   --nodes N --node-rank R --rendezvous HOST:PORT
#                        this machine is number R (0 … N-1) of N that train together: start the same command on each, with
#                        its R. HOST is machine 0 as the others reach it, PORT a free one there; save_dir and the data lie
#                        in a file system that all of them share. For Slurm: scripts/slurm_train.sh
#   --max-restarts N     times that the processes are started again from the last checkpoint when one of them dies
#                        (default 3, 0: never). Only if a checkpoint was written since they were last started: what
#                        fails at once would fail again. Ctrl-C and SIGTERM end the training
#   --timeout SECONDS    how long processes and machines wait for one that hangs or cannot be reached (default 600);
#                        after that it counts as dead. Only of several; longer than any of them may be busy alone
#
# Checkpoints, train.log (of several machines also train.nodeR.log: all that R printed) and tensorboard/ (another place by
# common.tensorboard_logdir=DIR, none by common.tensorboard_logdir=null) go to checkpoint.save_dir, the data come from
# task.data: paths in a configuration are relative to the checkout, paths in an override to the working directory. All
# cores are used (OMP_NUM_THREADS of each process, if set). A configuration's max_tokens × update_freq is its tokens an
# update; N processes share them, so that an update is the same on any number of machines.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# whole OPTION VALUE LEAST: put the whole number VALUE into `number`.
whole() {
    [[ $2 =~ ^[0-9]{1,6}$ ]] || die "$1 must be a whole number from $3, got: ${2:-nothing}"
    number=$((10#$2))
    ((number >= $3)) || die "$1 must be a whole number from $3, got: $2"
}

config='' processes=0 nodes='' node_rank='' rendezvous='' max_restarts=3 timeout=600 overrides=()
(($#)) || { usage >&2; exit 2; }
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --processes) whole "$1" "${2:-}" 1; processes=$number; shift ;;
        --nodes) whole "$1" "${2:-}" 1; nodes=$number; shift ;;
        --node-rank) whole "$1" "${2:-}" 0; node_rank=$number; shift ;;
        --rendezvous)
            [[ ${2:-} =~ ^[^:/]+:[0-9]+$ ]] || die "$1 must be HOST:PORT, got: ${2:-nothing}"
            rendezvous=$2
            shift
            ;;
        --max-restarts) whole "$1" "${2:-}" 0; max_restarts=$number; shift ;;
        --timeout) whole "$1" "${2:-}" 1; timeout=$number; shift ;;
        -*)
            die "no option $1; there are --processes, --nodes, --node-rank, --rendezvous, --max-restarts, --timeout," \
                "--help"
            ;;
        *) if [[ $config ]]; then overrides+=("$1"); else config=$1; fi ;;
    esac
    shift
done
[[ $config ]] || die "no configuration given: scripts/train.sh CONFIG.yaml"
[[ -f $config ]] || die "no configuration $config; there are: $(cd "$ROOT" && find configs -name "*.yaml" | sort | xargs)"
if [[ $nodes ]]; then
    [[ $node_rank && $rendezvous ]] || die "--nodes $nodes needs --node-rank and --rendezvous"
    ((node_rank < nodes)) || die "--node-rank must be below --nodes $nodes, got: $node_rank"
elif [[ $node_rank || $rendezvous ]]; then
    die "--node-rank and --rendezvous need --nodes"
fi
nodes=${nodes:-1} node_rank=${node_rank:-0}
config=$(absolute "$config")
use_python

plan=$(mktemp)
trap 'rm -f "$plan"' EXIT
"$PY" -m lightconv_plugin.recipes.training.plan --processes "$processes" --nodes "$nodes" "$config" -- "${overrides[@]}" >"$plan"
mapfile -d '' -t planned <"$plan"
rm -f "$plan"
save_dir=${planned[0]} processes=${planned[1]}
mkdir -p "$save_dir"
if ((node_rank == 0)); then
    # Held until the training has ended.
    exec 9>"$save_dir/lock"
    flock -n 9 || die "another training is writing to $save_dir"
fi
log=$save_dir/train.log
((nodes == 1)) || log=$save_dir/train.node$node_rank.log

if [[ -z ${OMP_NUM_THREADS:-} ]]; then
    cores=$(nproc)
    OMP_NUM_THREADS=$((cores > processes ? cores / processes : 1))
fi
compute_environment
say "checkpoints and log: $save_dir ($processes × $OMP_NUM_THREADS threads)"
exec "$PY" -m lightconv_plugin.recipes.training.launch \
    --processes "$processes" --nodes "$nodes" --node-rank "$node_rank" --rendezvous "$rendezvous" \
    --max-restarts "$max_restarts" --timeout "$timeout" --save-dir "$save_dir" --log "$log" -- \
    --config-dir "$(dirname "$config")" --config-name "$(basename "$config" .yaml)" \
    "${planned[@]:2}"
