"""`lightconv deploy`: compile an exported model into graphs that a C++ or Python program runs without this package."""

import argparse
from pathlib import Path

from lightconv_plugin.arguments import add_force
from lightconv_plugin.cli import old_words
from lightconv_plugin.quiet import quietly

_EXPORT = "torch.export"  # not "export", which is a command
_OLD = {"export": _EXPORT}
_FORMATS = {"aoti": "aoti", _EXPORT: "export"}  # and what deployment.json calls them


def run(args: argparse.Namespace) -> int:
    from lightconv_plugin.deployment import deploy

    if new := _OLD.get(args.format):
        old_words.warn("deploy", f"--format {args.format}", f"--format {new}")
    with quietly():
        deploy(
            args.directory,
            args.output,
            format=_FORMATS[_OLD.get(args.format, args.format)],
            force=args.force,
            said=_say,
        )
    size = sum(path.stat().st_size for path in args.output.iterdir() if path.is_file())
    print(f"written to {args.output}: {size / 1e6:,.1f} MB")
    return 0


def _say(line: str) -> None:
    print(f"{line} ...", flush=True)


DESCRIPTION = """\
Writes an exported model as two graphs, start.pt2 and step.pt2, with which a C++ or Python program decodes using only
torch, on the CPU and in float32. Dictionaries, merges and deployment.json (special symbols, layout of the state) are
written next to them. docs/deployment.md describes the graphs and has example programs.

  aoti           compiled by torch's AOTInductor (minutes; needs a C++ compiler): for this kind of processor and this
                 version of torch
  torch.export   exported programs: for any processor, slower, for Python only"""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "deploy", description=DESCRIPTION, epilog="example: lightconv deploy dynamicconv-de-en dynamicconv-de-en-aoti"
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the exported model (lightconv export)")
    parser.add_argument("output", type=Path, metavar="OUT", help="the directory to write")
    parser.add_argument(
        "--format",
        choices=(*_FORMATS, *_OLD),
        default="aoti",
        metavar="{" + ",".join(_FORMATS) + "}",
        help="type of graphs (default: %(default)s)",
    )
    add_force(parser, "OUT, if it is a deployed model")
