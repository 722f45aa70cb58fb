#!/usr/bin/env bash
# The perplexity of a language model on a text, by fairseq-eval-lm: one line.
#
#   scripts/perplexity.sh DATA_BIN CHECKPOINT [--subset test] [--context-window N] [--json] [fairseq-eval-lm options …]
#   scripts/perplexity.sh data/wikitext2/data-bin runs/wikitext2/dynamicconv/checkpoint_best.pt --context-window 128
#
# Per token of the dictionary, hence per word where the dictionary is of words; </s> counts as one (--post-process '@@ '
# joins BPE). Sample length and break mode are the training's. With --context-window N a token is scored after at least N
# others; without, the first of each sample have few before them. Every token is scored, or it is an error. The log and
# the result (JSON) go beside the checkpoint, as CHECKPOINT.SUBSET.eval_lm and .ppl.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
[[ $# -ge 2 ]] || { usage >&2; exit 2; }
data=$1 checkpoint=$2
shift 2
[[ $data != -* ]] || data=./$data # no option of the tool below
[[ $checkpoint != -* ]] || checkpoint=./$checkpoint
[[ -d $data ]] || die "no folder $data with binarised data"
[[ -f $checkpoint ]] || die "no checkpoint $checkpoint"
use_python
compute_environment
"$PY" -m lightconv_plugin.cli.perplexity "$data" "$checkpoint" "$@"
