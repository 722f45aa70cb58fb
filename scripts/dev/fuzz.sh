#!/usr/bin/env bash
# Compare the operators with float64 on random cases for a given time: every operator, type and option.
#
#   scripts/dev/fuzz.sh MINUTES [--seed N] [--operators lightconv,dynamicconv,talkconv] [--backends cpu,reference]
#                   [--cases N] [--threads N] [--quiet]
#
# Backends: cpu (the native kernels), reference, cuda-on-host (the CUDA sources on the CPU under ASan and UBSan:
# slower), cuda. Default: cpu and reference. Prints the number of cases and the speed. A failing case is shrunk and
# printed, ready to be added to tests/robustness/fuzz/test_fuzz.py; exit status 1.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
    '') usage >&2; die "MINUTES is needed" ;;
esac
use_python
cd "$ROOT"
exec "$PY" -m tests.robustness.fuzz.run "$@"
