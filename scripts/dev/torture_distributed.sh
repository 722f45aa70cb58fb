#!/usr/bin/env bash
# Train with two processes, or on two simulated machines, while one of them is slowed, killed, frozen or disconnected.
#
#   scripts/dev/torture_distributed.sh [CASE …] [--repeat N] [--seed N]
#
#   CASE          slowed, killed, frozen, frozen_no_restarts: a process; machine_slowed, machine_killed, machine_frozen,
#                 connection_cut: a machine. Default: all
#   --repeat N    repetitions of each case (default 1)
#   --seed N      chooses other processes and moments (default 1)
#
# Each training must end by itself in time, with status 0 or a clear error. Every checkpoint that it leaves must be
# complete, and rerunning the same command must end in the same state as an undisturbed training, bit for bit. Prints
# one line per case; exit status 1 if anything was lost. All cases take about ten minutes on two cores; no files are
# left.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

case ${1:-} in -h | --help) usage; exit 0 ;; esac
use_python
exec "$PY" -m tests.robustness.distributed "$@"
