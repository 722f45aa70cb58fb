#!/usr/bin/env bash
# Translate a test set by beam search and score it: tokenised BLEU and sacreBLEU.
#
#   scripts/score.sh DATA_BIN CHECKPOINT [--subset test] [--json] [fairseq-generate options …]
#   scripts/score.sh data/multi30k_en_de/data-bin runs/multi30k_en_de/dynamicconv/average10.pt --lenpen 1.2
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
subset=test json=()
generate=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --subset | --gen-subset) [[ $# -ge 2 ]] || die "$1 needs a name"; subset=$2; shift ;;
        --json) json=(--json) ;;
        *) generate+=("$1") ;;
    esac
    shift
done
[[ -d $data ]] || die "no folder $data with binarised data"
[[ -f $checkpoint ]] || die "no checkpoint $checkpoint"
compgen -G "$data/$subset.*.idx" >/dev/null || die "$data has no subset $subset"
use_python
compute_environment

sides=$(cd "$data" && echo "$subset".*-*.*.idx)   # test.en-de.de.idx test.en-de.en.idx
[[ ${sides%% *} =~ \.([a-z]+)-([a-z]+)\.[a-z]+\.idx$ ]] || die "cannot tell the languages of $data"
tgt=${BASH_REMATCH[2]}
corpus=$(dirname "$(absolute "$data")")
score=(--lang "$tgt")
[[ -f $corpus/raw/$subset.$tgt ]] && score+=(--raw-ref "$corpus/raw/$subset.$tgt")
[[ -f $corpus/corpus.json ]] && grep -q '"lowercase": true' "$corpus/corpus.json" && score+=(--lowercase)

log=${checkpoint%.pt}.$subset
say "translating $subset: $log.gen"
"$PY" -u -m fairseq_cli.generate "$data" --path "$checkpoint" --user-dir "$ROOT/lightconv_plugin" --gen-subset "$subset" \
    --beam 5 --lenpen 1 --remove-bpe --max-tokens 8000 --log-format simple --log-interval 10 "${generate[@]}" >"$log.gen.tmp"
mv -- "$log.gen.tmp" "$log.gen"
lightconv score --gen "$log.gen" "${score[@]}" "${json[@]}" --output "$log.score"
