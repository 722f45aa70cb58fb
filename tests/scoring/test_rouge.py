"""`lightconv score --metric rouge` against values worked out by hand and the definitions; what it refuses."""

import json
import math
import random
import re
import statistics
import sys
from collections import Counter
from functools import cache

import pytest

from lightconv_plugin.errors import InputError
from lightconv_plugin.scoring.rouge import rouge, sentences
from tests.scoring.corpora import as_json, refused, run, write
from tests.scoring.test_gen_log import log_of

np = pytest.importorskip("numpy")
pytest.importorskip("rouge_score", reason="needs rouge-score")

NAMES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
ROUGE = ("--metric", "rouge")


def words(text):
    return re.findall("[a-z0-9]+", text.lower())


def common_subsequence(reference, summary):
    """Positions in the reference of one longest common subsequence; of several, the one whose words come first."""

    @cache
    def best(i, j):
        if not i or not j:
            return ()
        if reference[i - 1] == summary[j - 1]:
            return (*best(i - 1, j - 1), i - 1)
        shorter_summary, shorter_reference = best(i, j - 1), best(i - 1, j)
        return shorter_summary if len(shorter_summary) > len(shorter_reference) else shorter_reference

    return best(len(reference), len(summary))


def definitions(summary, reference):
    """(precision, recall) of each ROUGE without stemming, by Lin 2004; sentences end at a token "."."""
    s, r = words(summary), words(reference)
    found = {}
    for n in (1, 2):
        ours, theirs = (Counter(tuple(x[i : i + n]) for i in range(len(x) - n + 1)) for x in (s, r))
        hits = sum((ours & theirs).values())
        found[f"rouge{n}"] = hits / max(1, ours.total()), hits / max(1, theirs.total())
    hits = len(common_subsequence(r, s))
    found["rougeL"] = (hits / len(s), hits / len(r)) if s else (0, 0)
    parts, reference_parts = ([words(part) for part in re.split(r"(?<!\S)\.(?!\S)", x)] for x in (summary, reference))
    left, hits = Counter(s), 0  # a word of the summary counts once, as in ROUGE-1.5.5
    for part in reference_parts:
        union = sorted({i for other in parts for i in common_subsequence(part, other)})
        for word in (part[i] for i in union):
            if left[word]:
                left[word] -= 1
                hits += 1
    found["rougeLsum"] = (hits / len(s), hits / len(r)) if s else (0, 0)
    return found


def f1(precision, recall):
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def random_texts(n, vocabulary, longest, seed):
    rng = random.Random(seed)
    pool = [f"w{i}" for i in range(vocabulary)] + ["."] * (1 + vocabulary // 8)
    return ["x " + " ".join(rng.choices(pool, k=rng.randint(1, longest))) for _ in range(n)]


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    "summary, reference, expected",
    [
        # Lin 2004, section 3.1: the longest common subsequence is "police the gunman", 3 of 4 words …
        ("police kill the gunman", "police killed the gunman", {"rougeL": (3 / 4, 3 / 4), "rouge2": (1 / 3, 1 / 3)}),
        # … and here "the gunman", 2 of 4, with the same bigrams
        ("the gunman kill police", "police killed the gunman", {"rougeL": (2 / 4, 2 / 4), "rouge2": (1 / 3, 1 / 3)}),
        # section 3.2: "w1 w2" and "w1 w3 w5" join to 4 of the reference's 5 words; as one sentence it is "w1 w3 w5"
        (
            "w1 w3 w8 w9 w5 . w1 w2 w6 w7 w8",
            "w1 w2 w3 w4 w5 .",
            {"rougeLsum": (4 / 10, 4 / 5), "rougeL": (3 / 10, 3 / 5), "rouge1": (4 / 10, 4 / 5)},
        ),
        # bigrams in common: the cat, on the, the mat; of 4 and of 5
        ("The cat on the mat .", "the cat sat on the mat .", {"rouge2": (3 / 4, 3 / 5), "rouge1": (1, 5 / 6)}),
        # "the" is in the reference twice: it counts twice and not three times
        ("the the the", "the cat the", {"rouge1": (2 / 3, 2 / 3), "rouge2": (0, 0)}),
        ("yes", "no", dict.fromkeys(NAMES, (0, 0))),
        ("yes", "yes", {"rouge1": (1, 1), "rouge2": (0, 0), "rougeL": (1, 1)}),
    ],
    ids=["one-word-off", "other-order", "union", "bigrams", "clipped", "nothing", "one-word"],
)
def test_values_worked_out_by_hand(summary, reference, expected):
    got = rouge([summary], [reference], stem=False)
    for name, (precision, recall) in expected.items():
        assert got.precision[name] == pytest.approx(100 * precision)
        assert got.recall[name] == pytest.approx(100 * recall)
        assert getattr(got, name) == pytest.approx(100 * f1(precision, recall))


