"""`lightconv score --against`: sacreBLEU's paired bootstrap test on our measures."""

import json
import re

import pytest
import sacrebleu
from sacrebleu.significance import PairedTest

from tests import programs
from tests.scoring.corpora import PLAIN, SENTENCES, TOKENISED, as_json, damaged, refused, run, write
from tests.scoring.test_gen_log import END, log_of
from tests.warm_python import warm_python

REFERENCES = SENTENCES * 8
GOOD, BAD = damaged(REFERENCES, 0.1, 1), damaged(REFERENCES, 0.3, 2)
MEASURES = ("bleu_tok", "sacrebleu", "chrf")


@pytest.fixture
def against(tmp_path):
    def make(lines):
        return "--against", write(tmp_path / "other", lines)

    return make


def test_it_is_sacrebleus_paired_test(files, against, capsys):
    got = as_json(capsys, *files(GOOD, REFERENCES), *against(BAD), "--detok", "none", "--samples", "50")
    for name, metric in {
        "bleu_tok": sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True),
        "sacrebleu": sacrebleu.BLEU(),
        "chrf": sacrebleu.CHRF(),
    }.items():
        test = PairedTest([("bad", BAD), ("good", GOOD)], {"m": metric}, [REFERENCES], test_type="bs", n_samples=50)
        signatures, scores = test()
        scores.pop("System")
        ((bad, good),) = scores.values()
        found = got["against"][name]
        assert (found["score"], found["mean"], found["ci"]) == (good.score, good.mean, good.ci)
        assert (found["against_score"], found["against_mean"], found["against_ci"]) == (bad.score, bad.mean, bad.ci)
        assert found["p_value"] == good.p_value
        assert found["signature"] == str(next(iter(signatures.values())))
        assert "|bs:50|seed:12345|" in found["signature"]
        assert got[name] == found["score"]  # that of the whole text is the one without a test
    assert got["against"]["samples"] == 50 and got["against"]["file"].endswith("/other")


def test_both_systems_are_compared_in_words(files, against, capsys):
    """Whichever of them is still in subwords; the scores themselves are of the text as it is."""
    cut = [[line.replace("e", "@@ e") for line in lines] for lines in (GOOD, REFERENCES)]
    options = (*against(BAD), "--detok", "none", "--samples", "50")
    plain, pieces = (as_json(capsys, *files(*given), *options) for given in ((GOOD, REFERENCES), cut))
    assert pieces["against"] == plain["against"] and pieces["bleu_tok"] != plain["bleu_tok"]


def test_the_other_keys_stay_as_they_are(files, against, capsys):
    options = files(GOOD, REFERENCES)
    alone = as_json(capsys, *options, "--lang", "de")
    tested = as_json(capsys, *options, "--lang", "de", *against(BAD), "--samples", "50")
    assert list(tested) == [*alone, "against"]
    assert {key: value for key, value in tested.items() if key != "against"} == alone


def test_a_difference_is_found_and_a_system_does_not_differ_from_itself(files, against, capsys):
    options = files(GOOD, REFERENCES)
    better = as_json(capsys, *options, *against(BAD), "--lang", "de", "--samples", "100")["against"]
    itself = as_json(capsys, *options, *against(GOOD), "--lang", "de", "--samples", "100")["against"]
    for name in MEASURES:
        assert better[name]["score"] > better[name]["against_score"] and better[name]["p_value"] < 0.05
        assert itself[name]["score"] == itself[name]["against_score"] and itself[name]["p_value"] == 1
        # The estimates of the two differ by chance: one is from samples of its own.
        assert itself[name]["mean"] == pytest.approx(itself[name]["against_mean"], abs=1)
    worse = as_json(capsys, *files(BAD, REFERENCES), *against(GOOD), "--lang", "de", "--samples", "100")["against"]
    assert worse["bleu_tok"]["score"] < worse["bleu_tok"]["against_score"] and worse["bleu_tok"]["p_value"] < 0.05


