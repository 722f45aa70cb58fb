#!/usr/bin/env bash
# WMT17 Zh-En from the raw corpora: archives to fairseq's binary data. The choices are ours.
#
#   scripts/prepare_wmt17_zh_en.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--any-size] [--workers N]
#       [--without-cwmt] [--bpe N]
#
# --help has the options, the steps and the disk space. Run the same command again to resume.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
be_lightconv prepare wmt17_zh_en "$@"
