#!/usr/bin/env bash
# A miniature corpus from the demonstration's grammar, for scripts/reproduce.sh --smoke.
#
#   scripts/prepare_smoke.sh [--data DIR] [--out DIR] [--workers N]
#       [--bpe N] [options]
#
# --help has the options, the steps and the disk space. Run the same command again to resume.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
be_lightconv prepare smoke "$@"
