#!/usr/bin/env bash
# WMT16 En-De as both papers use it (4.5 million pairs, prepared by Google): archive to fairseq's binary data.
#
#   scripts/prepare_wmt16_en_de.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--workers N] [--any-size]
#
#   --data DIR      folder that holds wmt16_en_de.tar.gz (without it: downloaded to download/ in the --out folder)
#   --out DIR       default data/wmt16_en_de: bpe/ raw/ data-bin/
#   --mirror PLACE  address or folder to take wmt16_en_de.tar.gz from instead of Google Drive
#   --workers N     processes (default: all cores)
#   --any-size      take other text of this form, too: neither the checksum nor the numbers of pairs are compared
#
# The archive is on Google Drive, which wants a resource key for files as old as this one, or a browser that is signed
# in, and may have it no longer: where the download fails, get it elsewhere and give its folder by --data. Its SHA-256
# is known from one other program that uses it (a Julia package's DataDeps), and 4,500,966 pairs likewise.
#
# Nothing is tokenised here: train.tok.clean.bpe.32000 trains, newstest2013 validates, newstest2014 tests, with one
# dictionary of 32,768 for both languages. The raw references for sacreBLEU are the archive's newstest2014.de; if it
# lacks them they are made by detokenising, which is said.
#
# Disk: archive 0.6 GB; text 4.5 M x 2 x 170 bytes = 1.5 GB; binary 4.5 M x 2 x 30 pieces x 2 bytes = 0.5 GB, and as
# much while it is written: 4 GiB with the archive. (The bytes of a line are an estimate.)

# shellcheck source=scripts/prepare_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_lib.sh"

prepare_options data/wmt16_en_de/download data/wmt16_en_de "$@"
arguments=(--data "$DATA" --out "$OUT" --workers "$WORKERS" "${OPTIONS[@]}")
prepare data.wmt16 "${arguments[@]}" --check-options
need_disk 4 "$OUT"
fetch "https://drive.usercontent.google.com/download?id=0B_bZck-ksdkpM25jRUN2X2UxMm8&export=download&confirm=t" \
    sha256:86f7f6e0bab3259a34712b4c034dc933f406d6735ce03fd6de6b9ccb5191ce2e wmt16_en_de.tar.gz
prepare data.wmt16 "${arguments[@]}"
