#!/usr/bin/env bash
# Trainings of two processes, and of two machines, of which one is slowed, killed, frozen or cut off, on this machine.
#
#   scripts/dev/torture_distributed.sh [CASE …] [--repeat N] [--seed N]
#
#   CASE          slowed, killed, frozen, frozen_no_restarts: a process; machine_slowed, machine_killed, machine_frozen,
#                 connection_cut: a machine. Default: all
#   --repeat N    times that each is tried (default 1); --seed N chooses other processes and moments (default 1)
#
# Each training must end by itself in time, with status 0 or a clear error; every checkpoint that it leaves must be whole,
# and the same command again must end with the state of an undisturbed training, bit for bit. A line for each; exit
# status 1 if anything was lost. All of it takes about ten minutes on two cores; nothing is left behind.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

case ${1:-} in -h | --help) usage; exit 0 ;; esac
use_python
exec "$PY" -m tests.robustness.distributed "$@"
