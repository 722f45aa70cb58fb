#!/usr/bin/env bash
# Run the tests with several versions of Python, fairseq and torch, each in its own environment.
#
#   scripts/dev/test_matrix.sh DIR [--only NAME,…] [--all] [--python VERSION=INTERPRETER]… [--add NAME:PYTHON:TORCH]…
#   scripts/dev/test_matrix.sh ~/lightconv-matrix --only py3.10,py3.12
#
#   DIR         folder for the environments (2 to 8 GB each), their logs and results.tsv; existing ones are reused
#   --only      only some of the environments:
#                 py3.10          fairseq 0.12.2,  the pinned torch      py3.11-oldest   fairseq-fixed, torch 2.6.0
#                 py3.11, py3.12  fairseq-fixed,   the pinned torch      py3.12-newest   fairseq-fixed, the newest torch
#                 py3.13          fairseq-fixed,   the pinned torch
#                 py3.11-alone    no fairseq: operators, modules, exported models and Hugging Face's classes
#   --add       one more, with a version of torch, "pinned" or "newest", as in --add mine:3.12:2.9.1
#   --all       all of scripts/test.sh, a quarter of an hour each. Without it, only tests of code that depends on
#               changing interfaces of torch and fairseq, half as long: fairseq's patches, configurations, models,
#               modules, torch.library, torch.export, decoding, checkpoints of older versions, averaging, conversion,
#               training by one and several processes
#   --python    path of an interpreter, if neither PATH nor ~/.pyenv/versions has pythonVERSION
#
# Prints a table of all runs in DIR so far: versions, numbers of tests passed, failed and skipped, date. Exit status 1
# if anything failed or could not be installed.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

environments=(
    py3.10:3.10:pinned py3.11:3.11:pinned py3.12:3.12:pinned py3.13:3.13:pinned py3.11-oldest:3.11:2.6.0 py3.12-newest:3.12:newest
    py3.11-alone:3.11:without-fairseq
)
subset=(
    tests/compat tests/criterions tests/recipes/test_configs.py tests/models tests/modules tests/deployment
    tests/ops/test_registration.py tests/ops/test_recording.py tests/ops/test_residual.py tests/ops/test_loss.py
    tests/generation/test_models.py tests/generation/test_translator.py tests/checkpoints/test_average.py
    tests/checkpoints/test_convert.py tests/recipes/training/test_training.py tests/recipes/training/test_train_distributed.py
    tests/robustness/test_golden.py tests/robustness/test_wrong_configurations.py
)

# The tests that run without fairseq; those in them that need it are skipped.
alone=(
    tests/ops tests/modules tests/text tests/hf tests/deployment tests/checkpoints tests/generation
)

folder='' only='' all='' interpreters=()
(($#)) || { usage >&2; exit 2; }
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --all) all=1 ;;
        --only | --add | --python)
            [[ ${2:-} ]] || die "$1 needs a value"
            case $1 in
                --only) only=$2 ;;
                --add)
                    [[ $2 =~ ^[A-Za-z0-9._+-]+:3\.[0-9]+:[A-Za-z0-9.+]+$ ]] ||
                        die "--add must be NAME:PYTHON:TORCH, got: $2"
                    environments+=("$2")
                    ;;
                --python)
                    [[ $2 =~ ^3\.[0-9]+=.+$ ]] || die "--python must be VERSION=INTERPRETER, got: $2"
                    interpreters+=("$2")
                    ;;
            esac
            shift
            ;;
        -*) die "no option $1; there are --only, --add, --all, --python, --help" ;;
        *) [[ -z $folder ]] || die "one folder, got: $folder and $1"; folder=$1 ;;
    esac
    shift
done
[[ $folder ]] || die "no folder given: scripts/dev/test_matrix.sh DIR"
for name in ${only//,/ }; do
    [[ " ${environments[*]}" == *" $name:"* ]] || die "--only: no environment $name; there are ${environments[*]%%:*}"
done

# interpreter VERSION: the path of a working Python of this version (a pyenv shim may not work).
interpreter() {
    local given found
    for given in "${interpreters[@]}"; do
        [[ ${given%%=*} != "$1" ]] || { command -v -- "${given#*=}"; return; }
    done
    for found in "$(command -v "python$1")" ~/.pyenv/versions/"$1".*/bin/python; do
        if [[ -x $found ]] && "$found" -c '' 2>/dev/null; then echo "$found"; return; fi
    done
    return 1
}

# version_of_all PYTHON: its version and those of fairseq, torch and numpy, separated by tabs.
version_of_all() {
    "$1" - <<'PY'
import platform
from importlib import metadata

def version(*names):
    for name in names:
        try:
            return f"{name} {metadata.version(name)}" if len(names) > 1 else metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"

print(platform.python_version(), version("fairseq-fixed", "fairseq"), version("torch"), version("numpy"), sep="\t")
PY
}

# one NAME PYTHON TORCH: install and test; adds a line to results.tsv. Status 1 on failure.
one() {
    local name=$1 python venv=$folder/$1 options=() result status=0 tests=() counts what=${all:+all}
    if ! python=$(interpreter "$2"); then
        result=$(printf '%s\t-\t-\t-\tno Python %s: install it, or name it by --python %s=…' "$2" "$2" "$2")
        status=1
    else
        case $3 in
            pinned) ;;
            without-fairseq) options=(--without-fairseq) ;;
            *) options=(--torch "$3") ;;
        esac
        say "$name: set-up ($folder/$name.setup.log)"
        if ! PYTHON=$python "$SCRIPTS/setup.sh" --venv "$venv" "${options[@]}" >"$folder/$name.setup.log" 2>&1; then
            result=$(printf '%s\t-\t%s\t-\tnot installed: %s' "$2" "$3" "$(tail -n 1 "$folder/$name.setup.log")")
            status=1
        else
            say "$name: tests ($folder/$name.log)"
            [[ $all ]] || tests=("${subset[@]}")
            [[ $3 != without-fairseq ]] || tests=("${alone[@]}")
            LIGHTCONV_PYTHON=$venv/bin/python "$SCRIPTS/test.sh" -q "${tests[@]}" >"$folder/$name.log" 2>&1 || status=1
            counts=$(tail -n 1 "$folder/$name.log" | tr -d '=')
            [[ $counts == *passed* || $counts == *failed* ]] || counts="did not run: $counts"
            result=$(printf '%s\t%s' "$(version_of_all "$venv/bin/python")" "${counts# }")
        fi
    fi
    printf '%s\t%s\t%s\t%s\n' "$name" "$(date -u +%F\ %H:%M)" "${what:-versions}" "$result" >>"$folder/results.tsv"
    return $status
}

mkdir -p "$folder"
folder=$(absolute "$folder")
exec 9>"$folder/lock"
flock -n 9 || die "another matrix is working in $folder"
failed=0
for environment in "${environments[@]}"; do
    IFS=: read -r name python torch <<<"$environment"
    if [[ $only && ",$only," != *",$name,"* ]]; then continue; fi
    one "$name" "$python" "$torch" || failed=1
done
{ printf 'environment\twhen (UTC)\ttests\tPython\tfairseq\ttorch\tnumpy\tresult\n'; cat "$folder/results.tsv"; } |
    awk -F '\t' '
        { printf "|"; for (i = 1; i <= 8; ++i) printf " %s |", $i; print "" }
        NR == 1 { print "|---|---|---|---|---|---|---|---|" }'
exit $failed
