#!/usr/bin/env bash
# Collects the wheels that benchmarks/gpu_fairseq.sh installs on a machine without a network.
#
#   benchmarks/wheels.sh DIR [--python PYTHON]
#
# PYTHON (default python3.12) is an interpreter of the version that the other machine has, with pip. The versions are those
# of scripts/constraints.txt; packages that are published as sources only are built here. Not taken along, as they have to be
# there: torch, torchaudio, numpy, scikit-learn, cython. A second call fetches what is missing.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# fairseq, what it and the plugin import, and what those need; each in the order of who needs it.
PACKAGES=(
    fairseq-fixed bitarray cffi pycparser regex sacrebleu tqdm packaging
    hydra-core omegaconf antlr4-python3-runtime PyYAML
    portalocker tabulate colorama lxml
    sacremoses subword-nmt sentencepiece click joblib cloudpickle mock
)

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }
die() {
    printf '%s: error: %s\n' "${0##*/}" "$*" >&2
    exit 2
}

folder='' python=python3.12
while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --python)
            (($# > 1)) || die "--python needs a value"
            python=$2 && shift
            ;;
        -*) die "unknown argument $1 (--help lists them)" ;;
        *)
            [[ -z $folder ]] || die "one folder, got $folder and $1"
            folder=$1
            ;;
    esac
    shift
done
[[ -n $folder ]] || die "no folder was named: benchmarks/wheels.sh DIR"
command -v "$python" >/dev/null || die "$python is needed: name an interpreter by --python"
mkdir -p "$folder"
"$python" -m pip --disable-pip-version-check wheel --no-deps --wheel-dir "$folder" --find-links "$folder" \
    --constraint "$ROOT/scripts/constraints.txt" "${PACKAGES[@]}"
for package in "${PACKAGES[@]}"; do
    name=${package//[-.]/[-_.]}
    find "$folder" -iname "$name-*.whl" | grep -q . || die "no wheel of $package came"
done
printf '%s wheels, %s: %s\n' "$(find "$folder" -name '*.whl' | wc -l)" "$(du -sh "$folder" | cut -f1)" "$folder"
