"""The request for a preparation: the options that all tasks share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lightconv_plugin.arguments import positive
from lightconv_plugin.errors import InputError
from lightconv_plugin.paths import workspace
from lightconv_plugin.recipes.steps import cores


@dataclass(frozen=True)
class Request:
    """The parsed options of a preparation.

    variant     which variant of the task is prepared, by its name in sources.toml
    data        folder of the published files, absolute
    data_given  the folder is the user's: nothing is downloaded, and nothing in it is changed
    out         output folder, absolute
    mirror      address or absolute folder to take the files from; "" for their original addresses
    workers     number of processes
    any_size    accept other data of the same form: neither checksums nor sizes are compared
    options     the task's own
    """

    variant: str
    data: Path
    data_given: bool
    out: Path
    mirror: str
    workers: int
    any_size: bool
    options: argparse.Namespace


class Parser(argparse.ArgumentParser):
    """Raises InputError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def folder(text: str) -> Path:
    """The absolute path of a folder, for argparse."""
    if not text:
        raise argparse.ArgumentTypeError("must name a folder, got ''")
    return Path(text).resolve()


def place(text: str) -> str:
    """An address without trailing slashes, or the absolute path of a folder, for argparse."""
    return text.rstrip("/") if "://" in text else str(folder(text))


def make_parser(program: str, about: str, data: str, out: str, published: bool) -> Parser:
    """A parser with the options of every task.

    Args:
        about: for --help
        data, out: the default folders, for --help; data is "" if only the user can provide the text
        published: the task has published files, which are downloaded and compared
    """
    parser = Parser(
        prog=program,
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(mirror=None, any_size=False)
    made = "downloaded" if published else "written"
    otherwise = f"without it, it is {made} to {data}" if data else "needed"
    parser.add_argument("--data", type=folder, metavar="DIR", help=f"folder of the text; {otherwise}")
    parser.add_argument("--out", type=folder, metavar="DIR", help=f"folder to fill (default: {out})")
    if published:
        parser.add_argument("--mirror", type=place, metavar="PLACE", help="address or folder to take the files from")
        parser.add_argument(
            "--any-size",
            action="store_true",
            help="accept other data of the same form: neither checksums nor sizes are compared",
        )
    parser.add_argument(
        "--workers", type=positive, default=cores(), metavar="N", help="processes (default: all cores, %(default)s)"
    )
    return parser


def make_request(args: argparse.Namespace, data: str, out: str) -> Request:
    """The request of parsed arguments.

    Args:
        data, out: default folders, relative to the workspace; {out} in `data` is the output folder; data is "" if only
            the user can provide the text

    Raises:
        InputError: --data and --mirror contradict each other, --data does not exist, or it is required and missing.
    """
    if args.data is None and not data:
        raise InputError("--data is missing: it names the folder of your text")
    if args.data is not None and args.mirror:
        raise InputError("--mirror is not valid with --data, from which nothing is downloaded")
    if args.data is not None and not args.data.is_dir():
        raise InputError(f"--data: there is no folder {args.data}")
    out_folder = args.out or workspace() / out
    data_folder = args.data or workspace() / data.format(out=out_folder)
    return Request(
        args.variant,
        data_folder,
        args.data is not None,
        out_folder,
        args.mirror or "",
        args.workers,
        args.any_size,
        options=args,
    )
