# shellcheck shell=bash
# Sourced by the scripts beside it.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SCRIPTS=$ROOT/scripts

say() { printf '%s\n' "$*" >&2; }

die() {
    printf '%s: error: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# The header comment of the calling script is its help.
usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }

# Puts the interpreter with fairseq and this plugin first in PATH and names it in PY: the checkout's .venv (made if it is
# missing or out of date), or, when LIGHTCONV_PYTHON names an interpreter, that one as it is.
use_python() {
    if [[ -n ${LIGHTCONV_PYTHON:-} ]]; then
        PY=$(command -v -- "$LIGHTCONV_PYTHON") || die "LIGHTCONV_PYTHON=$LIGHTCONV_PYTHON is not a program"
    else
        "$SCRIPTS/setup.sh" --quiet
        PY=$ROOT/.venv/bin/python
    fi
    PATH=$(dirname "$PY"):$PATH
    PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} # the plugin of this checkout, installed or not
    LIGHTCONV_HOME=$ROOT # data/ and runs/ are the checkout's
    export PATH PYTHONPATH LIGHTCONV_HOME
}

lightconv() { "$PY" -m lightconv_plugin "$@"; }

# Settings of a process that computes; what the caller has set stays.
compute_environment() {
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
    # Threads that spin while they wait are ruinous as soon as anything else runs on the cores.
    export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
    # The logits of a batch are hundreds of megabytes. glibc gives blocks of that size back to the system at once and has them
    # zeroed page by page at the next use, a third of the time of an update on a CPU; this keeps them.
    export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-4294967296}
    export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-8589934592}
    # What hydra says of fairseq's use of it at every start; other warnings stay.
    local hydra=(hydra.main hydra._internal.hydra hydra.core.default_element __main__ runpy)
    PYTHONWARNINGS=$(printf 'ignore::UserWarning:%s,' "${hydra[@]}")${PYTHONWARNINGS:-}
    export PYTHONWARNINGS
}

absolute() { realpath -m -- "$1"; }
