"""Entry point of the `lightconv` command: parses, runs one sub-command, turns its errors into one line and a status.

Exit status: 0 done; 1 `doctor` found something wrong, `build` failed, or `translate` left a line empty; 2 bad arguments
or input; 130 interrupted.
"""

import argparse
import signal
import sys
from collections.abc import Sequence

from lightconv_plugin import report
from lightconv_plugin.checkpoints import averaging
from lightconv_plugin.cli import build, convert, doctor, score, translate, tune, user_dir
from lightconv_plugin.errors import ArgumentError, InputError


def build_parser() -> argparse.ArgumentParser:
    """The parser with all sub-commands; each leaves its function in `args.run`."""
    parser = argparse.ArgumentParser(
        prog="lightconv", description="Tools of the LightConv/DynamicConv plugin for fairseq."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (user_dir, doctor, build, averaging, tune, score, translate, convert, report):
        module.add_parser(commands)
    return parser


def _leave(signum, frame):
    """SIGTERM as an exception, so that a half-written temporary file is removed on the way out."""
    raise SystemExit(128 + signum)


def _line(error: Exception, args: argparse.Namespace) -> str:
    """An error as one line; an argument of a function is called by the option that set it."""
    text = str(error)
    if isinstance(error, ArgumentError) and hasattr(args, error.name):
        text = f"--{error.name.replace('_', '-')} {error.problem}"
    return " ".join(text.split())


def main(argv: Sequence[str] | None = None) -> int:
    """Run `lightconv` with these arguments (default: those of the process) and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    rest = None
    if argv[:1] == ["tune"] and "--" in argv:
        # What follows "--" goes to fairseq as it is; argparse would take the first of it for a positional.
        at = argv.index("--")
        argv, rest = argv[:at], argv[at + 1 :]
    args = build_parser().parse_args(argv)
    if rest is not None:
        args.rest = rest
    previous = signal.signal(signal.SIGTERM, _leave)
    try:
        return args.run(args)
    except (InputError, OSError) as error:
        print(f"lightconv {args.command}: error: {_line(error, args)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"lightconv {args.command}: interrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
