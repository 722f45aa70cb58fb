#!/usr/bin/env bash
# Kill commands with SIGKILL at random moments, rerun them, and compare the result with that of an undisturbed run.
#
#   scripts/dev/torture.sh [--kills N] [--minutes M] [--seed N] [WHAT …]
#   scripts/dev/torture.sh --kills 200 average reproduce
#
#   WHAT         average, build, reproduce, prepare_TASK (each scripts/prepare_TASK.sh), train, reproduce_smoke;
#                default: all of them, which takes hours
#   --kills N    kills of each (default 50)
#   --minutes M  at most this long for each (default 60)
#   --seed N     determines the moments and targets of the kills (default 1)
#   --names      no kills: run each once in folders whose names have spaces, quotes, newlines, a leading dash …, which
#                must change nothing
#   --full-disk  no kills: run each on file systems that are too small (as root), and enlarge these after it has failed
#
# Three in four kills hit all processes at once, the fourth only the command, whose children survive. A trial has one to
# three kills. Then the same command runs to its end, and its results must equal those of an undisturbed run: the same
# file names and, bit for bit, all files except logs; of checkpoints, the model, the optimiser state and the position.
# Prints a table; the exit status is 1 if anything differs. Works on miniatures, in a temporary folder in $TMPDIR.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
use_python
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # other numbers of threads change the bits of sums
cd "$ROOT"
exec "$PY" -m tests.robustness "$@"
