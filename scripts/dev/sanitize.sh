#!/usr/bin/env bash
# Run the native kernels for the CPU under gcc's address, undefined-behaviour and thread sanitizers.
#
#   scripts/dev/sanitize.sh [address|undefined|thread …] [--cases N] [--seed N]
#
# Default: all three, each with 2000 of the fuzzer's cases and 200 beam searches (a few minutes), after compiling cpu/
# for each sanitizer (a minute or two). Under the thread sanitizer, the kernels run on four threads of the standard
# library, since it does not support OpenMP's; a search uses such threads anyway. Exit status 1 on any report. The CUDA
# sources run on the host under the first two sanitizers in every test run (tests/cuda), and in scripts/dev/fuzz.sh
# --backends cuda-on-host.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
use_python
cd "$ROOT"
exec "$PY" -m tests.robustness.sanitize.run "$@"
