#!/usr/bin/env bash
# The One Billion Word benchmark (Chelba et al. 2013): the archive to fairseq's binary data for language models.
#
#   scripts/prepare_gbw.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--workers N] [--any-size] [--threshold N]
#
#   --data DIR     folder that holds 1-billion-word-language-modeling-benchmark-r13output.tar.gz
#                  (without it, it is downloaded to data/gbw/download: 1.8 GB)
#   --out DIR      default data/gbw: raw/ data-bin/
#   --mirror PLACE address or folder to take the archive from
#   --any-size     another archive of that form: neither its checksum nor the text's size are compared
#   --threshold N  words seen less than N times in the training text become <unk> (default 3, the benchmark's own)
#
# Sentences, tokenised and shuffled. Training: the 99 files news.en-000??-of-00100. Test: news.en.heldout-00000-of-00050, on
# which the benchmark's authors report. Validation: news.en.heldout-00001-of-00050, our choice; the authors leave the other 49
# free for any use. Enforced: 30,301,028 training lines, and 6,075 lines with 159,658 tokens (153,583 words and the </s> of
# every line) of test text.
# The benchmark's vocabulary has 793,471 entries: the words seen three times or more, <S>, </S> and <UNK>. For fairseq, which
# has four entries of its own, that would be the 793,472 of the configurations; it also divides words at Unicode's other
# spaces, so the number it prints may be slightly different.
#
# Room: 1.8 GB of archive, 4.2 GB of text, 2 × 3.6 GB of 4-byte tokens and the sentences' beginnings (data-bin/, and the
# workers' shares of it): 13.2 GB, 14 GiB wanted. Memory, reckoned and not measured: 2 GiB, and 0.5 for each worker (the
# counts of 2.4 million different words, the lengths of 30 million sentences). Finished steps are not done again, whatever
# interrupted the last run.

# shellcheck source=scripts/prepare_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_lib.sh"

prepare_options data/gbw/download data/gbw "$@"
archive=1-billion-word-language-modeling-benchmark-r13output.tar.gz
arguments=(--archive "$DATA/$archive" --out "$OUT" --workers "$WORKERS" "${OPTIONS[@]}")
check_options data.gbw "${arguments[@]}"
need_disk 14 "$OUT"

# The checksum is TensorFlow Datasets'.
fetch "https://www.statmt.org/lm-benchmark/$archive" \
    sha256:01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e

prepare data.gbw "${arguments[@]}"
