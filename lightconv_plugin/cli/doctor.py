"""`lightconv doctor`: show what is installed and check that its results are correct."""

import argparse
import logging

from lightconv_plugin.diagnostics.explain import DTYPES, OPERATORS, explain
from lightconv_plugin.errors import InputError
from lightconv_plugin.quiet import quietly


def run(args: argparse.Namespace) -> int:
    if args.explain:
        print(explain(tuple(args.explain), args.operator or "dynamicconv", args.dtype or "float32"))
        return 0
    for name in ("operator", "dtype"):
        if getattr(args, name):
            raise InputError(f"--{name} belongs to --explain: give both or neither")
    from lightconv_plugin.diagnostics.checks import examine

    # fairseq and its dependencies log a lot during import; the findings have everything that matters.
    with quietly(logging.WARNING):
        report = examine()
    print(report.json() if args.json else report.lines(args.verbose))
    return 0 if report.ok else 1


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "doctor",
        description="Checks the installation: versions, GPUs, kernels, the patches applied to fairseq, and whether the "
        "results of operators and models are correct. Exit status 1 if something is wrong.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("-v", "--verbose", action="store_true", help="print every finding instead of one line per area")
    form.add_argument("--json", action="store_true", help="print every finding as one JSON object")
    form.add_argument(
        "--explain",
        nargs=5,
        type=int,
        metavar=("T", "B", "C", "H", "K"),
        help="print only which path a full pass of an operator takes through the kernels, and why not those before it: "
        "T time steps, a batch of B, C channels, H heads, filters of K taps (talkconv: windows of K rows)",
    )
    parser.add_argument("--operator", choices=OPERATORS, help="for --explain; default: dynamicconv")
    parser.add_argument("--dtype", choices=DTYPES, help="for --explain; default: float32")
