"""`lightconv average`: average several checkpoints of one training into one.

The options are those of fairseq's scripts/average_checkpoints.py, and --num-last-checkpoints.
"""

import argparse
from pathlib import Path

from lightconv_plugin.arguments import add_force, positive
from lightconv_plugin.errors import InputError


def run(args: argparse.Namespace) -> int:
    from lightconv_plugin.checkpoints.averaging import average_once

    files = _select(args)
    if average_once(files, args.output, force=args.force):
        print(f"mean of {len(files)} checkpoints written to {args.output}:")
    else:
        print(f"{args.output} is already the mean of {len(files)} checkpoints:")
    for path in files:
        print(f"  {path}")
    return 0


def _select(args: argparse.Namespace) -> list[Path]:
    """The checkpoints selected by the options, newest (or best) first; explicit files in the given order."""
    from lightconv_plugin.checkpoints.averaging import best_checkpoints, candidates, last_checkpoints, only_by_updates

    last = args.num_last_checkpoints or args.num_epoch_checkpoints or args.num_update_checkpoints
    if args.checkpoint_upper_bound is not None and not last:
        raise InputError(
            "--checkpoint-upper-bound needs --num-last-checkpoints, --num-epoch-checkpoints or --num-update-checkpoints"
        )
    if args.maximize is not None and not args.num_best_checkpoints:
        raise InputError("--[no-]maximize-best-checkpoint-metric needs --num-best-checkpoints")
    files = candidates(args.inputs)
    if last:
        by_updates = only_by_updates(files) if args.num_last_checkpoints else bool(args.num_update_checkpoints)
        return last_checkpoints(files, last, by_updates, args.checkpoint_upper_bound)
    if args.num_best_checkpoints:
        return best_checkpoints(files, args.num_best_checkpoints, args.maximize)
    if args.inputs[0].is_dir():
        raise InputError(
            f"{args.inputs[0]} is a folder: choose checkpoints with --num-last-checkpoints, --num-epoch-checkpoints, "
            "--num-update-checkpoints or --num-best-checkpoints, or name files"
        )
    return files


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "average",
        description="Writes the mean of several checkpoints of one training, as a checkpoint without optimizer state.",
        epilog="example: lightconv average --inputs runs/a --num-last-checkpoints 10 --output runs/a/average10.pt",
    )
    parser.add_argument(
        "--inputs",
        nargs="+",
        type=Path,
        required=True,
        metavar="PATH",
        help="checkpoints, or one folder to choose from",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the checkpoint to write")
    add_force(parser, "FILE, if it is not already the mean of the same checkpoints")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--num-last-checkpoints",
        type=positive,
        metavar="N",
        help="average the last N epoch checkpoints or, if the training kept none, the last N by updates",
    )
    choice.add_argument(
        "--num-epoch-checkpoints",
        type=positive,
        metavar="N",
        help="average the last N epoch checkpoints (checkpointE.pt)",
    )
    choice.add_argument(
        "--num-update-checkpoints",
        type=positive,
        metavar="N",
        help="average the last N by updates (checkpoint_E_U.pt)",
    )
    choice.add_argument(
        "--num-best-checkpoints",
        type=positive,
        metavar="N",
        help="average the N best (checkpoint.best_METRIC_VALUE.pt)",
    )
    parser.add_argument(
        "--checkpoint-upper-bound", type=positive, metavar="N", help="ignore epochs (or updates) after this one"
    )
    parser.add_argument(
        "--maximize-best-checkpoint-metric",
        dest="maximize",
        action=argparse.BooleanOptionalAction,
        help="whether a higher metric is better (default: as the checkpoint says, else by the metric's name)",
    )
