#!/usr/bin/env bash
# WMT14 En-Fr from the raw corpora, by the steps of fairseq's prepare-wmt14en2fr.sh.
#
#   scripts/prepare_wmt14_en_fr.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--any-size] [--workers N]
#       [--bpe N] [--separate-dictionaries]
#
# --help has the options, the steps and the disk space. Run the same command again to resume.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
be_lightconv prepare wmt14_en_fr "$@"
