#!/usr/bin/env bash
# Your own parallel text: from raw text to fairseq's binary data.
#
#   scripts/prepare_parallel.sh --data DIR --src XX --tgt XX [--name NAME | --out DIR] [--valid-lines N] [--test-lines N]
#       [--bpe N] [--separate-bpe] [--lowercase] [--workers N] [options]
#
# --help has the options and the steps. Run the same command again to resume.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
be_lightconv prepare parallel "$@"
