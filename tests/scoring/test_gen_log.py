"""`lightconv score --gen`: whole logs of fairseq-generate, and every way in which one may not be whole."""

import random
import re

import pytest

from lightconv_plugin.errors import InputError
from lightconv_plugin.scoring.generate_log import parse_gen_log
from tests.scoring.corpora import CORPORA, PLAIN, SENTENCES, TOKENISED, as_json, refused, write

END = "Generate test with beam=5: BLEU4 = 1.00, 1.0/1.0/1.0/1.0 (BP=1.000, ratio=1.000, syslen=1, reflen=1)"


def log_of(hypotheses, references, detokenised=None, order=None, end=(END,)):
    """Lines as fairseq-generate prints them, batches in an order of its own."""
    lines = [f"2026-01-01 00:00:00 | INFO | fairseq.tasks.translation | data-bin test de-en {len(references)} examples"]
    for i in order or random.Random(5).sample(range(len(hypotheses)), len(hypotheses)):
        lines += [f"S-{i}\tsource", f"T-{i}\t{references[i]}", f"H-{i}\t-0.53\t{hypotheses[i]}"]
        lines += [f"D-{i}\t-0.53\t{(detokenised or hypotheses)[i]}", f"P-{i}\t-0.1 -0.2"]
    lines.append(f"INFO | Translated {len(hypotheses):,} sentences (99 tokens) in 1.0s (1.00 sentences/s)")
    return [*lines, *end]


def test_a_log_scores_as_its_two_sides(files, tmp_path, capsys):
    hypotheses, references = CORPORA["good"]
    hypotheses = ["", *hypotheses[1:]]
    log = write(tmp_path / "gen.out", log_of(hypotheses, references))
    assert as_json(capsys, "--gen", log, "--lang", "de") == as_json(
        capsys, *files(hypotheses, references), "--lang", "de"
    )


def test_a_log_with_raw_references(tmp_path, capsys):
    log = write(tmp_path / "gen.out", log_of(TOKENISED, TOKENISED))
    raw = write(tmp_path / "raw", PLAIN)
    assert as_json(capsys, "--gen", log, "--lang", "de", "--raw-ref", raw)["sacrebleu"] == pytest.approx(100)


def test_a_log_of_an_old_fairseq_has_no_d_lines(tmp_path, capsys):
    lines = [line for line in log_of(SENTENCES, SENTENCES) if not line.startswith("D-")]
    got = as_json(capsys, "--gen", write(tmp_path / "gen.out", lines), "--lang", "de")
    assert got["bleu_tok"] == pytest.approx(100)


def test_a_log_decoded_by_fairseq_is_scored_by_its_d_lines(tmp_path, capsys):
    pieces = [line.replace(" ", " ▁") for line in SENTENCES]
    log = write(tmp_path / "gen.out", log_of(pieces, SENTENCES, detokenised=SENTENCES))
    assert "is from fairseq-generate with --bpe or --tokenizer" in refused(capsys, "--gen", log, "--lang", "de")
    for detok in ("none", "moses"):
        got = as_json(capsys, "--gen", log, "--lang", "de", "--detok", detok)
        assert got["bleu_tok"] == pytest.approx(100)
        assert got["detok"] == detok


def without(*starts):
    return [line for line in log_of(SENTENCES, SENTENCES) if not line.startswith(starts)]


