#!/usr/bin/env bash
# WikiText-103, a word-level corpus for language models: the archive to fairseq's binary data.
#
#   scripts/prepare_wikitext103.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--any-size] [--workers N]
#       [--threshold N] [options]
#
# --help has the options, the steps and the disk space. Run the same command again to resume.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
be_lightconv prepare wikitext103 "$@"
