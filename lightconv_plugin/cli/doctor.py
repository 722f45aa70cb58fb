"""`lightconv doctor`: show what is installed and check that its results are correct."""

import argparse
import logging

from lightconv_plugin.quiet import quietly


def run(args: argparse.Namespace) -> int:
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
