#!/usr/bin/env bash
# Run for a long time and fail if memory grows: 10,000 calls of the operators, 1,000 updates of fairseq-train, 100,000
# translated lines.
#
#   scripts/dev/soak.sh [operators|training|translation …] [--count N] [--allowed MIB]
#
# Uses tiny models and takes a few minutes. Prints the resident memory at the beginning, in the middle and at the end;
# exit status 1 if it grew by more than 8 MiB (--allowed) in the second half.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
use_python
cd "$ROOT"
exec "$PY" -m tests.robustness.soak.run "$@"
