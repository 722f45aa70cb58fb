"""`lightconv tune`: choose the number of averaged checkpoints and the length penalty on the validation set.

Arguments after -- are in `args.rest`: options for fairseq's own commands.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from lightconv_plugin.arguments import add_force, positive
from lightconv_plugin.cli.score_options import (
    BLEU_OPTIONS,
    ROUGE_OPTIONS,
    add_bleu_options,
    add_rouge_options,
    measuring,
    refuse,
    warner,
)
from lightconv_plugin.files import check_new_file, write_text
from lightconv_plugin.recipes.environment import compute_here
from lightconv_plugin.recipes.tuning import MEASURES, metric_of, tune
from lightconv_plugin.scoring.perplexity import split_context_window


def run(args: argparse.Namespace) -> int:
    metric = metric_of(args.by)
    refused = {
        "bleu": ROUGE_OPTIONS,
        "rouge": BLEU_OPTIONS,
        "perplexity": ("lenpen", "grid", "within", *BLEU_OPTIONS, *ROUGE_OPTIONS),
    }
    refuse(args, refused[metric], f"--by {args.by}")
    if args.output:
        check_new_file(args.output, args.force)
    compute_here()
    # The batches of fairseq-eval-lm depend on it.
    args.context_window, rest = split_context_window(args.rest) if metric == "perplexity" else (0, args.rest)
    result = tune(
        args.data,
        args.save_dir,
        by=args.by,
        average=args.average,
        lenpen=args.lenpen,
        grid=args.grid,
        within=args.within,
        subset=args.subset,
        how=None if metric == "perplexity" else measuring(args, metric),
        options=rest,
        context_window=args.context_window,
        skip_missing=args.skip_missing,
        allow_test=args.allow_test,
        warn=warner("tune"),
    ) | {"options": args.rest}
    text = json.dumps(result, ensure_ascii=False) + "\n" if args.json else _for_people(result)
    print(text, end="")
    if args.output:
        write_text(args.output, text)
    return 0


def _for_people(result: dict[str, Any]) -> str:
    def line(setting: dict[str, Any]) -> str:
        lenpen = "" if setting["lenpen"] is None else f"  lenpen {setting['lenpen']:g}"
        return f"{result['metric']} {setting['score']:.2f}  average {setting['average']}{lenpen}\n"

    search = f"search: {result['search']}\n" if "search" in result else ""
    chosen = "best"
    if "within" in result:
        chosen = f"chosen (not worse than the best with p < {result['within']:g}: p = {result['p_value']:.3f})"
    return "".join(map(line, result["tried"])) + f"{chosen}: {line(result).rstrip()}  {result['checkpoint']}\n{search}"


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return number


DESCRIPTION = """\
Choose the number of averaged checkpoints and the length penalty by their score on the validation set.

For each N, the last N checkpoints (of epochs, or of updates if no epoch was saved) are averaged to
SAVE_DIR/averageN.pt, unless that file is already the average of the same checkpoints; another one is replaced. The
subset is translated with each average and the length penalty closest to 1, then with the best average and every other
penalty; with --grid, with all pairs. Ties go to fewer checkpoints, then to the penalty closest to 1. Scores differ by
chance, which pushes the best penalty to an end of the list; with --within 0.05, the penalty closest to 1 is chosen that
is not significantly worse than the best (paired bootstrap test, p >= 0.05).

--by perplexity is for language models: it runs fairseq-eval-lm and has no length penalty.

Options after -- go to fairseq-generate (lightconv evaluate --help describes those to know) or fairseq-eval-lm, after
the defaults --task translation_fast --beam 5 --lenpen 1 --remove-bpe --max-tokens 8000. Target language and
case are read from a prepared data folder; --lang and --lowercase override them."""
EXAMPLE = """\
example:
  lightconv tune data/iwslt14_de_en/data-bin runs/iwslt14_de_en/dynamicconv --average 1 5 10 --lenpen 0.6 0.8 1.0 1.2
  lightconv tune data/cnndm/data-bin runs/cnndm/dynamicconv --by rougeL --average 5 10 --lenpen 1 2 -- --beam 4
  lightconv tune data/gbw/data-bin runs/gbw/dynamicconv --by perplexity --average 1 5 --json"""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "tune",
        usage="lightconv tune DATA_BIN SAVE_DIR [options] [-- options of fairseq-generate]",
        description=DESCRIPTION,
        epilog=EXAMPLE,
    )
    parser.add_argument("data", type=Path, metavar="DATA_BIN", help="the folder of binarised data")
    parser.add_argument("save_dir", type=Path, metavar="SAVE_DIR", help="the folder of a training's checkpoints")
    parser.add_argument(
        "--average", nargs="+", type=positive, default=[1], metavar="N",
        help="numbers of checkpoints to average (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--lenpen", nargs="*", type=_finite, default=[], metavar="X", help="length penalties (default: 1)"
    )
    parser.add_argument("--grid", action="store_true", help="try every number with every length penalty")
    parser.add_argument(
        "--within", type=_finite, default=0.0, metavar="P",
        help="choose the penalty closest to 1 that is not worse than the best with p < P (default: 0, the best)",
    )  # fmt: skip
    parser.add_argument("--by", choices=MEASURES, default="bleu_tok", help="the score (default: %(default)s)")
    parser.add_argument("--subset", default="valid", metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--allow-test",
        action="store_true",
        help="accept a subset whose name begins with 'test'; its score is not a valid result",
    )
    parser.add_argument(
        "--skip-missing", action="store_true", help="skip numbers for which there are too few checkpoints"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, in one line")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write what is printed to this file")
    add_force(parser, "that file, if it exists")
    add_bleu_options(parser)
    add_rouge_options(parser)
    parser.set_defaults(rest=[])
