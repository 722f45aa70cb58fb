#!/usr/bin/env bash
# Train a configuration on several machines of a Slurm cluster; an example to copy and adapt. From the checkout:
#
#   sbatch scripts/slurm_train.sh CONFIG.yaml [hydra overrides …]
#   sbatch --nodes=4 --gpus-per-node=4 --partition=NAME scripts/slurm_train.sh configs/wmt16_en_de/dynamicconv.yaml
#
# Runs one scripts/train.sh on each machine, with one process per GPU; its options are valid here, too. The checkout,
# the data and save_dir must be in a file system that all machines share. Run scripts/setup.sh first. The machines meet
# at the first one, on port 20000 + job number modulo 20000 (or RENDEZVOUS_PORT). When a process dies, train.sh restarts
# all processes from the last checkpoint; when a machine is lost, Slurm restarts the job (--requeue); after the time
# limit, rerun the same command to resume.

#SBATCH --job-name=lightconv
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=48:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log

set -euo pipefail

die() {
    printf 'slurm_train.sh: error: %s\n' "$*" >&2
    exit 1
}

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }

case ${1:-} in
    -h | --help) usage; exit 0 ;;
    '') usage >&2; exit 2 ;;
esac
[[ ${SLURM_JOB_ID:-} ]] || die "this is for sbatch: sbatch scripts/slurm_train.sh CONFIG.yaml; without Slurm: scripts/train.sh"
# Slurm runs a copy of this file in another folder.
train=$SLURM_SUBMIT_DIR/scripts/train.sh
[[ -x $train ]] || die "no $train: call sbatch in the checkout"
machines=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
rendezvous=${machines%%$'\n'*}:${RENDEZVOUS_PORT:-$((20000 + SLURM_JOB_ID % 20000))}

# The part in single quotes is for the shell on each machine, where SLURM_NODEID is its number. When a machine fails,
# srun ends the others, which would otherwise wait for it. Under sbatch --export=NONE it passes only Slurm's variables on.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} bash -c \
    'exec "$0" --nodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" "$@"' "$train" --rendezvous "$rendezvous" "$@"
