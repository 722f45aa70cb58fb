#!/usr/bin/env bash
# Multi30k (task 1, English–German): raw text to fairseq's binary data.
#
#   scripts/prepare_multi30k.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--any-size] [--workers N]
#       [--bpe N] [--src XX --tgt XX] [options]
#
# --help has the options, the steps and the disk space. Run the same command again to resume.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
be_lightconv prepare multi30k_en_de "$@"