@pytest.mark.parametrize(
    "options, same", [(["--lowercase"], str.capitalize), ([], lambda line: line.replace(" .", "."))]
)
def test_texts_that_a_measure_does_not_distinguish_do_not_differ(options, same, files, against, capsys):
    """sacreBLEU would report its lowest p-value for a difference of exactly 0."""
    other = [same(line) for line in GOOD]
    assert other != GOOD
    options = (*files(GOOD, REFERENCES), *against(other), "--detok", "none", "--samples", "50", *options)
    found = as_json(capsys, *options)["against"]["chrf"]
    assert (found["score"], found["p_value"]) == (found["against_score"], 1)


def test_the_other_log_is_checked_and_joined_like_ours(files, tmp_path, against, capsys):
    ours = tmp_path / "ours.gen"
    pieces = [line.replace("ein", "e@@ in") for line in REFERENCES]
    write(ours, log_of(pieces, pieces))
    options = ("--gen", ours, "--remove-bpe", "--lang", "de", "--samples", "20")
    joined = as_json(capsys, *options, *against(log_of(REFERENCES, REFERENCES)))["against"]["bleu_tok"]
    assert joined["score"] == joined["against_score"] == pytest.approx(100)
    decoded = log_of(BAD, REFERENCES, detokenised=[line.replace(" .", ".") for line in BAD])
    said = refused(capsys, *options, *against(decoded))
    assert "--detok is missing: " in said and "other is from fairseq-generate with --bpe or --tokenizer" in said


@pytest.mark.parametrize("seed", ["abc", "0"])  # 0 is none to sacreBLEU: other numbers on every run
def test_a_seed_that_is_no_number_from_1_is_refused(seed, files, against, monkeypatch, capsys):
    monkeypatch.setenv("SACREBLEU_SEED", seed)
    said = refused(capsys, *files(GOOD, REFERENCES), *against(BAD), "--detok", "none")
    assert f"SACREBLEU_SEED must be a whole number from 1, or none, got {seed!r}" in said
    monkeypatch.setenv("SACREBLEU_SEED", "None")
    got = as_json(capsys, *files(GOOD, REFERENCES), *against(BAD), "--detok", "none", "--samples", "5")["against"]
    assert "|seed:none|" in got["chrf"]["signature"]


def test_samples_beyond_the_memory_are_one_line(files, against, monkeypatch, capsys):
    def full(*given, **options):
        raise MemoryError

    monkeypatch.setattr(PairedTest, "__init__", full)  # as numpy does, for an array of samples × sentences
    said = refused(capsys, *files(GOOD, REFERENCES), *against(BAD), "--detok", "none", "--samples", "2000000000")
    assert "not enough memory for --samples 2,000,000,000 of 80 sentences: give fewer" in said


@pytest.mark.parametrize("options", [["--lowercase"], ["--compound-split"]], ids=["lowercase", "compounds"])
def test_both_sides_are_prepared_alike(options, files, against, capsys):
    shouted = [re.sub("[a-z]", lambda m: m[0].upper(), line) if "--lowercase" in options else line for line in GOOD]
    got = as_json(capsys, *files(GOOD, REFERENCES), *against(shouted), "--lang", "de", "--samples", "20", *options)
    assert got["against"]["bleu_tok"]["against_score"] == got["bleu_tok"]
    plain = as_json(capsys, *files(shouted, REFERENCES), "--lang", "de")
    assert plain["bleu_tok"] != got["bleu_tok"]


def test_raw_references_and_detokenisation_are_those_of_the_score(files, against, tmp_path, capsys):
    options = (*files(TOKENISED * 3, TOKENISED * 3), "--raw-ref", write(tmp_path / "raw", PLAIN * 3))
    got = as_json(capsys, *options, *against(TOKENISED * 3), "--lang", "de", "--samples", "20")["against"]
    assert got["sacrebleu"]["against_score"] == pytest.approx(100)


