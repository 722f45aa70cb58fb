#!/usr/bin/env bash
# WMT17 Zh-En from the raw corpora: archives to fairseq's binary data. The choices are ours.
#
#   scripts/prepare_wmt17_zh_en.sh [--without-cwmt] [--data DIR] [--out DIR] [--mirror URL|DIR] [options …]
#
#   --without-cwmt  train on news-commentary-v12 and UNv1.0 alone
#   --data DIR      folder that holds training-parallel-nc-v12.tgz, UNv1.0.en-zh.tar.gz, dev.tgz and test.tgz of WMT17,
#                   and CWMT's zips (without it: downloaded to download/ in the --out folder, but for CWMT)
#   --out DIR       default data/wmt17_zh_en, with --without-cwmt data/wmt17_zh_en_without_cwmt:
#                   text/ tok/ encoded/ bpe/ raw/ data-bin/
#   --mirror PLACE  address or folder to take the archives from, CWMT's too
#   --workers N     processes (default: all cores)
#   --bpe N         merges for each language (default 32000)
#   --any-size      take other text of this form, too: neither checksums nor numbers of pairs are compared
#
# CWMT's corpora (9 million of the 25 million pairs) are given out by its organisers, not by an address that lasts: put
# casia2015.zip, casict2011.zip, casict2015.zip, datum2015.zip, datum2017.zip and neu2017.zip into the --data folder, or
# into download/ in the --out folder, or say --without-cwmt.
#
# How the paper prepared its Zh-En data came with no code and is not known to us: neither the training text and what was
# dropped from it, nor how Chinese was divided into words, nor the merges. So a score on these data beside the paper's
# says how good this system is, not whether the paper's result is reproduced. What is done here: news-commentary-v12,
# UNv1.0 (15,886,041 pairs) and CWMT (casia2015 1,050,000, casict2011, casict2015 2,036,833, datum2015 1,000,003,
# datum2017 999,984, neu2017 2,000,000) in this order; Chinese divided by jieba, after spaces between its characters are
# taken out; English punctuation normalised, non-printing characters removed, Moses-tokenised with hyphens divided (-a);
# 32,000 BPE merges and a dictionary for each language; training pairs of 1 … 250 pieces a side with a ratio of at most
# 1.5 are kept.
# newsdev2017 validates, newstest2017 (2,001 segments) tests, both whole and not normalised but for ’ made '.
#
# Disk: archives 0.2 + 1.4 + 0.7 GB = 2.3 GB; raw text 25 M pairs x 260 bytes = 6.5 GB, tokenised 7.2, encoded 8,
# cleaned 7, binary 25 M x 60 pieces x 2 bytes = 3 GB, a part of it twice meanwhile: 40 GiB with the archives.
# (The bytes and pieces of a pair are estimates.)

# shellcheck source=scripts/prepare_wmt.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_wmt.sh"

task=wmt17_zh_en
if given --without-cwmt "$@"; then task=wmt17_zh_en_without_cwmt; fi
prepare_options "data/$task/download" "data/$task" "$@"
"$PY" -c 'import jieba' 2>/dev/null || die "Chinese is divided into words by jieba, which $PY lacks: pip install jieba"
room 3 40
cwmt=()
take_option --without-cwmt || cwmt=({casia2015,casict2011,casict2015,datum2015,datum2017,neu2017}.zip)
prepare_task "$task" "${cwmt[@]}" training-parallel-nc-v12.tgz UNv1.0.en-zh.tar.gz dev.tgz test.tgz
