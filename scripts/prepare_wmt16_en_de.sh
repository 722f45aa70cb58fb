#!/usr/bin/env bash
# WMT16 En-De as both papers use it (4.5 million pairs, prepared by Google).
#
#   scripts/prepare_wmt16_en_de.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--any-size] [--workers N]
#
# --help has the options, the steps and the disk space. Run the same command again to resume.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
be_lightconv prepare wmt16_en_de "$@"
