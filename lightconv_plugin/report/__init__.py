"""`lightconv report`: one HTML page about trainings: curves, scores beside the papers', kernels, translations.

    lightconv report runs/multi30k_en_de/* -o report.html
    lightconv report runs/a runs/b --data-bin data/multi30k_en_de/data-bin --sentences 12 --checkpoint average5.pt

The page needs no network: its pictures are in it. What a run lacks, or what of it cannot be read, is said on the page.
"""

import argparse
from pathlib import Path

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import atomic_write


def run(args: argparse.Namespace) -> int:
    # Here, so that the command's help needs neither torch nor matplotlib.
    from lightconv_plugin.report.command import make_report

    output = args.output
    if not output.absolute().parent.is_dir():  # before minutes of work
        raise InputError(f"-o {output}: there is no folder {output.absolute().parent}")
    page, problems = make_report(args.run_dirs, args.data_bin, args.sentences, args.checkpoint)
    with atomic_write(output) as file:
        file.write(page)
    print(f"{output}: {len(args.run_dirs)} runs, {len(page.encode()) / 1e6:.1f} MB" + _noted(problems))
    return 0


def _noted(problems: int) -> str:
    return f"; {problems} notes on what is missing or cut off are on the page" if problems else ""


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1000):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 1000, got {text!r}")
    return int(text)


def _name(text: str) -> str:
    if not text or "/" in text:
        raise argparse.ArgumentTypeError(f"must be the name of a file in each RUN_DIR, got {text!r}")
    return text


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "report",
        help="one HTML page about trainings: curves, scores, kernels, translations",
        description="Writes one self-contained HTML page about the trainings in the folders given.",
    )
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="folder of a training (checkpoint.save_dir)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default: report.html)"
    )
    parser.add_argument(
        "--data-bin", type=Path, metavar="DIR", help="binarised data, if not where the training had it; for all runs"
    )
    parser.add_argument("--sentences", type=_number, default=8, metavar="N", help="sample translations (default: 8)")
    parser.add_argument(
        "--checkpoint", type=_name, metavar="NAME",
        help="file in each RUN_DIR whose kernels are shown (default: the newest averageN.pt, else checkpoint_best.pt, "
        "else checkpoint_last.pt)",
    )  # fmt: skip
    parser.set_defaults(run=run)
