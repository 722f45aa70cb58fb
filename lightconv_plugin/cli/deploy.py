"""`lightconv deploy`: an exported model as graphs that a C++ or Python program runs without this package.

lightconv deploy dynamicconv-de-en dynamicconv-de-en-aoti
"""

import argparse
import logging
from pathlib import Path

_FORMATS = ("aoti", "export")


def run(args: argparse.Namespace) -> int:
    from lightconv_plugin.deployment import deploy

    logging.disable(logging.INFO)
    try:
        deploy(args.directory, args.output, format=args.format, force=args.force, said=_say)
    finally:
        logging.disable(logging.NOTSET)
    size = sum(path.stat().st_size for path in args.output.iterdir() if path.is_file())
    print(f"written to {args.output}: {size / 1e6:,.1f} MB")
    return 0


def _say(line: str) -> None:
    print(f"{line} ...", flush=True)


DESCRIPTION = """\
Writes an exported model as two graphs, start.pt2 and step.pt2, by which a program decodes with torch alone, in C++ or
Python, on the CPU and in float32. Dictionaries, merges and deployment.json (special symbols, what the state is) lie
beside them. docs/deployment.md describes the graphs and has programs that decode.

  aoti     compiled by torch's AOTInductor (minutes; needs a C++ compiler): for this kind of processor and this version
           of torch
  export   files of torch.export: for any processor, slower, for Python only"""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "deploy",
        description=DESCRIPTION,
        epilog="example: lightconv deploy dynamicconv-de-en dynamicconv-de-en-aoti",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the exported model (lightconv export)")
    parser.add_argument("output", type=Path, metavar="OUT", help="the directory to write")
    parser.add_argument("--format", choices=_FORMATS, default="aoti", help="of the graphs (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a deployed model")
    parser.set_defaults(run=run)
