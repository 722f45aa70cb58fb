#!/usr/bin/env bash
# IWSLT 2014 German → English (TED talks, 160,239 training pairs): archive to fairseq's binary data.
#
#   scripts/prepare_iwslt14_de_en.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--workers N] [options]
#
#   --data DIR     folder that holds de-en.tgz (without it, it is downloaded to OUT/download)
#   --out DIR      default data/iwslt14_de_en: raw/ tok/ bpe/ data-bin/
#   --mirror PLACE address or folder to take de-en.tgz from
#   --workers N    processes (default: all cores)
#   --bpe N        merges (default 10,000)
#   --any-size     an archive with other numbers of lines than the published one
#
# As in fairseq's examples: Moses-tokenised, pairs of 1 … 175 tokens with a ratio of at most 1.5, lower-cased; every 23rd
# pair for validation; test set: dev2010, dev2012, tst2010, tst2011 and tst2012; joint BPE, separate dictionaries. The
# numbers of lines (160,239 / 7,283 / 6,750) and the dictionaries (8,844 and 6,628 words) are checked.
# Finished steps are not done again, whatever interrupted the last run.

# shellcheck source=scripts/prepare_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_lib.sh"

prepare_options data/iwslt14_de_en/download data/iwslt14_de_en "$@"
arguments=(--archive "$DATA/de-en.tgz" --out "$OUT" --workers "$WORKERS" "${OPTIONS[@]}")
check_options data.iwslt14 "${arguments[@]}"
need_disk 0.5 "$OUT"
# Nobody has published a checksum of the archive.
fetch https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz record
prepare data.iwslt14 "${arguments[@]}"
