#!/usr/bin/env bash
# WMT En-De from the raw corpora, by the steps of fairseq's prepare-wmt14en2de.sh: archives to fairseq's binary data.
#
#   scripts/prepare_wmt14_en_de.sh [--icml17] [--data DIR] [--out DIR] [--mirror URL|DIR] [--workers N] [options …]
#
#   --icml17        news-commentary-v9 instead of v12: the training text of WMT14, and of ConvS2S (Gehring et al. 2017)
#   --data DIR      folder that holds training-parallel-europarl-v7.tgz, training-parallel-commoncrawl.tgz,
#                   training-parallel-nc-v12.tgz (or -v9) and test-full.tgz (without it: downloaded to download/ in the
#                   --out folder)
#   --out DIR       default data/wmt14_en_de, with --icml17 data/wmt14_en_de_icml17:
#                   text/ tok/ encoded/ bpe/ raw/ data-bin/
#   --mirror PLACE  address or folder to take the archives from instead of statmt.org
#   --workers N     processes (default: all cores)
#   --bpe N         merges (default 40000)
#   --separate-dictionaries  one for each language; the default is one for both, which --share-all-embeddings needs
#   --any-size      take other text of this form, too: neither checksums nor numbers of pairs are compared
#
# europarl-v7 (1,920,209 pairs), commoncrawl (2,399,123) and news-commentary (v9: 201,288) in this order; punctuation
# normalised, non-printing characters removed, Moses-tokenised with hyphens divided (-a); every 100th pair validates;
# 40,000 BPE merges learned on the training text of both languages; pairs of 1 … 250 pieces a side with a ratio of at
# most 1.5 are kept, of the validation text too. Test: newstest2014 (3,003 segments), ’ made ', tokenised, nothing
# dropped. raw/ holds the raw lines of valid and test. (fairseq's script also downloads dev.tgz and does not use it.)
#
# The paper's own En-De figures are of scripts/prepare_wmt16_en_de.sh.
#
# Disk: archives 0.66 + 0.92 + 0.17 GB = 1.8 GB; raw text 4.6 M pairs x 300 bytes = 1.4 GB, tokenised 1.5, encoded 1.7,
# cleaned 1.5, binary 4.5 M x 60 pieces x 2 bytes = 0.6 GB, a copy of the raw text meanwhile: 11 GiB with the archives.

# shellcheck source=scripts/prepare_wmt.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_wmt.sh"

task=wmt14_en_de news=v12
if given --icml17 "$@"; then task=wmt14_en_de_icml17 news=v9; fi
prepare_options "data/$task/download" "data/$task" "$@"
take_option --icml17 || true
room 2 11
prepare_task "$task" training-parallel-{europarl-v7,commoncrawl,nc-$news}.tgz test-full.tgz
