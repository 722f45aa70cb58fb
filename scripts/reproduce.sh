#!/usr/bin/env bash
# A row of RESULTS.md by one command: prepare, train each seed, tune on the validation set, score the test set.
#
#   scripts/reproduce.sh CONFIG --seeds N… [options] [hydra overrides …]
#   scripts/reproduce.sh multi30k_en_de/dynamicconv --seeds 1 2 3
#   scripts/reproduce.sh --table          write RESULTS.md again from the rows
#   scripts/reproduce.sh --smoke          everything in miniature, in runs/smoke: a test of this checkout, not a result
#
#   --runs DIR       put trainings into DIR/TASK/SYSTEM instead of the configuration's save_dir
#   --results DIR    put the row into DIR/TASK/SYSTEM.json and the table into DIR/RESULTS.md
#   --no-prepare     take the data as it is
#   --prepare-options='OPTIONS'    further options of the preparation, such as --data DIR or --mirror PLACE
#
# This is `lightconv reproduce`, whose --help says more. Rerun the same command to resume.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
be_lightconv reproduce "$@"
