#!/usr/bin/env bash
# Run the native kernels for the CPU under gcc's address, undefined-behaviour and thread sanitizers.
#
#   scripts/dev/sanitize.sh [address|undefined|thread …] [--cases N] [--seed N]
#
# Default: all three, 2000 of the fuzzer's cases and 200 beam searches under each (some minutes), after compiling cpu/
# once for each (a minute or two). Under the thread sanitizer the kernels' ranges run on four threads of the standard
# library, since it does not know OpenMP's; a search has such threads anyway. Exit status 1 on any report. The CUDA
# sources run on the host under the first two in every run of the tests
# (tests/cuda), and in scripts/dev/fuzz.sh --backends cuda-on-host.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
use_python
cd "$ROOT"
exec "$PY" -m tests.robustness.sanitize.run "$@"
