"""`lightconv prepare`: from published archives to fairseq's binary data."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from lightconv_plugin.errors import InputError
from lightconv_plugin.paths import workspace
from lightconv_plugin.progress import say
from lightconv_plugin.recipes.data.data_bin import count_sentences
from lightconv_plugin.recipes.data.options import Request
from lightconv_plugin.recipes.data.parallel_text import joined, repetitions
from lightconv_plugin.recipes.data.sizes import size_for
from lightconv_plugin.recipes.data.tasks import TASKS, prepare, sources

OWN_TEXT = "parallel"  # the task of a user's own text, which has no recipe of its own


def run(args: argparse.Namespace) -> int:
    try:
        request = prepare(args.task, args.arguments)
    except KeyboardInterrupt:
        print("lightconv prepare: interrupted: run the same command again to resume", file=sys.stderr)
        return 130
    if args.task == OWN_TEXT:
        for line in next_step(request):
            say(line)
    return 0


def task_first(argv: list[str]) -> list[str]:
    """The arguments. InputError if the first one is neither a task nor asks for help."""
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        got = f", got {argv[0]}" if argv else ""
        raise InputError(f"the first argument must be TASK, such as parallel{got}: lightconv prepare --help lists them")
    return argv


def next_step(request: Request) -> list[str]:
    """The command that trains a model of a suitable size on prepared text, and what to know about it.

    Nothing if the folder is not as the preparation leaves it.
    """
    options, data = request.options, request.out / "data-bin"
    found = [count_sentences(index) for index in sorted(data.glob("train.*.idx"))]
    if not found or not found[0]:
        return []
    pairs = found[0] // repetitions(options)
    size = size_for(pairs)
    words = ["lightconv", "train", size.config, f"task.data={_shown(data)}"]
    words.append(f"checkpoint.save_dir={_shown(workspace() / 'runs' / request.out.name)}")
    if not joined(options):
        words.append("model.share_all_embeddings=false")
    lines = [
        f"{pairs:,} training pairs; a model for this size, with the settings of {size.like}:",
        f"  {shlex.join(words)}",
    ]
    if options.bpe != size.merges:
        lines.append(f"  that recipe has {size.merges:,} BPE merges (--bpe), this text {options.bpe:,}")
    return lines


def _shown(path: Path) -> str:
    """The path as short as a command may have it: relative, if it is below the working directory."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def add_parser(commands) -> None:
    width, about = max(map(len, TASKS)) + 2, sources()["about"]
    listing = "\n".join(f"  {name:<{width}}{about[name].splitlines()[0]}" for name in TASKS)
    parser = commands.add_parser(
        "prepare",
        usage="lightconv prepare TASK [options]    (lightconv prepare TASK --help: its options)",
        description="Downloads the published files of a corpus, checks them, and makes fairseq's binary data from them."
        " Finished steps\nare not repeated: run the same command again to resume.\n\n" + listing,
    )
    parser.add_argument("task", metavar="TASK", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(before=task_first)
