#!/usr/bin/env bash
# CNN/Daily Mail, summarisation: stories to fairseq's data.
#
#   scripts/prepare_cnndm.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--any-size] [--workers N]
#       [--bpe N]
#
# --help has the options, the steps and the disk space. Run the same command again to resume.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
be_lightconv prepare cnndm "$@"
