#!/usr/bin/env bash
# WMT14 En-Fr from the raw corpora, by the steps of fairseq's prepare-wmt14en2fr.sh: archives to fairseq's binary data.
#
#   scripts/prepare_wmt14_en_fr.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--workers N] [options …]
#
#   --data DIR      folder that holds training-parallel-europarl-v7.tgz, training-parallel-commoncrawl.tgz,
#                   training-parallel-un.tgz, training-parallel-nc-v9.tgz, training-giga-fren.tar and test-full.tgz
#                   (without it: downloaded to download/ in the --out folder)
#   --out DIR       default data/wmt14_en_fr: text/ tok/ encoded/ bpe/ raw/ data-bin/
#   --mirror PLACE  address or folder to take the archives from instead of statmt.org
#   --workers N     processes (default: all cores)
#   --bpe N         merges (default 40000)
#   --separate-dictionaries  one for each language; the default is one for both, which --share-all-embeddings needs
#   --any-size      take other text of this form, too: neither checksums nor numbers of pairs are compared
#
# europarl-v7 (2,007,723 pairs), commoncrawl (3,244,152), undoc.2000 (12,886,831), news-commentary-v9 (183,251) and
# giga-fren.release2.fixed (about 22.5 million) in this order; punctuation normalised, non-printing characters removed,
# Moses-tokenised with hyphens divided (-a); every 1333rd pair validates; 40,000 BPE merges learned on the training text
# of both languages; pairs of 1 … 250 pieces a side with a ratio of at most 1.5 are kept, of the validation text too.
# Test: newstest2014 (3,003 segments), ’ made ', tokenised, nothing dropped. raw/ holds the raw lines of valid and test.
#
# To be expected: about 35.48 million training and 26.7 thousand validation pairs. That is what fairseq's authors had
# (35,482,654 and 26,663, with at most 175 words a side there).
#
# Disk: archives 0.66 + 0.92 + 2.37 + 0.08 + 2.60 GB = 6.6 GB; raw text 40.8 M pairs x 355 bytes = 14.5 GB, tokenised
# 15.5, encoded 17, cleaned 15, binary 35.5 M x 64 pieces x 2 bytes = 4.5 GB, a part of it twice meanwhile: 80 GiB with
# the archives. Memory: about 130 MB a process, but for the learning of the merges, which holds the counts of all
# different words of the training text; how much that is here was not measured.

# shellcheck source=scripts/prepare_wmt.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_wmt.sh"

prepare_options data/wmt14_en_fr/download data/wmt14_en_fr "$@"
room 7 80
prepare_task wmt14_en_fr training-parallel-{europarl-v7,commoncrawl,un,nc-v9}.tgz training-giga-fren.tar test-full.tgz
