"""Chooses the number of checkpoints to average and the length penalty by the score on the validation set.

The score of a setting is that of fairseq-generate and `lightconv score`, or of fairseq-eval-lm.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lightconv_plugin.checkpoints.averaging import average_once, checkpoints_in_order
from lightconv_plugin.errors import InputError
from lightconv_plugin.generation import fairseq_generate
from lightconv_plugin.recipes.evaluation import (
    OWN,
    check_data,
    check_direction,
    check_options,
    check_references,
    check_search,
    direction,
    languages_in,
    measure_perplexity,
)
from lightconv_plugin.scoring.bleu import Measure
from lightconv_plugin.scoring.generate_log import FAIRSEQS
from lightconv_plugin.scoring.measuring import Measuring, languages_of
from lightconv_plugin.scoring.significance import compare

BLEU_MEASURES = ("bleu_tok", "sacrebleu", "chrf")
ROUGE_MEASURES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
MEASURES = (*BLEU_MEASURES, *ROUGE_MEASURES, "perplexity")


@dataclass(frozen=True)
class Setting:
    """One setting and its score. lenpen: None if nothing is generated (perplexity)."""

    average: int
    lenpen: float | None
    score: float


def better(setting: Setting, lower: bool) -> tuple:
    """The sort key: best score first; ties go to fewer checkpoints, then to the length penalty closest to 1."""
    return (setting.score if lower else -setting.score, setting.average, _plainness(setting.lenpen))


def _plainness(lenpen: float | None) -> float:
    return 0 if lenpen is None else abs(lenpen - 1)


def search(
    numbers: Sequence[int],
    lenpens: Sequence[float | None],
    score: Callable[[int, float | None], float],
    grid: bool = False,
    lower: bool = False,
) -> list[Setting]:
    """Try settings and return all of them, best first.

    Tries each number with the length penalty closest to 1, then all other penalties with the best number; with `grid`,
    all pairs. `score(number, lenpen)` is called once per setting. lower: lower scores are better.
    """
    from tqdm import tqdm

    lenpens = sorted(lenpens, key=_plainness)
    # All penalties of one number in a row, since its checkpoint is averaged just before.
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


def plainest(tried: Sequence[Setting], as_good: Callable[[Setting, Setting], bool]) -> Setting:
    """Of the settings with the best one's number of checkpoints, the length penalty closest to 1 that is as good.

    Scores of a thousand sentences differ by chance, which pushes the best penalty to either end of the list.
    `as_good(setting, best)` says whether a difference may be chance. tried: as `search` returns it.
    """
    best = tried[0]
    same = sorted((one for one in tried if one.average == best.average), key=lambda one: _plainness(one.lenpen))
    return next(one for one in same if one == best or as_good(one, best))


def metric_of(by: str) -> str:
    """The metric that a measure belongs to: "bleu", "rouge" or "perplexity"."""
    return "bleu" if by in BLEU_MEASURES else "rouge" if by in ROUGE_MEASURES else "perplexity"


def tune(
    data: Path,
    save_dir: Path,
    *,
    by: str = "bleu_tok",
    average: Sequence[int] = (1,),
    lenpen: Sequence[float] = (),
    grid: bool = False,
    within: float = 0.0,
    subset: str = "valid",
    how: Measuring | None = None,
    options: Sequence[str] = (),
    context_window: int = 0,
    skip_missing: bool = False,
    allow_test: bool = False,
    warn: Callable[[str], None],
) -> dict[str, Any]:
    """Choose the number of averaged checkpoints and the length penalty by the measure `by`, one of MEASURES.

    Averages the last N checkpoints to SAVE_DIR/averageN.pt for each N in `average`, unless that file is already the
    mean of the same checkpoints.

    data: a folder of binarised data. save_dir: the checkpoints of a training.
    lenpen: length penalties, default (1,); none for perplexity. grid: try all pairs, see `search`.
    within: above 0, choose the length penalty closest to 1 that a paired bootstrap test does not find worse than the
        best with p < `within`, see `plainest`; for measures of translations.
    how: settings of BLEU or ROUGE; missing ones are read from the data folder.
    options: for fairseq-generate (or fairseq-eval-lm), added after `fairseq_generate.DEFAULTS`.
    context_window: for perplexity.
    skip_missing: skip numbers for which there are too few checkpoints. allow_test: allow tuning on a test set.
    warn: called with one-line warnings.

    Returns {"average", "lenpen", "score", "checkpoint", "metric", "subset", "options", "tried"}, for translations
    "search", see `Generated`, and for BLEU "lang", "lowercase" and "compound_split". "tried" has all settings, best
    first; "p_value", with `within`, says how likely the difference from the best is by chance.

    Raises:
        InputError: an argument is wrong (checked before any work), or averaging, generating or scoring failed.
    """
    metric = metric_of(by)
    _check_arguments(by, average, lenpen, within, subset, options, allow_test)
    if metric == "perplexity":
        check_data(data, subset)
        penalties: Sequence[float | None] = [None]
    else:
        penalties = lenpen or [1.0]
        languages = languages_of(data, subset, languages_in(options), how.lang if how else None)
        how = replace(how or Measuring(), metric=metric).with_data(data, subset, languages)
        check_references(data, subset, languages)
        how.check_language()
        if by == "bleu_tok":
            how = replace(how, raw_ref=None)  # not needed, and not every corpus has one for its validation set
        search_options = [*options, *direction(languages)]
        check_search(data, search_options, how, warn)
    checkpoints, average = _checkpoints(save_dir, average, skip_missing, warn)
    if metric != "perplexity":
        check_direction(checkpoints[0], data, subset, languages, options)
    paths: dict[int, Path] = {}
    searches: set[str] = set()
    translated: dict[tuple[int, float | None], Measure] = {}
    chances: dict[float | None, float] = {}

    warn_once = cache(warn)  # of what is the same with every setting

    def score(number: int, penalty: float | None) -> float:
        if number not in paths:
            average_once(checkpoints[:number], path := save_dir / f"average{number}.pt", force=True)
            paths[number] = path
        if penalty is None or how is None:
            return measure_perplexity(data, paths[number], subset, context_window, options)["perplexity"]
        log = fairseq_generate.generate(data, paths[number], subset, [*search_options, "--lenpen", repr(penalty)])
        how.check_decoded(log.decoded, "the text")
        searches.add(log.search or FAIRSEQS)
        if within:
            translated[number, penalty] = how.measures(log.hypotheses, log.references)[by]
        return getattr(how.report(log.hypotheses, log.references, warn_once), by)

    def as_good(setting: Setting, best: Setting) -> bool:
        ours, theirs = ({by: translated[one.average, one.lenpen]} for one in (setting, best))
        chances[setting.lenpen] = compare(ours, theirs, "the best").measures[by].p_value
        return chances[setting.lenpen] >= within

    tried = search(average, penalties, score, grid, lower=metric == "perplexity")
    chosen = plainest(tried, as_good) if within else tried[0]
    result = {
        **asdict(chosen),
        "checkpoint": str(paths[chosen.average]),
        "metric": by,
        "subset": subset,
        "options": list(options),
        "tried": [asdict(setting) for setting in tried],
    }
    if within:
        result |= {"within": within, "p_value": chances.get(chosen.lenpen, 1.0)}
    if searches:
        result["search"] = ", ".join(sorted(searches))
    if how is not None and metric == "bleu":
        result |= {"lang": how.lang, "lowercase": how.lowercase, "compound_split": how.compound_split}
    return result


def check_not_own(options: Sequence[str], metric: str) -> None:
    """Raise InputError if an option is one that tuning gives to fairseq's command itself."""
    command = "fairseq-eval-lm" if metric == "perplexity" else "fairseq-generate"
    check_options(options, (*OWN, "--lenpen"), command)


