#!/usr/bin/env bash
# Measure the perplexity of a language model on a text by fairseq-eval-lm; prints one line.
#
#   scripts/perplexity.sh DATA_BIN CHECKPOINT [--subset test] [--context-window N] [--json] [fairseq-eval-lm options …]
#   scripts/perplexity.sh data/wikitext2/data-bin runs/wikitext2/dynamicconv/checkpoint_best.pt --context-window 128
#
# This is `lightconv perplexity`; see its --help for details.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
be_lightconv perplexity "$@"