BROKEN = {
    "no-last-line": (log_of(SENTENCES, SENTENCES, end=()), "is cut off: it does not end with"),
    "a-line-runs-into-the-next": (
        "\n".join(log_of(SENTENCES, SENTENCES)).replace(" .\nP-", "P-", 1).split("\n"),
        "has another line in it: a line was cut off",
    ),
    "missing-sentence": (without("S-3\t", "T-3\t", "H-3\t", "D-3\t"), "1 of 10 sentences have no T- line: T-3"),
    "missing-H": (without("H-2\t", "H-4\t"), "2 of 10 sentences have no H- line: H-2, H-4"),
    "missing-six": (without(*(f"H-{i}\t" for i in range(6))), "no H- line: H-0, H-1, H-2, H-3, H-4 … (fairseq"),
    "missing-D": (without("D-2\t"), "1 of 10 sentences have no D- line: D-2"),
    "missing-at-the-end": (without("2026", "S-9\t", "T-9\t", "H-9\t", "D-9\t"), "it translated 10 sentences, not 9"),
    "fewer-than-the-data": (
        ["INFO | data-bin test de-en 12 examples", *log_of(SENTENCES, SENTENCES)[1:]],
        "the data has 12 sentences, not 10 (fairseq-generate may drop the last batch: give it --required-batch",
    ),
    "more-than-the-data": (
        ["INFO | data-bin test de-en 8 examples", *log_of(SENTENCES, SENTENCES)[1:]],
        "the data has 8 sentences, not 10",
    ),
    "a-number-beyond-any-text": (
        [re.sub(r"^H-5\t", "H-999999999999\t", s) for s in log_of(SENTENCES, SENTENCES)],
        "999999999990 of 1000000000000 sentences have no T- line: T-10, T-11, T-12, T-13, T-14 …",
    ),
    "a-number-of-too-many-digits": (
        [re.sub(r"^H-5\t", f"H-{'9' * 5000}\t", s) for s in log_of(SENTENCES, SENTENCES)],
        "1 of 10 sentences have no H- line: H-5",
    ),
    "one-line-cut": (
        [re.sub(r"^H-5\t.*", "H-5\t-0.53", s) for s in log_of(SENTENCES, SENTENCES)],
        "H-5 has a score and",
    ),
    "twice": (log_of(SENTENCES, SENTENCES, order=[*range(10), 4]), "T-4 occurs twice"),
    "nbest": (
        log_of(SENTENCES, SENTENCES, end=("H-4\t-0.9\tzweite Wahl", END)),
        "H-4 occurs twice: generate",
    ),
    "two-logs": (log_of(SENTENCES, SENTENCES) * 2, "two logs in one"),
    "skipped": (
        ["1,203 samples have invalid sizes and will be skipped, max_positions=9", *log_of(SENTENCES, SENTENCES)],
        "skipped 1,203 sentences",
    ),
    "message-in-a-line": (
        [re.sub(r"^(T-5\t.{9})", r"\1INFO:fairseq.data.iterators:hello", s) for s in log_of(SENTENCES, SENTENCES)],
        "T-5 has a message or a progress bar in it",
    ),
    "dated-message-in-a-line": (
        [re.sub(r"^(D-5\t.{9})", r"\g<1>2026-11-20 10:30:11 | INFO | x", s) for s in log_of(SENTENCES, SENTENCES)],
        "D-5 has a message or a progress bar in it",
    ),
    "progress-bar-in-a-line": (
        [re.sub(r"^(H-5\t.{9})", "\\1\r  50%|███  | 1/2", s) for s in log_of(SENTENCES, SENTENCES)],
        "H-5 has a message or a progress bar in it",
    ),
    "quiet": ([END], "has no H- lines"),
    "no-references": (without("T-"), "has no T- lines"),
    "another-file": (SENTENCES, "it is not the output of fairseq-generate"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_log_that_is_not_whole_is_refused(case, tmp_path, capsys):
    lines, said = BROKEN[case]
    log = write(tmp_path / "gen.out", lines)
    message = refused(capsys, "--gen", log, "--lang", "de", "--output", tmp_path / "score.json")
    assert said in message
    assert str(log) in message
    assert not (tmp_path / "score.json").exists()


@pytest.mark.parametrize(
    "end",
    [
        END,
        f"| {END}",
        "Generate test with beam=5: BLEU = 38.91 69.2/44.6/31.4/22.6 (BP = 0.990 ratio = 0.99 hyp_len = 9 ref_len = 9)",
        "Generate valid1 with beam=12: WER: 12.34",
        "Generate test with beam=5: chrF2 = 58.1",
    ],
)
def test_the_last_line_of_every_scorer_ends_a_log(end, tmp_path):
    assert parse_gen_log(log_of(SENTENCES, SENTENCES, end=(end,)), tmp_path).hypotheses == SENTENCES


def test_a_file_of_any_length_is_either_cut_off_or_whole(tmp_path, capsys):
    """Cut at every byte: never a score but that of all."""
    content = "".join(f"{line}\n" for line in log_of(SENTENCES[:3], SENTENCES[:3]))
    whole = content.rindex(")") + 1
    for length in range(len(content) - 150, len(content)):
        lines = content[:length].split("\n")
        if length < whole:
            with pytest.raises(InputError, match="is cut off"):
                parse_gen_log(lines, tmp_path)
        else:
            assert parse_gen_log(lines, tmp_path).hypotheses == SENTENCES[:3]


def test_progress_bars_between_the_lines_do_no_harm(tmp_path):
    """Nor does the comma in the number of so many sentences."""
    lines, many = [], SENTENCES * 101
    for line in log_of(many, many):
        lines += [line, "\r  50%|█████     | 1/2 [00:00<00:00]"]
    log = parse_gen_log(lines, tmp_path)
    assert log.hypotheses == log.references == many
