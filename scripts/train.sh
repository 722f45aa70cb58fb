#!/usr/bin/env bash
# Train a configuration with fairseq-hydra-train; rerun the same command to resume from the last checkpoint.
#
#   scripts/train.sh CONFIG [key=value …] [options]
#   scripts/train.sh configs/multi30k_en_de/dynamicconv.yaml common.seed=2 checkpoint.save_dir=runs/seed2
#   scripts/train.sh --processes 2 multi30k_en_de/dynamicconv
#
#   --processes N        processes on this machine
#   --nodes N --node-rank R --rendezvous HOST:PORT
#                        one of several machines; for Slurm: scripts/slurm_train.sh
#   --max-restarts N     restarts from the last checkpoint when a process dies
#   --timeout SECONDS    time after which a process that does not respond counts as dead
#
# This is `lightconv train`; see its --help for details. Relative paths in a configuration are relative to the checkout.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
be_lightconv train "$@"
