#!/usr/bin/env bash
# The One Billion Word benchmark: the archive to fairseq's binary data for language models.
#
#   scripts/prepare_gbw.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--any-size] [--workers N]
#       [--threshold N]
#
# --help has the options, the steps and the disk space. Run the same command again to resume.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
be_lightconv prepare gbw "$@"
