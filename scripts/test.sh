#!/usr/bin/env bash
# Everything that must hold before a change is committed: ruff, shellcheck, then pytest (arguments are passed to it).
#
#   scripts/test.sh [pytest options …]

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

use_python
cd "$ROOT"
"$PY" -m ruff check .
shellcheck -x scripts/*.sh scripts/dev/*.sh benchmarks/*.sh .ci/run
# Compiled here once, and not within the time limit of whichever test comes first. Tests say what a failure means.
lightconv build cpu || true
# One process a core; a test's own threads would only compete. A file's tests stay together: they share what was trained.
cores=$(env -u OMP_NUM_THREADS nproc)
export OMP_NUM_THREADS=1
exec "$PY" -m pytest -n "$cores" --dist loadfile "$@"
