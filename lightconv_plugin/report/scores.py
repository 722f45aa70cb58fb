"""Scores and translations in a run's folder, as scripts/evaluate.sh and fairseq's commands write them.

CHECKPOINT.SUBSET.score    what `lightconv score` printed, text or JSON
CHECKPOINT.SUBSET.gen      what fairseq-generate printed; generate-SUBSET.txt with its --results-path
CHECKPOINT.SUBSET.ppl      a perplexity: what scripts/perplexity.sh wrote (JSON), or fairseq-eval-lm printed
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import read_lines
from lightconv_plugin.scoring.bleu import join_subwords
from lightconv_plugin.scoring.generate_log import LAST_LINE, parse_gen_log
from lightconv_plugin.scoring.perplexity import is_eval_lm_log, parse_eval_lm_log

# Key → heading. The keys are those of `lightconv score --json`, except "bleu".
MEASURES = {
    "bleu": "BLEU, tokenised",
    "sacrebleu": "sacreBLEU",
    "chrf": "chrF2",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "rougeLsum": "ROUGE-Lsum",
    "perplexity": "perplexity",
}
_JSON_NAMES = {"bleu_tok": "bleu", "ppl": "perplexity"}
_NUMBER = r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_TEXT = {
    "bleu": re.compile(rf"^(?:Generate \S+ with beam=\d+: )?BLEU4? = {_NUMBER}", re.MULTILINE),
    "sacrebleu": re.compile(rf"^sacreBLEU = {_NUMBER}", re.MULTILINE),
    "chrf": re.compile(rf"^chrF2 = {_NUMBER}", re.MULTILINE),
    **{f"rouge{n}": re.compile(rf"^ROUGE-{n} = {_NUMBER}", re.MULTILINE) for n in ("1", "2", "L", "Lsum")},
    "perplexity": re.compile(rf"^perplexity = {_NUMBER}", re.MULTILINE),
}
_SIGNATURE = re.compile(r"(?:^(sacreBLEU|chrF2) = \S+|^F1 of \d+ \S+.*?)  (\S+\|\S+)$", re.MULTILINE)
_UNIT = re.compile(r"^perplexity = .* bits a (\w+)", re.MULTILINE)
_REMARK = re.compile(r"^BLEU4 .*\)  (tokenised.*?)(?:, \d+ sentences)?$", re.MULTILINE)
_NAME = re.compile(r"(?:(?P<checkpoint>.+)\.(?P<subset>\w+)|generate-(?P<only>\w+))\.(?:score|gen|txt|ppl)")
SUFFIXES = (".score", ".ppl")


@dataclass
class Score:
    """The scores in one file. values: by keys of MEASURES. details: signatures and so on, as in the file."""

    checkpoint: str
    subset: str
    values: dict[str, float] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)


@dataclass
class Translations:
    """One log of fairseq-generate, with subwords joined; lists are in data order. sources: "" if not printed."""

    checkpoint: str
    subset: str
    sources: list[str]
    references: list[str]
    hypotheses: list[str]


def _named(path: Path) -> tuple[str, str]:
    match = _NAME.fullmatch(path.name)
    if match is None:
        return path.stem, ""
    return match["checkpoint"] or "", match["subset"] or match["only"]


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that scores or a log are named after."""
    return path.with_name(f"{_named(path)[0]}.pt")


def read_score(path: Path) -> Score:
    """The scores in a file; InputError if it has none."""
    lines = read_lines(path)
    text = "\n".join(lines)
    score = Score(*_named(path))
    if is_eval_lm_log(lines):
        result = parse_eval_lm_log(lines, path.name)
        score.values["perplexity"] = result.perplexity
        score.details += _unit(result.unit)
    elif text.lstrip().startswith("{"):
        _from_json(path, text, score)
    else:
        for key, pattern in _TEXT.items():
            if found := pattern.findall(text):
                score.values[key] = float(found[-1])
        score.details += _REMARK.findall(text)
        score.details += [f"{name} {signature}".strip() for name, signature in _SIGNATURE.findall(text)]
        score.details += _unit(*_UNIT.findall(text)[-1:])
    if not score.values:
        raise InputError(f"{path.name} has no known score ({', '.join(MEASURES.values())})")
    return score


def _from_json(path: Path, text: str, score: Score) -> None:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path.name} is not valid JSON, or is cut off: {error}") from error
    for key, value in content.items():
        name = _JSON_NAMES.get(key, key)
        if name in MEASURES and isinstance(value, (int, float)):
            score.values[name] = float(value)
    said = {"lowercase": "lower-cased", "compound_split": "compounds split"}
    score.details += [", ".join(word for key, word in said.items() if content.get(key))]
    names = {"signature": "sacreBLEU" if "sacrebleu" in score.values else "", "chrf_signature": "chrF2"}
    score.details += [f"{name} {content[key]}".strip() for key, name in names.items() if content.get(key)]
    if "context_window" in content:  # written by scripts/perplexity.sh
        tokens = f"{content.get('tokens_per_sample')} tokens"
        sample = tokens if content.get("sample_break_mode", "none") == "none" else "whole sentences"
        score.details += [f"samples of {sample}, context window {content['context_window']}"]
    score.details += _unit(content.get("unit", "token"))
    score.details = [detail for detail in score.details if detail]


def _unit(unit: str = "token") -> list[str]:
    """What a perplexity is per, if not a token of the dictionary."""
    return ["perplexity per word"] if unit == "word" else []


def generated_score(path: Path) -> Score | None:
    """The BLEU score in the line "Generate … with beam=…" of a fairseq-generate log, None if there is none."""
    matches = [match for line in read_lines(path) if LAST_LINE.match(line) and (match := _TEXT["bleu"].match(line))]
    if not matches:
        return None
    return Score(*_named(path), {"bleu": float(matches[-1][1])}, ["by fairseq-generate, on its own tokens"])


def read_translations(path: Path) -> Translations:
    """Sources, references and hypotheses of a fairseq-generate log; raises InputError like parse_gen_log."""
    lines = read_lines(path)
    log = parse_gen_log(lines, path)
    sources = [""] * len(log.references)
    for line in lines:
        head, tab, text = line.partition("\t")
        if tab and head.startswith("S-") and head[2:].isdigit() and int(head[2:]) < len(sources):
            sources[int(head[2:])] = text
    sides = (sources, log.references, log.hypotheses)
    return Translations(*_named(path), *([join_subwords(line) for line in side] for side in sides))


def generate_logs(folder: Path) -> list[Path]:
    """The logs of fairseq-generate in a folder, the newest first."""
    logs = [path for pattern in ("*.gen", "generate-*.txt") for path in folder.glob(pattern) if path.is_file()]
    return sorted(logs, key=lambda path: (-path.stat().st_mtime, path.name))


def score_files(folder: Path) -> list[Path]:
    return sorted(path for suffix in SUFFIXES for path in folder.glob(f"*{suffix}") if path.is_file())
