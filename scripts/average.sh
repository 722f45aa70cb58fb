#!/usr/bin/env bash
# Average the last N checkpoints of a training into SAVE_DIR/averageN.pt: epoch checkpoints, or those by updates if the
# training keeps no epoch checkpoints (no_epoch_checkpoints).
#
#   scripts/average.sh SAVE_DIR [N]      N: 10 by default
#
# An older averageN.pt is replaced.
#
# `lightconv average --help` has other ways to choose (updates, best, an upper bound).

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
    -h | --help) usage; exit 0 ;;
    '') usage >&2; exit 2 ;;
esac
save_dir=$1 number=${2:-10}
[[ $save_dir != -* ]] || save_dir=./$save_dir # not an option
[[ -d $save_dir ]] || die "no folder $save_dir with checkpoints"
[[ $number =~ ^[1-9][0-9]*$ && $# -le 2 ]] || die "N must be a positive number, got: ${*:2}"
be_lightconv average --inputs "$save_dir" --num-last-checkpoints "$number" --force \
    --output "$save_dir/average$number.pt"
