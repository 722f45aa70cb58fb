#!/usr/bin/env bash
# Make .venv in this checkout: torch, fairseq, this plugin with everything that it and its tests need, in the versions of
# scripts/constraints.txt; and compile the CPU kernels.
#
#   scripts/setup.sh [--quiet]           some minutes the first time; after that there is nothing to do
#   PYTHON=python3.12 scripts/setup.sh   choose the interpreter (3.10 to 3.13)
#   scripts/setup.sh --venv DIR --torch 2.6.0
#                                        an environment elsewhere, in a new folder or one of an earlier set-up, with
#                                        another torch (newest: whichever that is) than the pinned one
#                                        (scripts/dev/test_matrix.sh makes several)
#   scripts/setup.sh --venv DIR --without-fairseq
#                                        the operators, exported models and Hugging Face's classes alone, with what their
#                                        tests need
#
# Rerun an interrupted set-up to resume it. --quiet prints nothing if there is nothing to do. pip's own settings apply
# (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, proxies …).

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

venv=$ROOT/.venv quiet='' torch='' fairseq=1
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --quiet) quiet=1 ;;
        --venv)
            [[ ${2:-} ]] || die "--venv needs a folder"
            venv=$(absolute "$2")
            shift
            ;;
        --without-fairseq) fairseq='' ;;
        --torch)
            [[ ${2:-} =~ ^([0-9]+(\.[0-9]+)+(\+[a-z0-9.]+)?|newest)$ ]] ||
                die "--torch must be a version such as 2.6.0, or newest, got: ${2:-nothing}"
            torch=$2
            shift
            ;;
        *) die "unknown argument $1 (try --help)" ;;
    esac
    shift
done
[[ $venv != "$ROOT/.venv" || -z $torch && $fairseq ]] ||
    die "--torch and --without-fairseq need --venv DIR: the scripts would make .venv anew, with the pinned torch and" \
        "fairseq (then use the other one by LIGHTCONV_PYTHON=DIR/bin/python)"
