"""`lightconv tune`: how many checkpoints to average and which length penalty, by beam search of the validation set.

    lightconv tune data/iwslt14_de_en/data-bin runs/iwslt14_de_en/dynamicconv --average 1 5 10 --lenpen 0.6 0.8 1.0 1.2
    lightconv tune data/cnndm/data-bin runs/cnndm/dynamicconv --by rougeL --average 5 10 --lenpen 1 2 -- --beam 4
    lightconv tune data/wikitext103/data-bin runs/wikitext103/talkconv --by perplexity --average 1 5 10

The papers tune both so. Each setting's score is what fairseq-generate and `lightconv score` give for it.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightconv_plugin.checkpoints.averaging import average_once, checkpoints_in_order
from lightconv_plugin.cli.arguments import positive
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import atomic_write
from lightconv_plugin.generation import fairseq_generate
from lightconv_plugin.scoring import perplexity
from lightconv_plugin.scoring.bleu import check_language
from lightconv_plugin.scoring.options import (
    BLEU_OPTIONS,
    ROUGE_OPTIONS,
    add_bleu_options,
    add_rouge_options,
    bleu_report,
    check_decoded,
    check_languages,
    refuse,
    rouge_report,
    take_from_data,
)

BLEU_MEASURES = ("bleu_tok", "sacrebleu", "chrf")
ROUGE_MEASURES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
MEASURES = (*BLEU_MEASURES, *ROUGE_MEASURES, "perplexity")
# Options of fairseq's commands that this one gives itself, or that would hide what it reads.
OWN = ("--path", "--gen-subset", "--lenpen", "--user-dir", "--nbest", "--quiet", "--results-path", "--log-format")


@dataclass(frozen=True)
class Setting:
    """One setting and its score. lenpen: None where nothing is generated (perplexity)."""

    average: int
    lenpen: float | None
    score: float


def better(setting: Setting, lower: bool) -> tuple:
    """The sorting key: best first; of equal ones that of fewer checkpoints, then of the length penalty nearest 1."""
    return (setting.score if lower else -setting.score, setting.average, *_plainness(setting.lenpen))


def _plainness(lenpen: float | None) -> tuple[float, float]:
    return (0, 0) if lenpen is None else (abs(lenpen - 1), lenpen)


def search(
    numbers: Sequence[int],
    lenpens: Sequence[float | None],
    score: Callable[[int, float | None], float],
    grid: bool = False,
    lower: bool = False,
) -> list[Setting]:
    """Every setting that was tried, the best first.

    Each number with the length penalty nearest 1, then every other penalty with the best number; with `grid` all pairs.
    `score(number, lenpen)` is called once for a setting. lower: the lower score is the better one.
    """
    from tqdm import tqdm

    lenpens = sorted(lenpens, key=_plainness)
    # The penalties of one number come together: its checkpoint is averaged just before.
    first = [(number, lenpen) for number in numbers for lenpen in (lenpens if grid else lenpens[:1])]
    rest = [] if grid else lenpens[1:]
    tried: list[Setting] = []
    with tqdm(total=len(first) + len(rest), desc="tuning", unit="setting") as bar:

        def attempt(number: int, lenpen: float | None) -> None:
            bar.set_postfix_str(f"average {number}" + ("" if lenpen is None else f", lenpen {lenpen:g}"))
            tried.append(Setting(number, lenpen, score(number, lenpen)))
            bar.update()

        for number, lenpen in first:
            attempt(number, lenpen)
        best = min(tried, key=lambda setting: better(setting, lower)).average
        for lenpen in rest:
            attempt(best, lenpen)
    return sorted(tried, key=lambda setting: better(setting, lower))


def run(args: argparse.Namespace) -> int:
    checkpoints = _checked(args)
    lower = args.by == "perplexity"
    evaluate = _perplexity if lower else _translation
    paths: dict[int, Path] = {}

    def score(number: int, lenpen: float | None) -> float:
        if number not in paths:
            path = args.save_dir / f"average{number}.pt"
            average_once(checkpoints[:number], path)
            paths[number] = path
        return evaluate(args, paths[number], lenpen)

    tried = search(args.average, args.lenpen, score, args.grid, lower)
    best = tried[0]
    result = {
        **asdict(best),
        "checkpoint": str(paths[best.average]),
        "metric": args.by,
        "subset": args.subset,
        "options": args.rest,
        "tried": [asdict(setting) for setting in tried],
    }
    if args.by in BLEU_MEASURES:
        result |= {name: getattr(args, name) for name in ("lang", "lowercase", "compound_split")}
    text = json.dumps(result, ensure_ascii=False) + "\n" if args.json else _for_people(result)
    if args.output:
        with atomic_write(args.output) as file:
            file.write(text)
    sys.stdout.write(text)
    return 0


def _translation(args: argparse.Namespace, checkpoint: Path, lenpen: float | None) -> float:
    log = fairseq_generate.generate(args.data, checkpoint, args.subset, [*args.rest, "--lenpen", repr(lenpen)])
    if args.by in ROUGE_MEASURES:
        return getattr(rouge_report(args, log.hypotheses, log.references), args.by)
    check_decoded(args, log, "the text")
    return getattr(bleu_report(args, log.hypotheses, log.references), args.by)


def _perplexity(args: argparse.Namespace, checkpoint: Path, lenpen: None) -> float:
    window, rest = _window(args.rest)
    return perplexity.measure(args.data, checkpoint, args.subset, window, rest)["perplexity"]


def _window(rest: Sequence[str]) -> tuple[int, list[str]]:
    """--context-window among fairseq-eval-lm's options: the batches depend on it; and the other options."""
    parser = argparse.ArgumentParser(prog="lightconv tune", add_help=False, allow_abbrev=False)
    parser.add_argument("--context-window", type=int, default=0)
    known, others = parser.parse_known_args(list(rest))
    return known.context_window, others


