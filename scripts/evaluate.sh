#!/usr/bin/env bash
# Translate or summarise a test set by beam search and score it: BLEU or ROUGE, parameters, sentences per second.
#
#   scripts/evaluate.sh DATA_BIN CHECKPOINT [--subset test] [--json] [@FILE] [fairseq-generate options …]
#   scripts/evaluate.sh data/multi30k_en_de/data-bin runs/multi30k_en_de/dynamicconv/average10.pt --lenpen 1.2
#   scripts/evaluate.sh data/cnndm/data-bin runs/cnndm/dynamicconv/average10.pt @configs/cnndm/generate.args
#
# This is `lightconv evaluate`; see its --help for details.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
be_lightconv evaluate "$@"
