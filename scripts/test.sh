#!/usr/bin/env bash
# Run everything that must pass before a commit: ruff, shellcheck, codespell, import-linter, mypy, then pytest
# (arguments are passed on to it).
#
#   scripts/test.sh [pytest options …]

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
use_python
cd "$ROOT"
"$PY" -m ruff check .
shellcheck -x scripts/*.sh scripts/dev/*.sh benchmarks/*.sh .ci/run
"$PY" -m codespell_lib lightconv_plugin cpu cuda configs scripts benchmarks docs tests ./*.md ./*.py ./*.toml
lint-imports --no-cache --no-logo
"$PY" -m mypy
# A test file that cannot be imported is said now: the processes below report it after all others have ended.
collected=$("$PY" -m pytest --collect-only -qq "$@" 2>&1) || { echo "$collected" >&2; exit 1; }
# Compile the kernels once here, so that it does not count for the time limit of the first test that needs them. A
# failure shows in the tests.
lightconv build cpu || true
# One process per core, since threads within a test would only compete. The tests of a file stay together because they
# share trained models. tests/conftest.py defines the order: longest first.
cores=$(env -u OMP_NUM_THREADS nproc)
export OMP_NUM_THREADS=1
# A process that a hanging test ended (pyproject.toml) is replaced twice, not once for each time that the test hangs.
exec "$PY" -m pytest -n "$cores" --dist loadfile --no-loadscope-reorder --max-worker-restart 2 "$@"
