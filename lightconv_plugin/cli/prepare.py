"""`lightconv prepare`: from published archives to fairseq's binary data."""

import argparse
import sys

from lightconv_plugin.recipes.data.tasks import TASKS, prepare, sources


def run(args: argparse.Namespace) -> int:
    try:
        prepare(args.task, args.arguments)
    except KeyboardInterrupt:
        print("lightconv prepare: interrupted: run the same command again to resume", file=sys.stderr)
        return 130
    return 0


def add_parser(commands) -> None:
    width, about = max(map(len, TASKS)) + 2, sources()["about"]
    listing = "\n".join(f"  {name:<{width}}{about[name].splitlines()[0]}" for name in TASKS)
    parser = commands.add_parser(
        "prepare",
        usage="lightconv prepare TASK [options]    (lightconv prepare TASK --help: its options)",
        description="Downloads the published files of a corpus, checks them, and makes fairseq's binary data from them."
        " Finished steps\nare not repeated: run the same command again to resume.\n\n" + listing,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", metavar="TASK", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
