#!/usr/bin/env bash
# Make one row of RESULTS.md: prepare, train each seed, tune on the validation set, score the test set.
#
#   scripts/reproduce.sh CONFIG --seeds N… [options] [hydra overrides …]
#   scripts/reproduce.sh multi30k_en_de/dynamicconv --seeds 1 2 3
#   scripts/reproduce.sh --table          rewrite RESULTS.md from the rows
#   scripts/reproduce.sh --smoke          everything in miniature, in runs/smoke: a test of this checkout, not a result
#
#   --runs DIR       put trainings into DIR/TASK/SYSTEM instead of the configuration's save_dir
#   --results DIR    put the row into DIR/TASK/SYSTEM.json and the table into DIR/RESULTS.md
#   --no-prepare     use the data without preparing it
#   --prepare-options='OPTIONS'    more options for the preparation, such as --data DIR or --mirror PLACE
#
# This is `lightconv reproduce`; see its --help for details. Rerun the same command to resume.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
be_lightconv reproduce "$@"
