#!/usr/bin/env bash
# The benchmarks of a CPU, one after the other: operators, host time, training step, generation. Nothing else may run meanwhile.
#
#   benchmarks/cpu.sh [--quick] [--out DIR]
#
# Writes DIR/cpu_*.json (DIR: benchmarks/results) and prints the tables. In an environment of scripts/setup.sh, with the
# settings of scripts/train.sh (all cores). --quick: tiny sizes, to see that everything runs; needs --out.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/lib.sh"

out='' quick=()
while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --quick) quick=(--quick) && shift ;;
        --out)
            (($# > 1)) || die "--out needs a value"
            out=$2 && shift 2
            ;;
        *) die "unknown argument $1 (--help lists them)" ;;
    esac
done
[[ ! ${quick[*]} || $out ]] || die "--quick needs --out DIR: its figures are no evidence"
out=$(absolute "${out:-$ROOT/benchmarks/results}")
mkdir -p "$out"
use_python
# Those of the processes that train.
while read -r setting; do export "${setting?}"; done < <("$PY" -m lightconv_plugin.recipes.environment)
cd "$ROOT"

measure() { # NAME PROGRAM OPTIONS…: one benchmark, its JSON in cpu_NAME.json
    local name=$1 program=$2
    shift 2
    printf '\n== %s\n' "$name"
    "$PY" -m "benchmarks.$program" --json "$out/cpu_$name.json" "${quick[@]}" "$@"
}

measure operators operators
measure operators_lengths operators --shapes lengths --operators lightconv dynamicconv --without "our reference" attention
measure operators_apart apart
measure operators_bfloat16 operators --dtype bfloat16 --without "our reference"
measure host_time host_time
measure training_iwslt training
measure training_multi30k training --preset multi30k_en_de
measure training_iwslt_bfloat16 training --dtype bfloat16
measure training_multi30k_bfloat16 training --preset multi30k_en_de --dtype bfloat16
# Models of 200 million parameters: those of the papers, without fairseq's own convolutions, which would not fit beside them.
measure training_wmt training --preset wmt_en_de_big --sentences 16 --repeats 3 \
    --systems "DynamicConv (ours)" "LightConv (ours)" "TaLK (ours)" "fairseq Transformer"
# Each system in a process of its own, and as fairseq-generate is started: threads that wait may spin.
unset OMP_WAIT_POLICY
measure generation generation
