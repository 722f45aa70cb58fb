#!/usr/bin/env bash
# From an empty machine to a BLEU score: a small DynamicConv beside a Transformer of the same size.
#
#   scripts/demo.sh [DIR] [--updates N] [--seed N] [--work DIR] [--src XX --tgt YY]
#
# Without DIR the corpus is German–English text written by a small grammar (scripts/grammar_corpus.py): some minutes on two
# cores, once .venv is there. DIR is any folder of parallel text: train.XX, valid.XX (or val, dev) and test*.XX for two
# languages XX, plain or .gz; more than 20,000 pairs are given to the larger models of configs/multi30k_en_de.
#
# Prepares the text, trains both models, averages checkpoints, translates the test set by beam search and prints one table
# and some translations. All of it is in the work folder (default runs/demo/NAME), with the table as report.md and
# report.json. What is done is not done again; after Ctrl-C the same command continues.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
use_python
exec "$PY" -m lightconv_plugin.recipes.demo.run "$@"
