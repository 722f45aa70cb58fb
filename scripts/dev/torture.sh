#!/usr/bin/env bash
# Kill work with SIGKILL at random moments, start it again, and compare what it leaves with an undisturbed run.
#
#   scripts/dev/torture.sh [--kills N] [--minutes M] [--seed N] [WHAT …]
#   scripts/dev/torture.sh --kills 200 average reproduce
#
#   WHAT         average, build, reproduce, prepare_TASK (each scripts/prepare_TASK.sh), train, reproduce_smoke;
#                without it, all of them: some hours
#   --kills N    of each (default 50)
#   --minutes M  at most, of each (default 60)
#   --seed N     of the moments and of what is hit (default 1)
#   --names      no kills: each once in folders whose names have spaces, quotes, newlines, a leading dash …, which must
#                change nothing
#   --full-disk  no kills: each on file systems that are too small (as root), which are enlarged after it has failed
#
# Three in four kills hit every process at once, the fourth the command alone, whose children live on. A trial has one to
# three kills; then the same command runs to its end, and what it leaves must be that of an undisturbed run: the same
# names, every file bit for bit but logs and checkpoints, of which model, optimiser and position are. Prints a table;
# the status is 1 where anything differs. Works on miniatures, in a folder of its own below $TMPDIR.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
use_python
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # with other numbers of threads, sums have other bits
cd "$ROOT"
exec "$PY" -m tests.robustness "$@"