def _checked(args: argparse.Namespace) -> list[Path]:
    """The checkpoints to average from, the newest first; everything that can be refused is refused before any work."""
    if args.subset.startswith("test") and not args.allow_test:
        raise InputError(
            f"--subset {args.subset}: settings that are chosen on a test set make its score too good; tune on valid "
            "(--allow-test if this is not the set that is reported)"
        )
    for option in args.rest:
        if option.split("=")[0] in OWN:
            raise InputError(f"{option.split('=')[0]} after -- is given by `lightconv tune` itself: leave it out")
    for name in ("average", "lenpen"):
        values = getattr(args, name)
        if len(set(values)) < len(values):
            raise InputError(f"--{name} has a value twice: {' '.join(f'{value:g}' for value in values)}")
    _check_measure(args)
    if not args.save_dir.is_dir():
        raise InputError(f"no folder {args.save_dir} with checkpoints")
    return _check_checkpoints(args)


def _check_measure(args: argparse.Namespace) -> None:
    if args.by == "perplexity":
        refuse(args, ("lenpen", "grid", *BLEU_OPTIONS, *ROUGE_OPTIONS), "means nothing to --by perplexity")
        args.lenpen = [None]
        perplexity.check_data(args.data, args.subset)
        return
    args.lenpen = args.lenpen or [1.0]
    if args.by in ROUGE_MEASURES:
        refuse(args, BLEU_OPTIONS, f"means nothing to --by {args.by}")
        check_languages(args.data, args.subset)
    else:
        refuse(args, ROUGE_OPTIONS, f"means nothing to --by {args.by}")
        take_from_data(args, args.data, args.subset)
        check_language(args.lang)
        if args.by == "bleu_tok":
            args.raw_ref = None  # not looked at, and not every corpus has raw references of its validation set
    fairseq_generate.parse_options([str(args.data), *args.rest])


def _check_checkpoints(args: argparse.Namespace) -> list[Path]:
    checkpoints = checkpoints_in_order(args.save_dir)
    if not checkpoints:
        raise InputError(f"{args.save_dir} has no checkpoints named checkpointEPOCH.pt or checkpoint_EPOCH_UPDATE.pt")
    too_many = [number for number in args.average if number > len(checkpoints)]
    if too_many and (not args.skip_missing or len(too_many) == len(args.average)):
        raise InputError(
            f"--average {max(too_many)}: {args.save_dir} has {len(checkpoints)} checkpoints"
            + (", too few for every number" if args.skip_missing else " (--skip-missing leaves such numbers out)")
        )
    for number in too_many:
        print(f"lightconv tune: left out: the mean of {number}; there are {len(checkpoints)}", file=sys.stderr)
    args.average = [number for number in args.average if number not in too_many]
    return checkpoints


def _for_people(result: dict) -> str:
    def line(setting: dict) -> str:
        lenpen = "" if setting["lenpen"] is None else f"  lenpen {setting['lenpen']:g}"
        return f"{result['metric']} {setting['score']:.2f}  average {setting['average']}{lenpen}\n"

    return "".join(map(line, result["tried"])) + f"best: {line(result).rstrip()}  {result['checkpoint']}\n"


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return number


DESCRIPTION = """\
Chooses the number of averaged checkpoints and the length penalty by their score on the validation set.

Averages the last N checkpoints (of epochs; by updates where a training kept none of epochs) to SAVE_DIR/averageN.pt for
each N, or takes that file if it is the mean of the same checkpoints already. Generates the subset with each of them and
the length penalty nearest 1, then with the best of them and every other penalty; with --grid all pairs. Of equal scores
the one of fewer checkpoints wins, then the penalty nearest 1.

--by perplexity is for language models: fairseq-eval-lm as scripts/perplexity.sh runs it, and no length penalty.

What follows -- are options of fairseq-generate (or fairseq-eval-lm). Before them stand --beam 5 --remove-bpe
--max-tokens 8000, as for scripts/score.sh. The target language and the case are taken from a folder that
scripts/prepare_*.sh made; see --lang and --lowercase for others."""
EXAMPLE = """\
example:
  lightconv tune data/iwslt14_de_en/data-bin runs/iwslt14_de_en/dynamicconv --average 1 5 10 --lenpen 0.6 0.8 1.0 1.2
  lightconv tune data/cnndm/data-bin runs/cnndm/dynamicconv --by rougeL --average 5 10 --lenpen 1 2 -- --beam 4
  lightconv tune data/gbw/data-bin runs/gbw/dynamicconv --by perplexity --average 1 5 10 --json"""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "tune",
        help="choose the number of averaged checkpoints and the length penalty on the validation set",
        usage="lightconv tune DATA_BIN SAVE_DIR [options] [-- options of fairseq-generate]",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    parser.add_argument("--by", choices=MEASURES, default="bleu_tok", help="the score (default: %(default)s)")
    parser.add_argument("--subset", default="valid", metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--allow-test",
        action="store_true",
        help="accept a subset whose name begins with 'test': its score is no result",
    )
    parser.add_argument(
        "--skip-missing", action="store_true", help="leave out the numbers for which there are too few checkpoints"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, in one line")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write what is printed to this file")
    add_bleu_options(parser)
    add_rouge_options(parser)
    parser.set_defaults(run=run, rest=[])