@pytest.mark.parametrize("vocabulary, longest", [(4, 12), (12, 25), (60, 40)])
def test_random_texts_score_by_the_definitions(vocabulary, longest):
    summaries, references = (random_texts(30, vocabulary, longest, seed) for seed in (1, 2))
    got = rouge(summaries, references, stem=False)
    each = [definitions(*pair) for pair in zip(summaries, references, strict=True)]
    for name in NAMES:
        assert got.precision[name] == pytest.approx(100 * statistics.mean(e[name][0] for e in each))
        assert got.recall[name] == pytest.approx(100 * statistics.mean(e[name][1] for e in each))
        assert getattr(got, name) == pytest.approx(100 * statistics.mean(f1(*e[name]) for e in each))
    assert got.rougeL < got.rougeLsum < got.rouge1


def test_words_are_stemmed_unless_told(files, capsys):
    options = files(["police kill the gunman ."], ["police killed the gunmen ."])
    assert as_json(capsys, *ROUGE, *options)["rouge1"] == pytest.approx(75)  # kill = killed; gunman is not gunmen
    assert as_json(capsys, *ROUGE, *options, "--no-stem")["rouge1"] == pytest.approx(50)
    assert rouge(["bus"], ["bu"]).rouge1 == 0  # words of three letters are left alone


@pytest.mark.parametrize(
    "one, other",
    [
        ("The Cat", "the cat"),
        ("the cat 's mat", "the cat &apos;s mat"),
        ("a - b", "a @-@ b"),
        ("a , b ; c", "a b c"),
        ("( a )", "&#91; a &#93; &amp; &lt; &gt; &quot; &#124;"),
    ],
)
def test_case_punctuation_and_escapes_do_not_count(one, other):
    assert rouge([one], [other]).rouge1 == pytest.approx(100)


def test_an_unknown_word_of_a_log_never_matches():
    """fairseq-generate prints <unk> of references as <<unk>>."""
    got = rouge(["a <unk> c"], ["a <<unk>> c"])
    assert (got.precision["rouge1"], got.recall["rouge1"]) == pytest.approx((200 / 3, 200 / 3))


@pytest.mark.parametrize(
    "text, end, parts",
    [
        ("a b . c .", ".", ["a b", "c"]),
        ("a b. c", ".", ["a b. c"]),
        (". . a", ".", ["a"]),
        ("a </s> b .", "</s>", ["a", "b ."]),
        ("", ".", []),
    ],
)
def test_a_sentence_ends_at_its_token(text, end, parts):
    assert sentences(text, end) == parts