[[ $ROOT/ != "$venv"/* ]] || die "--venv $venv has this checkout in it: name a new folder"
stamp=$venv/.lightconv-setup
log=$venv/setup.log
constraints=$SCRIPTS/constraints.txt

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# What the environment depends on. The path is part of it: neither a venv nor an editable installation can be moved.
fingerprint() {
    { echo "$ROOT" "$(version_of "$venv/bin/python")$torch$fairseq"; cat "$SCRIPTS/setup.sh" "$SCRIPTS/constraints.txt" "$ROOT/pyproject.toml"; } |
        sha256sum
}

is_done() {
    [[ -f $stamp && $(<"$stamp") == "$(fingerprint)" ]] &&
        [[ -z ${PYTHON:-} || $(version_of "$PYTHON") == "$(version_of "$venv/bin/python")" ]]
}

# Whether the environment may be changed or made anew: a set-up marks the folder when it begins (`stamp`, still empty). One
# of an earlier version that was interrupted has pip's log alone.
is_own() {
    [[ $venv == "$ROOT/.venv" || ! -e $venv || -f $stamp ]] && return
    [[ -d $venv && -z $(ls -A -- "$venv") ]] && return
    [[ -f $venv/pyvenv.cfg && -f $log ]] && head -n 1 -- "$log" | grep -q ' Using pip '
}

choose_python() {
    local candidate version
    if [[ -n ${PYTHON:-} ]]; then
        version=$(version_of "$PYTHON") || die "PYTHON=$PYTHON is not a Python interpreter"
        [[ $version == 3.1[0123] ]] || die "PYTHON=$PYTHON is Python $version; fairseq needs 3.10, 3.11, 3.12 or 3.13"
        python=$PYTHON
        return
    fi
    # An existing environment keeps its version. Other machines may be using one that does not run here.
    [[ ! -e $venv/bin/python && ! -L $venv/bin/python ]] || version_of "$venv/bin/python" >/dev/null ||
        die "$venv/bin/python does not run on this machine: it is $(absolute "$venv/bin/python")" \
            "(of a module to load?); PYTHON=… makes $venv anew"
    for candidate in "$venv/bin/python" python3.11 python3.12 python3.13 python3.10 python3; do
        version=$(version_of "$candidate") || continue
        [[ $version == 3.1[0123] ]] || continue
        python=$candidate
        return
    done
    die "no Python 3.10, 3.11, 3.12 or 3.13 found: install one (Debian 12: sudo apt install python3 python3-venv python3-dev)" \
        "or choose one with PYTHON=/path/to/python"
}

check_machine() {
    local version available include
    version=$(version_of "$python")
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python has no venv module: sudo apt install python$version-venv"
    # fairseq has a ready wheel for 3.12 only; elsewhere its C++ and Cython parts are compiled.
    if [[ $version != 3.12 ]]; then
        command -v "${CXX:-g++}" >/dev/null ||
            die "no C++ compiler (${CXX:-g++}), which fairseq needs: sudo apt install g++"
        include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
        [[ -f $include/Python.h ]] ||
            die "no Python headers ($include/Python.h), which fairseq needs: sudo apt install python$version-dev"
    fi
    available=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 {print int($4 / 1024)}')
    [[ -d $venv || $available -ge 3000 ]] ||
        die "not enough free disk space in $(dirname "$venv"): $available MB, about 3000 MB are needed"
}

# pip with its messages on the terminal and in the log, and the usual causes of a failure in one line.
pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --log "$log" \
        -c "$constraints" "$@" >&2 && return
    local cause="pip failed"
    if grep -q 'No space left on device' "$log"; then
        cause="the disk is full"
    elif grep -qE 'NewConnectionError|NameResolutionError|is unreachable|Connection refused|(Connect|Read)Timeout' "$log"; then
        cause="no network, or the package index cannot be reached"
    elif grep -q 'Python.h: No such file' "$log"; then
        cause="no Python headers: sudo apt install python$(version_of "$venv/bin/python")-dev"
    fi
    die "$cause while installing: ${*: -1} (log: $log); rerun the same command to resume"
}

install() {
    local version
    version=$(version_of "$venv/bin/python")
    say "1/4 torch"
    pip_install "torch"
    if [[ $fairseq ]]; then
        install_fairseq "$version"
    else
        pip_install numpy setuptools wheel ninja
    fi
    say "3/4 this plugin, with what its recipes and its tests need"
    if [[ $fairseq ]]; then
        pip_install --no-build-isolation -e "${ROOT}[all,dev,docs]"
        "$venv/bin/python" -c 'import fairseq, lightconv_plugin, sacremoses, subword_nmt' >>"$log" 2>&1 ||
            die "the new environment does not work: $(tail -n 1 "$log") (log: $log)"
    else
        pip_install --no-build-isolation -e "${ROOT}[text,dev]"
    fi
    say "4/4 compiling the CPU kernels on $(nproc) cores (about 35 s on two)"
    # No reason to fail: without them the operators compute in plain PyTorch, and the first use tries again.
    "$venv/bin/python" -m lightconv_plugin build cpu >>"$log" 2>&1 ||
        say "warning: the CPU kernels could not be compiled: $(tail -n 1 "$log")"
}

# install_fairseq PYTHON_VERSION
install_fairseq() {
    if [[ $1 == 3.12 ]]; then say "2/4 fairseq"; else say "2/4 fairseq, which is compiled (about two minutes)"; fi
    pip_install numpy cython setuptools wheel ninja
    case $1 in
        3.10) # Its omegaconf 2.0.6 has metadata that pip 24.1 and later refuse; its build wants a setuptools of its own.
            pip_install 'pip<24.1'
            pip_install fairseq
            ;;
        3.11 | 3.13) # Isolated, its build would download another torch, with 2.3 GB of CUDA.
            pip_install --no-build-isolation fairseq-fixed
            ;;
        3.12) pip_install --only-binary fairseq-fixed fairseq-fixed ;;
    esac
}

is_done && { [[ -n $quiet ]] || say "set-up: $venv is up to date"; exit 0; }
[[ -d ${venv%/*} ]] || mkdir -p "${venv%/*}"
[[ -w ${venv%/*} ]] || die "cannot write to ${venv%/*}"
exec 9>>"$venv.lock"
flock -n 9 || { say "set-up: waiting for another set-up of this checkout"; flock 9; }
is_done && exit 0

is_own || die "$venv exists, and no set-up has made it: name a new folder"
SECONDS=0
python=''
choose_python
check_machine
if [[ ! -x $venv/bin/pip || $(version_of "$venv/bin/python") != "$(version_of "$python")" ]]; then
    say "set-up: $venv with $("$python" --version)"
    rm -rf -- "$venv"
    mkdir -p -- "$venv"
    : >"$stamp"
    "$python" -m venv "$venv"
fi
: >"$stamp"
: >"$log"
if [[ $torch ]]; then
    # What torch pins itself must be free too.
    grep -vE '^(torch|sympy|triton)==' "$constraints" >"$venv/constraints.txt"
    [[ $torch == newest ]] || printf 'torch==%s\n' "$torch" >>"$venv/constraints.txt"
    constraints=$venv/constraints.txt
fi
install
fingerprint >"$stamp"
say "set-up: done in $SECONDS s"