def test_two_logs_of_fairseq_generate(tmp_path, capsys):
    ours, theirs = (write(tmp_path / n, log_of(h, REFERENCES)) for n, h in (("ours", GOOD), ("theirs", BAD)))
    got = as_json(capsys, "--gen", ours, "--against", theirs, "--lang", "de", "--samples", "50")
    plain = as_json(capsys, "--gen", theirs, "--lang", "de")
    assert got["against"]["bleu_tok"]["against_score"] == plain["bleu_tok"]


def test_subwords_of_both_are_joined(files, tmp_path, capsys):
    other = write(tmp_path / "other", ["D@@ er Hund schläft heute"])
    options = files(["Der Hund schl@@ äft heute"], ["Der Hund schläft heute"])
    got = as_json(capsys, *options, "--against", other, "--remove-bpe", "--detok", "none", "--samples", "5")
    assert got["against"]["bleu_tok"]["against_score"] == pytest.approx(100)


@pytest.mark.parametrize("pieces", ["a@@ b c@@ d e@@ f", "▁a b ▁c d ▁e f"])
@pytest.mark.parametrize("log", [True, False])
def test_subwords_of_the_other_alone_are_joined_too(pieces, log, files, against, capsys):
    """As in a log without --remove-bpe, against the one that `lightconv evaluate` makes."""
    pieces, words = [pieces] * 3, ["ab cd ef"] * 3
    other = log_of(pieces, pieces) if log else pieces
    got = as_json(capsys, *files(words, words), *against(other), "--detok", "none", "--samples", "5")
    assert got["against"]["chrf"]["against_score"] == pytest.approx(100)


def test_human_output(files, against, capsys):
    assert run(*files(GOOD, REFERENCES), *against(BAD), "--lang", "de", "--samples", "50") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("BLEU4 = ") and lines[3].endswith("other, paired bootstrap test of 50 samples:")
    assert [line.split()[0] for line in lines[4:]] == ["BLEU4", "sacreBLEU", "chrF2"]
    number = r"(\d+\.\d\d) \(\d+\.\d\d ± \d+\.\d\d\)"
    for line in lines[4:]:
        ours, theirs, more = re.fullmatch(rf"\w+ {number} against {number}: \+(\d+\.\d\d), p = 0\.0\d+", line).groups()
        assert f" = {ours}" in "".join(lines[:3])
        assert float(ours) - float(theirs) == pytest.approx(float(more), abs=0.011) and float(more) > 1


def test_every_run_gives_the_same_numbers(files, against):
    command = ["-m", "lightconv_plugin", "score", *files(GOOD, REFERENCES), *against(BAD), "--lang", "de", "--json"]
    command = [warm_python(), *command, "--samples", 30]
    results = [programs.run(*command, SACREBLEU_SEED=None).stdout for _ in range(2)]
    assert results[0] == results[1] and json.loads(results[0])["against"]["samples"] == 30


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda lines: lines[:-1], "has 79 translations, but there are 80 references"),
        (lambda lines: log_of(lines, damaged(REFERENCES, 0.5)), "has translations of another text: its reference T-"),
        (lambda lines: log_of(lines, REFERENCES)[:-9], "is cut off"),
        (lambda lines: log_of(lines[:40], REFERENCES[:40]), "has 40 translations, but there are 80 references"),
        (lambda lines: [END], "has no H- lines"),
    ],
    ids=["too-few", "other-references", "cut-off", "shorter-log", "quiet-log"],
)
def test_another_text_is_refused(change, said, files, against, capsys):
    assert said in refused(capsys, *files(GOOD, REFERENCES), *against(change(BAD)), "--lang", "de")


def test_options_that_do_not_go_together(files, against, tmp_path, capsys):
    options = files(GOOD, REFERENCES)
    assert "--samples belongs to the test of --against FILE" in refused(capsys, *options, "--samples", "9")
    assert "no such file" in refused(capsys, *options, "--against", tmp_path / "none", "--lang", "de")
    said = refused(capsys, *options, *against(BAD), "--metric", "rouge")
    assert "--against is not valid with --metric rouge" in said