def test_the_sentences_end_where_told(files, capsys):
    options = files(["c d <q> a b"], ["a b <q> c d"])
    assert as_json(capsys, *ROUGE, *options, "--sentence-end", "<q>")["rougeLsum"] == pytest.approx(100)
    assert run(*ROUGE, *options, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["rougeLsum"] == pytest.approx(40)  # "a b" of "a b q c d"
    assert "no reference has '.', the token that ends a sentence" in err


def test_an_empty_summary_scores_0_and_is_counted(files, capsys):
    options = files(["", "a b .", "..."], ["a b .", "a b .", "a b ."])
    assert run(*ROUGE, *options, "--json") == 0
    out, err = capsys.readouterr()
    got = json.loads(out)
    assert (got["n"], got["empty"]) == (3, 2)
    assert [got[name] for name in NAMES] == pytest.approx([100 / 3] * 4)
    assert "2 of 3 summaries have no word; they score 0" in err
    assert run(*ROUGE, *options) == 0
    assert "F1 of 3 summaries, 2 of them without a word" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ intervals


def test_the_interval_is_that_of_the_mean_and_the_same_on_every_run():
    summaries, references = (random_texts(200, 20, 20, seed) for seed in (3, 4))
    np.random.seed(11)
    before = np.random.get_state()[1].copy()
    first, second = (rouge(summaries, references, stem=False) for _ in range(2))
    assert first == second
    assert (np.random.get_state()[1] == before).all()
    for name in NAMES:
        each = [100 * f1(*definitions(*pair)[name]) for pair in zip(summaries, references, strict=True)]
        half = 1.96 * statistics.stdev(each) / math.sqrt(len(each))  # of a normal distribution
        low, high = first.interval[name]
        assert low == pytest.approx(getattr(first, name) - half, abs=half / 10)
        assert high == pytest.approx(getattr(first, name) + half, abs=half / 10)


# ------------------------------------------------------------------------------------------------ the command


def test_a_log_scores_as_its_two_sides(files, tmp_path, capsys):
    summaries, references = random_texts(20, 20, 20, 5), random_texts(20, 20, 20, 6)
    pieces = [line.replace("w1", "w@@ 1") for line in summaries]
    log = write(tmp_path / "gen.out", log_of(pieces, references))
    sides = as_json(capsys, *ROUGE, *files(summaries, references))
    assert as_json(capsys, *ROUGE, "--gen", log, "--remove-bpe") == sides
    assert as_json(capsys, *ROUGE, "--gen", log) != sides


def test_a_log_decoded_by_fairseq_is_scored_by_its_d_lines(tmp_path, capsys):
    texts = random_texts(5, 20, 20, 7)
    log = log_of([line.replace(" ", " ▁") for line in texts], texts, detokenised=texts)
    assert as_json(capsys, *ROUGE, "--gen", write(tmp_path / "gen.out", log))["rouge2"] == pytest.approx(100)


def test_json_output(files, capsys):
    got = as_json(capsys, *ROUGE, *files(["a b ."], ["a c ."]))
    assert set(got) == {*NAMES, "precision", "recall", "interval", "signature", "n", "empty", "stem", "sentence_end"}
    for part in ("precision", "recall", "interval"):
        assert tuple(got[part]) == NAMES
    assert re.fullmatch(r"rouge-score\|stem:porter\|sentence-end:\.\|version:[\d.]+", got["signature"])
    assert (got["n"], got["empty"], got["stem"], got["sentence_end"]) == (1, 0, True, ".")


def test_human_output_and_the_file_are_the_same(files, tmp_path, capsys):
    target = tmp_path / "out put.txt"
    assert run(*ROUGE, *files(["a b ."], ["a c ."]), "--no-stem", "--output", target) == 0
    out = capsys.readouterr().out
    assert target.read_text(encoding="utf-8") == out
    number = r"\d+\.\d\d"
    rows = "".join(
        rf"{name} = {number} \(P={number}, R={number}, 95% interval {number}-{number}\)\n"
        for name in ("ROUGE-1", "ROUGE-2", "ROUGE-L", "ROUGE-Lsum")
    )
    assert re.fullmatch(rows + r"F1 of 1 summaries  rouge-score\|stem:none\|\S+\n", out)


def test_help_says_what_a_word_is(capsys):
    with pytest.raises(SystemExit) as left:
        run("--help")
    assert left.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for phrase in ("ROUGE-Lsum, which papers on CNN/Daily Mail call ROUGE-L", "PTBTokenizer", "Porter stems"):
        assert phrase in said


@pytest.mark.parametrize(
    "summaries, references, options, said",
    [
        (["a", "b"], ["a"], [], "2 summaries, but 1 references: each needs one"),
        (["a", "b"], ["a", " . "], [], "reference 2 of 2 has no word of the letters a to z and digits"),
        (["a"], ["日本語"], [], "which is all that rouge-score compares: '日本語'"),
        (["a"], ["a"], ["--sentence-end", "a b"], "--sentence-end must be one token, such as '.', got 'a b'"),
        (["a"], ["a"], ["--lang", "en"], "--lang is not valid with --metric rouge"),
        (["a"], ["a"], ["--lowercase"], "--lowercase is not valid with --metric rouge"),
        (["a"], ["a"], ["--compound-split"], "--compound-split is not valid with --metric rouge"),
        (["a"], ["a"], ["--detok", "none"], "--detok is not valid with --metric rouge"),
        (["a"], ["a"], ["--raw-ref", "x"], "--raw-ref is not valid with --metric rouge"),
        (["a"], ["a"], ["--metric", "bleu", "--no-stem"], "--no-stem is not valid with --metric bleu"),
        (["a"], ["a"], ["--metric", "bleu", "--sentence-end", "."], "--sentence-end is not valid with --metric bleu"),
    ],
)
def test_what_it_refuses(summaries, references, options, said, files, capsys):
    assert said in refused(capsys, *ROUGE, *files(summaries, references), *options)


def test_no_summaries_are_refused():
    with pytest.raises(InputError, match="no summaries"):
        rouge([], [])


@pytest.mark.parametrize("missing", ["rouge_score", "rouge_score.rouge_scorer", "nltk"])
def test_a_missing_library_is_named(missing, files, capsys, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "rouge_score"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    said = refused(capsys, *ROUGE, *files(["a"], ["a"]))
    assert "ROUGE needs the library rouge-score: pip install rouge-score" in said
