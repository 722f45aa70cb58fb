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
    export PATH PYTHONPATH
}

lightconv() { "$PY" -m lightconv_plugin.tools "$@"; }

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

# download ADDRESS FILE CHECKSUM: fetch a file unless it is there already; the checksum is `digest`'s. A file is only given
# its name when it is whole and right, and an interrupted transfer goes on where it stopped. ADDRESS may be a local path.
download() {
    local address=$1 file=$2 checksum=$3 part=$2.part found
    [[ -f $file && $(digest "$file") == "$checksum" ]] && return
    mkdir -p "$(dirname "$file")"
    if [[ $address != *://* ]]; then
        [[ -f $address ]] || die "no file $address"
        cp -- "$address" "$part"
    else
        command -v curl >/dev/null || die "curl is needed to download $address (on Debian: apt install curl)"
        say "downloading $address"
        local curl=(curl -fL --retry 3 --connect-timeout 20 --progress-bar -o "$part")
        # What cannot be resumed (no ranges, or another file) is started over.
        if ! { [[ -f $part ]] && "${curl[@]}" -C - "$address" && [[ $(digest "$part") == "$checksum" ]]; }; then
            rm -f -- "$part"
            "${curl[@]}" "$address" ||
                die "cannot download $address: without a network, put the files into a folder and give it by --data"
        fi
    fi
    found=$(digest "$part")
    if [[ $found != "$checksum" ]]; then
        rm -f -- "$part"
        die "$address is not the expected file: its checksum is $found, expected $checksum"
    fi
    mv -- "$part" "$file"
}

# digest FILE[.part]: of a .gz the SHA-256 of the text inside, which does not change with the packing; of another file
# the name that git gives to its content (git hash-object), by which a file in a repository is known without having it.
digest() {
    case ${1%.part} in
        *.gz) gzip -dc -- "$1" 2>/dev/null | sha256sum || true ;;
        *) { printf 'blob %s\0' "$(stat -c %s -- "$1")"; cat -- "$1"; } | sha1sum ;;
    esac | cut -d ' ' -f 1
}

absolute() { realpath -m -- "$1"; }
