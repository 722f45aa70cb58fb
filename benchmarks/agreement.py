"""Compares three searches with one model: fairseq-generate, Translator on the exported model, Hugging Face's generate.

    python -m benchmarks.agreement --path average5.pt --data data/multi30k_en_de/data-bin --source test.en

--source is the raw text of the test set in --data. Prints how many translations are identical, piece by piece. If two
differ but their scores are closer than --tie, both are valid results. Lines whose pieces are others than in --data (for
example because a tokeniser has changed) are counted and not compared.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import machine, report
from benchmarks.report import BenchmarkError
from lightconv_plugin.checkpoints.exported import open_exported
from lightconv_plugin.checkpoints.exporting import Export, export_checkpoint
from lightconv_plugin.errors import InputError, how_to_get
from lightconv_plugin.generation import fairseq_generate
from lightconv_plugin.generation.translator import Translator

_BATCH = 32
_LONGEST = 200


@dataclass(frozen=True)
class Found:
    """A translation: its pieces, and the sum of their log-probabilities (base 2) divided by length^lenpen.

    source: the pieces of the source, where fairseq says them.
    """

    pieces: str
    score: float
    source: str = ""


def parser() -> argparse.ArgumentParser:
    result = machine.parser("agreement", __doc__)
    result.add_argument("--path", type=Path, required=True, metavar="CHECKPOINT")
    result.add_argument("--data", type=Path, required=True, metavar="DATA_BIN")
    result.add_argument("--source", type=Path, required=True, metavar="FILE", help="raw text of the test set")
    result.add_argument("--beam", type=machine.positive, default=5, metavar="N")
    result.add_argument("--lenpen", type=float, default=1.0, metavar="X")
    result.add_argument("--tie", type=float, default=1e-5, metavar="X", help="scores this close are a tie")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Translate, print the table and write the JSON; BenchmarkError for wrong options."""
    options = parser().parse_args(arguments)
    device = machine.prepare(options)
    lines = report.lines_of(options.source, "--source")
    description = machine.describe(device)
    print(machine.headline(description))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        directory = Path(folder) / "exported"
        try:
            wanted = Export(beam=options.beam, lenpen=options.lenpen)
            export_checkpoint(options.path, directory, options.data, wanted)
            theirs = _fairseq(options)
        except InputError as error:
            raise BenchmarkError(str(error)) from error
        if len(theirs) != len(lines):
            raise BenchmarkError(f"--source has {len(lines)} lines, the test set of --data {len(theirs)} sentences")
        if options.quick:
            lines = lines[:40]
        read = _sources(directory, lines)
        kept = [number for number, source in enumerate(read) if source == theirs[number].source]
        others = len(lines) - len(kept)
        if not kept:
            raise BenchmarkError("--source: each line has other pieces than in --data; it must be raw text")
        theirs, lines = [theirs[number] for number in kept], [lines[number] for number in kept]
        found = {
            "Translator": _translator(directory, lines, options),
            "transformers": _transformers(directory, lines, options),
        }
    results = {name: _compare(theirs, ours, options.tie) for name, ours in found.items()}
    rows = [
        [name, len(lines), result["same"], result["ties"], result["differ"], f"{result['largest_score_error']:.1e}"]
        for name, result in results.items()
    ]
    headers = ["against fairseq-generate", "sentences", "same", "ties", "differ", "largest score error"]
    print(report.table(headers, rows))
    if others:
        print(f"not compared: {others} lines of --source, which have other pieces than in --data")
    if options.json:
        content = {
            "benchmark": "agreement",
            "machine": description,
            "beam": options.beam,
            "lenpen": options.lenpen,
            "tie": options.tie,
            "test_sentences": len(lines),
            "other_sources": others,
            "quick": options.quick,
            "systems": results,
        }
        report.write_json(options.json, content)


def _fairseq(options: argparse.Namespace) -> list[Found]:
    """Translations by fairseq's own SequenceGenerator, without joining subwords."""
    arguments = ["--beam", str(options.beam), "--lenpen", str(options.lenpen), "--max-len-b", str(_LONGEST)]
    if options.device == "cpu":
        arguments.append("--cpu")
    text = fairseq_generate.generate_log(
        options.data, options.path, "test", [*arguments, "--task", "translation", "--post-process", "none"]
    )
    sources, found = {}, {}
    for line in text.splitlines():
        number, *rest = line[2:].split("\t")
        if line.startswith("S-"):
            (sources[number],) = rest
        elif line.startswith("H-"):
            score, pieces = rest
            found[int(number)] = Found(pieces, float(score), sources[number])
    return [found[number] for number in sorted(found)]


def _sources(directory: Path, lines: list[str]) -> list[str]:
    """The pieces of the lines, as fairseq prints them."""
    exported = open_exported(directory)
    encode, words = exported.source_text.encode(), exported.source
    return [" ".join(words[words.index(piece)] for piece in encode(line)) for line in lines]


def _translator(directory: Path, lines: list[str], options: argparse.Namespace) -> list[Found]:
    with Translator(directory, max_len_b=_LONGEST, dtype="float32", device=options.device) as translator:
        return [Found(" ".join(t.tokens), t.score or 0.0) for t in translator.translate(lines)]


def _transformers(directory: Path, lines: list[str], options: argparse.Namespace) -> list[Found]:
    """Translations by `generate` of the class that AutoModelForSeq2SeqLM finds, in batches."""
    try:
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        import lightconv_plugin.hf  # noqa: F401  (registers its classes)
    except ImportError as error:
        raise BenchmarkError(f"{error.name} is not installed: {how_to_get('hf')}") from error
    words = open_exported(directory).target
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSeq2SeqLM.from_pretrained(directory).eval().to(options.device)
    found = []
    for first in range(0, len(lines), _BATCH):
        batch = tokenizer(lines[first : first + _BATCH], padding=True, return_tensors="pt").to(options.device)
        output = model.generate(
            **batch,
            num_beams=options.beam,
            length_penalty=options.lenpen,
            early_stopping=True,
            max_length=_LONGEST + 2,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for row, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
            pieces = [token for token in row[1:] if token not in (model.config.pad_token_id, model.config.eos_token_id)]
            found.append(Found(" ".join(words[index] for index in pieces), score / math.log(2)))
    return found


def _compare(theirs: list[Found], ours: list[Found], tie: float) -> dict[str, float]:
    result = {"same": 0, "ties": 0, "differ": 0, "largest_score_error": 0.0}
    for first, second in zip(theirs, ours, strict=False):
        error = abs(first.score - second.score)
        if first.pieces == second.pieces:
            result["same"] += 1
            result["largest_score_error"] = max(result["largest_score_error"], error)
        else:
            result["ties" if error < tie else "differ"] += 1
    return result


if __name__ == "__main__":
    raise SystemExit(report.run(main))
