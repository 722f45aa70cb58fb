#!/usr/bin/env bash
# Run fairseq's own tests on the installed fairseq, without and with this plugin, and compare the outcomes.
#
#   scripts/dev/fairseq_tests.sh FAIRSEQ_CHECKOUT [NAME …]
#   scripts/dev/fairseq_tests.sh ~/src/fairseq sequence_generator train
#
#   FAIRSEQ_CHECKOUT  a clone of fairseq; only its tests/ and examples/ are used, in a copy
#   NAME              run only tests/test_NAME.py; default: all twelve files about code that the plugin patches,
#                     about half an hour on two cores
#
# Prints how many tests passed in each run. If tests pass only without the plugin, prints their names; exit status 1.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
    '') usage >&2; exit 2 ;;
esac
checkout=$(absolute "$1")
shift
use_python
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
cd "$ROOT"
exec "$PY" -m tests.robustness.fairseq_suite "$checkout" "$@"
