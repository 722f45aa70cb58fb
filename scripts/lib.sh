# shellcheck shell=bash
# Sourced by the other scripts.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P) # by any name of the checkout: the set-up depends on it
SCRIPTS=$ROOT/scripts
# `python -m lightconv_plugin` would look for every module in the working directory first.
LIGHTCONV='import sys; sys.path[:] = filter(None, sys.path)
from lightconv_plugin.cli.main import main; sys.exit(main())'

say() { printf '%s\n' "$*" >&2; }

die() {
    printf '%s: error: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# The header comment of the calling script is its help.
usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }

# Puts the interpreter with fairseq and this plugin first in PATH and sets PY to it: that of the checkout's .venv
# (created if it is missing or out of date), or the interpreter in LIGHTCONV_PYTHON, which is used as it is.
use_python() {
    if [[ -n ${LIGHTCONV_PYTHON:-} ]]; then
        PY=$(command -v -- "$LIGHTCONV_PYTHON") || die "LIGHTCONV_PYTHON=$LIGHTCONV_PYTHON is not a program"
    else
        "$SCRIPTS/setup.sh" --quiet
        PY=$ROOT/.venv/bin/python
    fi
    PATH=$(dirname "$PY"):$PATH
    PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} # the plugin of this checkout, installed or not
    export PATH PYTHONPATH
    export LIGHTCONV_HOME=${LIGHTCONV_HOME:-$ROOT}
}

# Replaces the calling script by `lightconv "$@"`. --help does not create an environment: it comes from an existing one,
# or is the header of the script.
be_lightconv() {
    local argument
    for argument in "${@:2}"; do
        [[ $argument == -h || $argument == --help ]] || continue
        if [[ -z ${LIGHTCONV_PYTHON:-} && ! -x $ROOT/.venv/bin/python ]]; then
            usage
            say "(run scripts/setup.sh first for the complete --help)"
            exit 0
        fi
        LIGHTCONV_PYTHON=${LIGHTCONV_PYTHON:-$ROOT/.venv/bin/python}
    done
    use_python
    exec "$PY" -c "$LIGHTCONV" "$@"
}

lightconv() { "$PY" -c "$LIGHTCONV" "$@"; }

absolute() { realpath -m -- "$1"; }
