#!/usr/bin/env bash
# WikiText-103 (Merity et al. 2017), the word-level corpus of language models: the archive to fairseq's binary data.
#
#   scripts/prepare_wikitext103.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--workers N] [--any-size]
#                                  [prepare_language_model.py options …]
#
#   --data DIR     folder that holds wikitext-103-v1.zip (without it, it is downloaded to data/wikitext103/download)
#   --out DIR      default data/wikitext103: raw/ data-bin/
#   --mirror PLACE address or folder to take the archive from
#   --any-size     another archive of that form: neither its checksum nor the text's size are compared
#
# The text is tokenised and words seen less than three times are <unk> already; it is taken as it is, empty lines too.
# Enforced: 1,801,350, 3,760 and 4,358 lines, and with one </s> a line the published 103,227,021, 217,646 and 245,569 tokens.
# The published 267,735 words have <unk> and </s> among them; fairseq adds <s> and <pad>, and fills up to a multiple of
# 8: 267,744 entries.
#
# Room: 0.2 GB of archive, 2 × 0.5 GB of text (unpacked, and raw/), 2 × 0.4 GB of 4-byte tokens (data-bin/, and the workers'
# shares of it): 2 GiB. Finished steps are not done again, whatever interrupted the last run.

# shellcheck source=scripts/prepare_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_lib.sh"

prepare_options data/wikitext103/download data/wikitext103 "$@"
arguments=(--raw "$DATA/wikitext-103-v1.zip" --out "$OUT" --workers "$WORKERS"
    --expect train:1801350:103227021 --expect valid:3760:217646 --expect test:4358:245569 --expect-entries 267744
    "${OPTIONS[@]}")
check_options data.language_model "${arguments[@]}"
need_disk 2 "$OUT"

# The copy of the corpus's first author: since 2024 Salesforce's own address has been closed. The checksum is the original's.
fetch https://wikitext.smerity.com/wikitext-103-v1.zip \
    sha256:242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590

prepare data.language_model "${arguments[@]}"
