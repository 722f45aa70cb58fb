"""`lightconv report`: one HTML page about trainings."""

import argparse
from pathlib import Path

from lightconv_plugin.arguments import add_force
from lightconv_plugin.files import atomic_write, check_new_file, write_text
from lightconv_plugin.quiet import quietly

FIGURES = (".png", ".svg", ".pdf")


def run(args: argparse.Namespace) -> int:
    for path in (args.output, args.figure):  # fail before minutes of work
        if path is not None:
            check_new_file(path, args.force)
    with quietly():
        # Imported here, so that --help needs neither torch nor matplotlib.
        from lightconv_plugin.report.assemble import kernel_figure, make_report

        report = make_report(args.run_dirs, args.data_bin, args.sentences, args.checkpoint)
    write_text(args.output, report.page)
    notes = f"; notes on the page: {report.problems}" if report.problems else ""
    size = len(report.page.encode(errors="backslashreplace"))
    print(f"{args.output}: {len(args.run_dirs)} runs, {size / 1e6:.1f} MB{notes}")
    if args.figure is not None:
        with quietly():
            picture = kernel_figure(report, args.figure.suffix[1:])
        with atomic_write(args.figure, binary=True) as file:
            file.write(picture)
        print(f"{args.figure}: {len(picture) / 1e3:.0f} kB")
    return 0


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1000):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 1000, got {text!r}")
    return int(text)


def _name(text: str) -> str:
    if not text or "/" in text:
        raise argparse.ArgumentTypeError(f"must be the name of a file in each RUN_DIR, got {text!r}")
    return text


def _figure(text: str) -> Path:
    if Path(text).suffix not in FIGURES:
        raise argparse.ArgumentTypeError(f"must end in {', '.join(FIGURES)}, got {text!r}")
    return Path(text)


def add_parser(commands) -> None:
    parser = commands.add_parser("report", description="Writes a self-contained HTML page about trainings.")
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="folder of a training (checkpoint.save_dir)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default: report.html)"
    )
    parser.add_argument(
        "--data-bin", type=Path, metavar="DIR", help="binarised data of all runs (default: where each training had it)"
    )
    parser.add_argument("--sentences", type=_number, default=8, metavar="N", help="sample translations (default: 8)")
    parser.add_argument(
        "--checkpoint", type=_name, metavar="NAME",
        help="checkpoint in each RUN_DIR whose kernels are shown (default: the newest averageN.pt, else "
        "checkpoint_best.pt, else checkpoint_last.pt)",
    )  # fmt: skip
    parser.add_argument(
        "--figure", type=_figure, metavar="FILE", help="also draw the kernels of all runs as a .png, .svg or .pdf"
    )
    add_force(parser, "the page and the figure, if they exist")
