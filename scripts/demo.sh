#!/usr/bin/env bash
# From an empty machine to a BLEU score: a small DynamicConv beside a Transformer of the same size.
#
#   scripts/demo.sh [DIR] [--updates N] [--seed N] [--work DIR] [--src XX --tgt YY]
#
# Without DIR the corpus is German–English text written by a small grammar: some minutes on two cores, once .venv exists.
# DIR is any folder of parallel text: train.XX, valid.XX (or val, dev) and test*.XX for two languages XX, plain or .gz.
# This is `lightconv demo`, whose --help says more.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
be_lightconv demo "$@"
