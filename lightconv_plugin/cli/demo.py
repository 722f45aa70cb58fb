"""`lightconv demo`: from nothing to a BLEU score, a small DynamicConv beside a Transformer of the same size."""

import argparse
import sys
from pathlib import Path

from lightconv_plugin.arguments import natural, positive

DESCRIPTION = """\
Prepares a corpus, trains a DynamicConv and a Transformer, averages checkpoints, translates the test set by beam search
and prints one table and some translations.

Without DIR the corpus is German–English text written by a small grammar: some minutes on two cores. DIR is any folder
of parallel text: train.XX, valid.XX (or val, dev) and test*.XX for two languages XX, plain or .gz; more than 20,000
pairs are given to the larger models of multi30k_en_de.

Everything is in the work folder: report.html with curves, kernels and translations, the table as report.md and
report.json. What is done is not done again; after Ctrl-C, rerun the same command to resume."""


def run(args: argparse.Namespace) -> int:
    from lightconv_plugin.recipes.demo.run import demo
    from lightconv_plugin.recipes.demo.training import TrainingFailed

    try:
        table = demo(args.raw, updates=args.updates, seed=args.seed, work=args.work, src=args.src, tgt=args.tgt)
    except TrainingFailed as error:
        print(f"lightconv demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nlightconv demo: interrupted; rerun the same command to resume", file=sys.stderr)
        return 130
    print(table, flush=True)
    return 0


def add_parser(commands) -> None:
    parser = commands.add_parser("demo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", nargs="?", type=Path, metavar="DIR", help="folder of parallel text")
    parser.add_argument(
        "--updates", type=positive, metavar="N", help="length of a training (default: its configuration's)"
    )
    parser.add_argument(
        "--seed", type=natural, default=1, metavar="N", help="of the grammar and of the trainings (default: 1)"
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="the work folder (default: runs/demo/NAME)")
    parser.add_argument("--src", metavar="XX", help="source language, if the file names do not tell")
    parser.add_argument("--tgt", metavar="YY", help="target language")
    parser.set_defaults(run=run)
