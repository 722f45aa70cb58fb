#!/usr/bin/env bash
# Translate or summarise a test set by beam search and score it: BLEU or ROUGE, parameters, sentences a second.
#
#   scripts/score.sh DATA_BIN CHECKPOINT [--subset test] [--json] [@FILE] [fairseq-generate options …]
#   scripts/score.sh data/multi30k_en_de/data-bin runs/multi30k_en_de/dynamicconv/average10.pt --lenpen 1.2
#   scripts/score.sh data/cnndm/data-bin runs/cnndm/dynamicconv/average10.pt @configs/cnndm/generate.args
#
# --metric rouge scores summaries; --metric bleu is the default. These options go to `lightconv score`, whose --help says
# what they do: --lang, --detok, --raw-ref, --lowercase, --compound-split, --against, --samples; --no-stem, --sentence-end.
# @FILE stands for the arguments in a file, where # begins a comment; the last of several equal options counts.
#
# Beam 5 and length penalty 1 unless given. The log of fairseq-generate and the scores go beside the checkpoint, as
# CHECKPOINT.SUBSET.gen and .score. With the folders of scripts/prepare_*.sh, sacreBLEU is computed against the raw
# references (without case if the data are lower-cased).

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
[[ $# -ge 2 ]] || { usage >&2; exit 2; }
data=$1 checkpoint=$2
shift 2

# The arguments with those of each @FILE in its place.
given=()
add_file() {
    local line words
    [[ -f $1 ]] || die "no file $1 with arguments"
    while IFS= read -r line || [[ -n $line ]]; do
        read -ra words <<<"${line%%#*}"
        given+=("${words[@]}")
    done <"$1"
}
for argument in "$@"; do
    if [[ $argument == @[!@]* ]]; then add_file "${argument#@}"; else given+=("$argument"); fi
done
set -- "${given[@]}"

subset=test metric=bleu json=() score=() generate=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --subset | --gen-subset) [[ $# -ge 2 ]] || die "$1 needs a name"; subset=$2; shift ;;
        --metric) [[ $# -ge 2 ]] || die "--metric needs a value: bleu or rouge"; metric=$2; shift ;;
        --lang | --detok | --raw-ref | --against | --samples | --sentence-end)
            [[ $# -ge 2 ]] || die "$1 needs a value"
            score+=("$1" "$2")
            shift
            ;;
        --lowercase | --compound-split | --no-stem) score+=("$1") ;;
        --json) json=(--json) ;;
        *) generate+=("$1") ;;
    esac
    shift
done
[[ $metric == bleu || $metric == rouge ]] || die "--metric must be bleu or rouge, got: $metric"
[[ $data != -* ]] || data=./$data # no option of the tools below
[[ $checkpoint != -* ]] || checkpoint=./$checkpoint
[[ -d $data ]] || die "no folder $data with binarised data"
[[ -f $checkpoint ]] || die "no checkpoint $checkpoint"
(cd -- "$data" && compgen -G "$subset.*.idx" >/dev/null) || die "$data has no subset $subset"
use_python
compute_environment

# The language, the raw references and the case.
[[ $metric == rouge ]] || score+=(--data "$data" --subset "$subset")

log=${checkpoint%.pt}.$subset
say "generating for $subset: $log.gen"
trap 'rm -f -- "$log.gen.tmp" "$log.messages.tmp"' EXIT
# The sentences are on its standard output, its messages (how many, how fast) on the other stream: those come last.
"$PY" -u -m fairseq_cli.generate "$data" --path "$checkpoint" --user-dir "$ROOT/lightconv_plugin" --gen-subset "$subset" \
    --beam 5 --lenpen 1 --remove-bpe --max-tokens 8000 --log-format simple --log-interval 10 "${generate[@]}" \
    2>&1 >"$log.gen.tmp" | tee -- "$log.messages.tmp" >&2
cat -- "$log.messages.tmp" >>"$log.gen.tmp"
mv -- "$log.gen.tmp" "$log.gen"
lightconv score --metric "$metric" --gen "$log.gen" "${score[@]}" --speed --checkpoint "$checkpoint" "${json[@]}" \
    --output "$log.score"
