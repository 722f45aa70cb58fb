#!/usr/bin/env bash
# A row of RESULTS.md by one command: prepare, train each seed, tune on the validation set, score the test set.
#
#   scripts/reproduce.sh CONFIG.yaml --seeds N… [options] [hydra overrides …]
#   scripts/reproduce.sh configs/multi30k_en_de/dynamicconv.yaml --seeds 1 2 3
#   scripts/reproduce.sh --table          write RESULTS.md anew from the rows that there are
#   scripts/reproduce.sh --smoke          all of it in miniature, in runs/smoke: a test of this checkout, not a result
#
#   --runs DIR       put trainings and state into DIR/TASK/SYSTEM instead of the configuration's save_dir
#   --results DIR    put the row into DIR/TASK/SYSTEM.json and the table into DIR/RESULTS.md
#                    (without it: benchmarks/results/reproduction and RESULTS.md)
#   --no-prepare     take the data as they are
#   --prepare-options='OPTIONS'    further options of the preparation, such as --data DIR or --mirror PLACE
#
# What is done and how is in protocol.yaml beside CONFIG. Overrides go to the training (see train.sh); one that changes
# what is computed needs --runs, and its row goes to DIR/results. A seed is in SAVE_DIR/seedN, where a finished or begun
# training of the same settings is taken over. SAVE_DIR/reproduce.json says what is done: after Ctrl-C, or whatever ended
# it, the same command continues, and a step is done again only when what it depends on has changed.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
    '') usage >&2; exit 2 ;;
esac
use_python
exec "$PY" -m lightconv_plugin.recipes.reproduce.run "$@"
