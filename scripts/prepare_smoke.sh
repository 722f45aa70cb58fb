#!/usr/bin/env bash
# A miniature corpus from the grammar of the demonstration, for scripts/reproduce.sh --smoke: raw text to fairseq's data.
#
#   scripts/prepare_smoke.sh [--data DIR] [--out DIR] [--workers N] [prepare_text.py options …]
#
#   --data DIR     folder of parallel text to take instead (train.en train.de valid.en … test.de)
#   --out DIR      default runs/smoke/data: text/ raw/ tok/ bpe/ data-bin/
#
# 600 English–German sentence pairs and 40 each to tune and to test, 300 joint BPE merges.

# shellcheck source=scripts/prepare_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_lib.sh"

prepare_options runs/smoke/data/text runs/smoke/data "$@"
if ((!GIVEN_DATA)); then
    DATA=$OUT/text
    prepare demo.corpus --out "$DATA" --train 600 --valid 40 --test 40
fi
prepare data.parallel_text --raw "$DATA" --out "$OUT" --src en --tgt de --bpe 300 --workers "$WORKERS" "${OPTIONS[@]}"