def _check_arguments(
    by: str,
    average: Sequence[int],
    lenpen: Sequence[float],
    within: float,
    subset: str,
    options: Sequence[str],
    allow_test: bool,
) -> None:
    if by not in MEASURES:
        raise InputError(f"`by` must be one of {', '.join(MEASURES)}, got {by!r}")
    if subset.startswith("test") and not allow_test:
        problem = "settings chosen on a test set inflate its score"
        raise InputError(f"`subset` {subset}: {problem}: tune on valid, or set `allow_test`")
    if not 0 <= within < 1 or (within and by not in BLEU_MEASURES):
        wanted = "0 to below 1" if by in BLEU_MEASURES else f"0 with {by}: the test is for {', '.join(BLEU_MEASURES)}"
        raise InputError(f"`within` must be {wanted}, got {within:g}")
    check_not_own(options, metric_of(by))
    for name, values in (("average", average), ("lenpen", lenpen)):
        if len(set(values)) < len(values):
            raise InputError(f"`{name}` has a value twice: {' '.join(f'{value:g}' for value in values)}")
        if not all(map(math.isfinite, values)):
            raise InputError(f"`{name}` must be finite numbers, got {values}")


def _checkpoints(
    save_dir: Path, average: Sequence[int], skip_missing: bool, warn: Callable[[str], None]
) -> tuple[list[Path], list[int]]:
    """(the checkpoints to average, newest first, the numbers for which there are enough)."""
    if not save_dir.is_dir():
        raise InputError(f"no folder {save_dir} with checkpoints")
    checkpoints = checkpoints_in_order(save_dir)
    if not checkpoints:
        raise InputError(f"{save_dir} has no checkpoints named checkpointEPOCH.pt or checkpoint_EPOCH_UPDATE.pt")
    too_many = [number for number in average if number > len(checkpoints)]
    if too_many and (not skip_missing or len(too_many) == len(average)):
        raise InputError(f"`average` {max(too_many)}: {save_dir} has only {len(checkpoints)} checkpoints")
    for number in too_many:
        warn(f"the average of {number} is left out: there are only {len(checkpoints)} checkpoints")
    return checkpoints, [number for number in average if number not in too_many]
