"""Reads the output of fairseq-generate: hypotheses and references in data order, or a clear error.

A log that is truncated, mixed from two runs or lacks sentences would give a BLEU score that looks right but is wrong.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lightconv_plugin.errors import InputError

SENTENCE = re.compile(r"([THD])-(\d{1,18})\t(.*)", re.DOTALL)
LAST_LINE = re.compile(r"(?:\| )?Generate \S+ with beam=\d+: ")  # the bar: from 2019 and before
# The complete line, with any of fairseq's scorers: "BLEU4 = …)", "WER: 12.34".
WHOLE = re.compile(r".*: (?:BLEU.*\)|(?!BLEU).*\d)")
TRANSLATED = re.compile(r"Translated (\d[\d,]*) sentences \((?:[^)]*\) in [\d.]+s \((\d+\.\d+) sentences/s)?")
EXAMPLES = re.compile(r" \S+-\S+ (\d+) examples$")
MESSAGE = re.compile(r"\r|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \| [A-Z]+ \| |(?:DEBUG|INFO|WARNING|ERROR):[\w.]+:")
FAIRSEQS = "fairseq's generator"
# What generation/generator.py and task.py log.
FALLING_BACK = re.compile(rf"falling back to ({FAIRSEQS})[^:]*: (.*)")
OUR_SEARCH = re.compile(r"(the plugin's own search) translates")
# In fairseq's line of all settings: those that change what is scored, or the numbers of the search.
SETTINGS = re.compile(r"'(prefix_size|generation_dtype|generation_shortlist)': (?!0\b|'float32'|'')'?(\d+|[^']+)")
SKIPPED = re.compile(r"([\d,]+) samples have invalid sizes and will be skipped")
# Since data2vec 2 (December 2022), fairseq drops the last batch if its size is not a multiple of the default 8.
LAST_BATCH = "(fairseq-generate may drop the last batch: give it --required-batch-size-multiple 1)"


@dataclass(frozen=True)
class Generated:
    """The sentences of a log, in data order.

    hypotheses: the final texts (D- lines, after fairseq's own --bpe and --tokenizer; H- lines if there are none).
    references: the text of the T- lines.
    decoded: whether --bpe or --tokenizer changed a hypothesis, so that its text may already be plain text.
    sentences_per_second: of the search itself, without loading and printing; None if the log does not have it.
    search: "the plugin's own search", or "fairseq's generator", with the reason in parentheses if it stood in for the
        other in some batch; then the options of SETTINGS, if there are any. None if the log does not say it.
    """

    hypotheses: list[str]
    references: list[str]
    decoded: bool
    sentences_per_second: float | None
    search: str | None

    def facts(self) -> dict[str, float | str | None]:
        """`sentences_per_second` and `search`, where the log has them."""
        known = {"sentences_per_second": self.sentences_per_second, "search": self.search}
        return {name: value for name, value in known.items() if value is not None}


def is_gen_log(lines: Sequence[str]) -> bool:
    """Whether this is output of fairseq-generate, complete or not, rather than plain text."""
    return any(SENTENCE.fullmatch(line) or LAST_LINE.match(line) for line in lines)


def parse_gen_log(lines: Sequence[str], name: Path) -> Generated:
    """Parse the lines of a fairseq-generate log; `name` identifies it in errors."""
    texts: dict[str, dict[int, str]] = {"T": {}, "H": {}, "D": {}}
    finished, counts, speed, search, chosen = False, {}, None, None, ""
    for line in lines:
        if match := SENTENCE.fullmatch(line):
            kind, number, text = match[1], int(match[2]), match[3]
            if finished:
                raise InputError(
                    f"{name}: sentences follow the line 'Generate … with beam=…': are these two logs in one?"
                )
            if MESSAGE.search(text):
                raise InputError(
                    f"{name}: {kind}-{number} has a message or a progress bar in it: standard output and standard "
                    "error are mixed in this file; redirect the latter elsewhere (2> errors.log)"
                )
            if number in texts[kind]:
                raise InputError(
                    f"{name}: {kind}-{number} occurs twice: generate with --nbest 1, and keep one run in a file"
                )
            if kind != "T":
                _, tab, text = text.partition("\t")
                if not tab:
                    raise InputError(f"{name}: {kind}-{number} has a score and no text: is the line cut off?")
            if "\t" in text:
                raise InputError(f"{name}: {kind}-{number} has another line in it: a line was cut off before it ended")
            texts[kind][number] = text
        elif LAST_LINE.match(line):
            finished = WHOLE.fullmatch(line) is not None
        elif match := FALLING_BACK.search(line):
            search = f"{match[1]} ({match[2]})"
        elif match := OUR_SEARCH.search(line):
            search = search or match[1]
        elif match := SKIPPED.search(line):
            raise InputError(f"{name}: fairseq-generate skipped {match[1]} sentences that were too long for the model")
        elif match := TRANSLATED.search(line):
            counts["it translated"] = int(match[1].replace(",", ""))
            speed = float(match[2]) if match[2] else None
        elif match := EXAMPLES.search(line):
            counts["the data has"] = int(match[1])
        elif "{'_name': " in line:
            chosen = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SETTINGS.findall(line))
    if chosen:
        search = f"{search or FAIRSEQS} with {chosen}"
    hypotheses, references, decoded = _checked(texts, finished, counts, name)
    return Generated(hypotheses, references, decoded, speed, search)


def _checked(
    texts: dict[str, dict[int, str]], finished: bool, counts: dict[str, int], name: Path
) -> tuple[list[str], list[str], bool]:
    if not texts["H"]:
        raise InputError(
            f"{name} has no H- lines: it is not the output of fairseq-generate (or of one run with --quiet)"
        )
    if not texts["T"]:
        raise InputError(f"{name} has no T- lines: fairseq-generate had no references to print")
    if not finished:
        raise InputError(f"{name} is cut off: it does not end with fairseq-generate's line 'Generate … with beam=…'")
    number = max(max(of_kind, default=-1) for of_kind in texts.values()) + 1
    kinds = ["T", "H"] + (["D"] if texts["D"] else [])
    for kind in kinds:
        missing = number - len(texts[kind])
        if missing:
            first = islice((i for i in range(number) if i not in texts[kind]), 5)  # a damaged number may be huge
            some = ", ".join(f"{kind}-{i}" for i in first) + (" …" if missing > 5 else "")
            raise InputError(f"{name}: {missing} of {number} sentences have no {kind}- line: {some} {LAST_BATCH}")
    for who, count in counts.items():
        if count != number:
            raise InputError(f"{name}: fairseq-generate says that {who} {count} sentences, not {number} {LAST_BATCH}")
    rows = {kind: [texts[kind][i] for i in range(number)] for kind in kinds}
    hypotheses = rows.get("D", rows["H"])
    return hypotheses, rows["T"], hypotheses != rows["H"]
