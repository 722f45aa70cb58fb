#!/usr/bin/env bash
# IWSLT 2014 German → English (TED talks, 160,239 training pairs): archive to fairseq's binary data.
#
#   scripts/prepare_iwslt14_de_en.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--any-size] [--workers N]
#       [--bpe N]
#
# --help has the options, the steps and the disk space. Run the same command again to resume.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
be_lightconv prepare iwslt14_de_en "$@"
