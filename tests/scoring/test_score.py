"""`lightconv score` against fairseq-score, an independent multi-bleu and sacreBLEU; everything it must refuse."""

import json
import math
import re
import shutil
import subprocess
from collections import Counter

import pytest
import sacrebleu

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import read_lines
from lightconv_plugin.scoring import bleu
from tests.scoring.corpora import CORPORA, PLAIN, SENTENCES, TOKENISED, as_json, refused, run, write


def multi_bleu(hypotheses, references):
    """multi-bleu.perl's rules once more, over strings of space-joined n-grams: (BLEU, precisions, BP, lengths)."""
    hits, totals, sys_len, ref_len = [0] * 4, [0] * 4, 0, 0
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        h, r = hypothesis.split(), reference.split()
        sys_len, ref_len = sys_len + len(h), ref_len + len(r)
        for n in range(4):
            ours = Counter(" ".join(h[i : i + n + 1]) for i in range(len(h) - n))
            theirs = Counter(" ".join(r[i : i + n + 1]) for i in range(len(r) - n))
            totals[n] += max(0, len(h) - n)
            hits[n] += sum((ours & theirs).values())
    precisions = [100 * hit / total if total else 0.0 for hit, total in zip(hits, totals, strict=True)]
    penalty = math.exp(1 - ref_len / sys_len) if 0 < sys_len < ref_len else float(sys_len > 0)
    bleu = penalty * math.prod(p / 100 for p in precisions) ** 0.25 * 100
    return bleu, precisions, penalty, sys_len, ref_len


def fairseq_line(hypotheses, references):
    """The line of fairseq-score, by the scorer it uses."""
    bleu = pytest.importorskip("fairseq.scoring.bleu")
    from fairseq.data import Dictionary

    words = Dictionary()
    scorer = bleu.Scorer(bleu.BleuConfig(pad=words.pad(), eos=words.eos(), unk=words.unk()))
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        ours = words.encode_line(hypothesis)
        scorer.add(words.encode_line(reference), ours)
    return scorer.result_string()


# ------------------------------------------------------------------------------------------------ tokenised BLEU


@pytest.mark.parametrize("split", [False, True], ids=["", "compound-split"])
@pytest.mark.parametrize("lower", [False, True], ids=["", "lowercase"])
@pytest.mark.parametrize("corpus", CORPORA)
def test_tokenised_bleu_is_multi_bleus_and_fairseqs(corpus, lower, split, files, capsys):
    hypotheses, references = CORPORA[corpus]
    options = ["--lowercase"] * lower + ["--compound-split"] * split
    got = as_json(capsys, *files(hypotheses, references), "--detok", "none", *options)

    def sides(change):
        return [[change(line) for line in side] for side in (hypotheses, references)]

    hypotheses, references = sides(str.lower if lower else str)
    if split:
        hypotheses, references = sides(lambda line: re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line))
    bleu, precisions, penalty, sys_len, ref_len = multi_bleu(hypotheses, references)
    assert got["bleu_tok"] == pytest.approx(bleu, abs=1e-9)
    assert got["precisions"] == pytest.approx(precisions, abs=1e-9)
    assert got["bp"] == pytest.approx(penalty, abs=1e-12)
    assert (got["sys_len"], got["ref_len"], got["n"]) == (sys_len, ref_len, len(references))
    assert got["ratio"] == pytest.approx(sys_len / ref_len)
    assert run(*files(*CORPORA[corpus]), "--detok", "none", *options) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.split("  tokenised")[0] == fairseq_line(hypotheses, references)


def test_the_command_fairseq_score_says_the_same(files, capsys):
    pytest.importorskip("fairseq")
    from tests.fairseq_cli import run as fairseq

    options = files(*CORPORA["real-like"])
    assert run(*options, "--detok", "none") == 0
    ours = capsys.readouterr().out.split("  tokenised")[0]
    assert ours in fairseq("score", *options).splitlines()


@pytest.mark.parametrize("empty", [0, 3, 9])
def test_an_empty_translation_has_no_words(empty, files, capsys):
    hypotheses = ["" if i == empty else line for i, line in enumerate(SENTENCES)]
    got = as_json(capsys, *files(hypotheses, SENTENCES), "--lang", "de")
    bleu, _, penalty, sys_len, _ = multi_bleu(hypotheses, SENTENCES)
    assert got["bleu_tok"] == pytest.approx(bleu)
    assert got["bp"] == pytest.approx(penalty)
    assert got["sys_len"] == sys_len
    assert got["sacrebleu"] < 100


def test_an_empty_reference_has_no_words(files, capsys):
    references = ["", *SENTENCES[1:]]
    got = as_json(capsys, *files(SENTENCES, references), "--lang", "de")
    assert got["bleu_tok"] == pytest.approx(multi_bleu(SENTENCES, references)[0])
    assert 0 < got["sacrebleu"] < 100


def test_nothing_but_empty_translations_score_0(files, capsys):
    got = as_json(capsys, *files([""] * 3, ["a b c d e"] * 3), "--lang", "de")
    assert (got["bleu_tok"], got["sacrebleu"], got["chrf"], got["bp"], got["ratio"]) == (0, 0, 0, 0, 0)


ODD = {
    "crlf": lambda line: f"{line}\r",
    "many-spaces": lambda line: f"  {line.replace(' ', '   ')} \t ",
    "form-feed": lambda line: line.replace(" ", "\x0c"),
    "no-break-space": lambda line: line.replace(" ", "\u00a0"),
    "thin-space": lambda line: line.replace(" ", "\u2009"),
}


@pytest.mark.parametrize("side", ["both", "translations", "references"])
@pytest.mark.parametrize("odd", ODD)
def test_spaces_of_every_kind_only_part_words(odd, side, files, capsys):
    hypotheses, references = CORPORA["good"]
    expected = multi_bleu(hypotheses, references)[0]
    if side != "references":
        hypotheses = [ODD[odd](line) for line in hypotheses]
    if side != "translations":
        references = [ODD[odd](line) for line in references]
    got = as_json(capsys, *files(hypotheses, references), "--detok", "none")
    assert got["bleu_tok"] == pytest.approx(expected, abs=1e-9)
    assert f"BLEU4 = {got['bleu_tok']:.2f}, " in fairseq_line(hypotheses, references)


def test_an_unknown_word_of_a_log_never_matches(files, capsys):
    """fairseq-generate prints <unk> of references as <<unk>>."""
    got = as_json(capsys, *files(["a <unk> c d e f"], ["a <<unk>> c d e f"]), "--detok", "none")
    assert got["precisions"][0] == pytest.approx(500 / 6)


@pytest.mark.skipif(shutil.which("perl") is None, reason="needs perl, which upstream's script uses")
@pytest.mark.parametrize(
    "line", [*SENTENCES, "a-b-c-d", "-a- -b", "a--b", "ä-ö-ü", "a\u00a0-b - c-", "x\u2011y 3-4-5"], ids=repr
)
def test_compounds_are_split_as_by_upstreams_perl(line):
    substitute = "s{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g"
    perl = subprocess.run(["perl", "-ple", substitute], input=f"{line}\n".encode(), capture_output=True, check=True)
    assert f"{bleu.split_compounds(line)}\n" == perl.stdout.decode()


@pytest.mark.parametrize("hyphen", ["@-@", "##AT##-##AT##"])
@pytest.mark.parametrize("lower", [(), ("--lowercase",)], ids=["case", "lowercase"])
def test_compounds_that_are_split_already_are_not_split_again(hyphen, lower, files, capsys):
    """fairseq's script makes three tokens of each such hyphen, which match in every translation that has one."""
    sides = [[line.replace("-", f" {hyphen} ") for line in side] for side in CORPORA["real-like"]]
    options = (*files(*sides), "--detok", "none", *lower)
    as_they_are, split = as_json(capsys, *options), as_json(capsys, *options, "--compound-split")
    assert {**split, "compound_split": False} == as_they_are
    assert [[bleu.split_compounds(line) for line in side] for side in sides] == sides


@pytest.mark.parametrize(
    "ours, theirs, said",
    [
        ("a @-@ b", "a-b", "the translations write hyphenated compounds as a @-@ b, the references as a-b: tokenise"),
        ("a-b", "a @-@ b", "the translations write hyphenated compounds as a-b, the references as a @-@ b"),
        ("a ##AT##-##AT## b", "a @-@ b", "the translations write hyphenated compounds as a ##AT##-##AT## b, the r"),
        ("a @-@ b c-d", "a-b c-d", ""),
        ("a @-@ b", "c d - -e", ""),
        ("c d - -e", "a @-@ b", ""),
    ],
)
def test_sides_that_were_not_tokenised_alike_are_refused(ours, theirs, said, files, capsys):
    options = (*files([ours, "x"], [theirs, "x"]), "--detok", "none")
    as_json(capsys, *options)  # without splitting, any two texts can be compared
    if said:
        assert f"--compound-split: {said}" in refused(capsys, *options, "--compound-split")
    else:
        as_json(capsys, *options, "--compound-split")


# ------------------------------------------------------------------------------------------------ sacreBLEU and chrF


def test_detokenised_text_equals_the_untouched_reference(files, tmp_path, capsys):
    raw = write(tmp_path / "raw", PLAIN)
    got = as_json(capsys, *files(TOKENISED, TOKENISED), "--lang", "de", "--raw-ref", raw)
    assert got["sacrebleu"] == pytest.approx(100)
    assert got["chrf"] == pytest.approx(100)
    assert got["bleu_tok"] == pytest.approx(100)
    got = as_json(capsys, *files(TOKENISED, TOKENISED), "--detok", "none", "--raw-ref", raw)
    assert got["sacrebleu"] < 90
    assert bleu.detokenise(TOKENISED, "de") == PLAIN


@pytest.mark.parametrize("lower", [False, True], ids=["case", "lowercase"])
def test_sacrebleu_is_the_library_on_plain_text(lower, files, tmp_path, capsys):
    hypotheses, references = CORPORA["real-like"]
    raw = [line.upper().replace(" ,", ",") for line in references]
    options = files(hypotheses, references)
    got = as_json(
        capsys, *options, "--detok", "none", "--raw-ref", write(tmp_path / "raw", raw), *["--lowercase"] * lower
    )
    bleu, chrf = sacrebleu.BLEU(lowercase=lower), sacrebleu.CHRF(lowercase=lower)
    assert got["sacrebleu"] == bleu.corpus_score(hypotheses, [raw]).score
    assert got["chrf"] == chrf.corpus_score(hypotheses, [raw]).score
    assert got["signature"] == str(bleu.get_signature())
    assert got["chrf_signature"] == str(chrf.get_signature())
    case = "lc" if lower else "mixed"
    assert got["signature"] == f"nrefs:1|case:{case}|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    assert (got["sacrebleu"] > 20) == lower


def test_without_raw_references_both_sides_are_detokenised(files, capsys):
    hypotheses, references = CORPORA["real-like"]
    got = as_json(capsys, *files(hypotheses, references), "--lang", "de")
    plain, plain_references = bleu.detokenise(hypotheses, "de"), bleu.detokenise(references, "de")
    assert got["sacrebleu"] == sacrebleu.corpus_bleu(plain, [plain_references]).score
    assert got["chrf"] == sacrebleu.corpus_chrf(plain, [plain_references]).score


def test_compound_splitting_is_not_for_sacrebleu(files, capsys):
    options = (*files(*CORPORA["real-like"]), "--lang", "de")
    plain, split = as_json(capsys, *options), as_json(capsys, *options, "--compound-split")
    assert plain["sacrebleu"] == split["sacrebleu"]
    assert plain["bleu_tok"] != split["bleu_tok"]


LANGUAGES = {"13a": ("de", "en", "tr", "vi", "ast", "pt_BR"), "zh": ("zh", "zh_CN", "ZH")}


@pytest.mark.parametrize("lang, tokeniser", [(lang, name) for name, langs in LANGUAGES.items() for lang in langs])
def test_the_language_chooses_sacrebleus_tokeniser(lang, tokeniser, files, capsys):
    """Plain text needs none of Moses' rules, which not all languages have; a region changes nothing."""
    got = as_json(capsys, *files(SENTENCES, SENTENCES), "--lang", lang, "--detok", "none")
    assert got["sacrebleu"] == pytest.approx(100) and f"|tok:{tokeniser}|" in got["signature"]


def test_a_tokeniser_that_is_not_installed_is_an_error(files, capsys, monkeypatch):
    def without_mecab(trg_lang="", **options):
        if trg_lang == "ja":
            raise RuntimeError("please install\nsacrebleu[ja]")
        return real(trg_lang=trg_lang, **options)

    real = sacrebleu.metrics.BLEU
    monkeypatch.setattr(sacrebleu.metrics, "BLEU", without_mecab)
    said = refused(capsys, *files(SENTENCES, SENTENCES), "--lang", "ja")
    assert "cannot score language 'ja': please install sacrebleu[ja]" in said


# ------------------------------------------------------------------------------------------------ subwords


@pytest.mark.parametrize(
    "mark, line, words",
    [
        ("@@", "un@@ glaub@@ lich , nicht wahr ?", "unglaublich , nicht wahr ?"),
        ("@@", "a@b @@ b@@", "a@b b"),
        ("sentencepiece", "▁un glaub lich , ▁nicht ▁wahr ?", "unglaublich, nicht wahr?"),
        ("sentencepiece", "▁a b ▁", "ab"),
        ("@@", "", ""),
    ],
)
def test_remove_bpe(mark, line, words):
    assert bleu.remove_bpe(line, mark) == words


@pytest.mark.parametrize("symbol", ["@@ ", "sentencepiece"])
def test_remove_bpe_is_fairseqs(symbol):
    data_utils = pytest.importorskip("fairseq.data.data_utils")
    for line in ("un@@ glaub@@ lich , a@@", "▁un glaub lich ▁, ▁a", "a @@ b@@ @@ c", " ▁ x ▁ "):
        assert bleu.remove_bpe(line, symbol.strip()) == data_utils.post_process(line, symbol)


@pytest.mark.parametrize(
    "options, pieces",
    [
        (["--remove-bpe"], "D@@ er H@@ und sch@@ läft"),
        (["--remove-bpe", "@@ "], "D@@ er H@@ und sch@@ läft"),
        (["--remove-bpe", "@@"], "D@@ er H@@ und sch@@ läft"),
        (["--remove-bpe", "subword_nmt"], "D@@ er H@@ und sch@@ läft"),
        (["--remove-bpe", "sentencepiece"], "▁D er ▁H und ▁sch läft"),
    ],
    ids=lambda value: "=".join(value) if isinstance(value, list) else "",
)
def test_subwords_are_joined_on_both_sides(options, pieces, files, tmp_path, capsys):
    raw = write(tmp_path / "raw", ["Der Hund schläft"])
    got = as_json(capsys, *files([pieces], [pieces]), "--lang", "de", "--raw-ref", raw, *options)
    assert (got["sys_len"], got["ref_len"]) == (3, 3)
    assert got["precisions"] == pytest.approx([100, 100, 100, 0])
    assert got["chrf"] == pytest.approx(100)


@pytest.mark.parametrize(
    "sides, options, where",
    [
        (("D@@ er Hund", "Der Hund"), (), "hypotheses"),
        (("Der Hund", "D@@ er Hund"), (), "references"),
        (("▁Der ▁Hund", "▁Der ▁Hund"), ("--remove-bpe",), "hypotheses and references"),
        (("▁Der ▁Hund", "▁Der ▁Hund"), ("--metric", "rouge", "--sentence-end", "▁Hund"), "hypotheses and references"),
        (("D@@ er Hund", "Der Hund"), ("--remove-bpe",), ""),
        (("▁Der ▁Hund", "▁Der ▁Hund"), ("--remove-bpe", "sentencepiece"), ""),
    ],
)
def test_subwords_left_over_are_pointed_out(sides, options, where, files, capsys):
    detok = () if "rouge" in options else ("--detok", "none")
    assert run(*files(*([side] for side in sides)), *detok, *options) == 0
    said = f"lightconv score: {where} look like subwords: give --remove-bpe, or --remove-bpe sentencepiece for ▁\n"
    assert capsys.readouterr().err == (said if where else "")


# ------------------------------------------------------------------------------------------------ files and options


@pytest.mark.parametrize(
    "options, how, case",
    [((), "", "mixed"), (("--lowercase", "--compound-split"), ", lower-cased, compounds split", "lc")],
    ids=["plain", "options"],
)
def test_human_output_and_the_file_are_the_same(options, how, case, files, tmp_path, capsys, caplog):
    """And nothing besides: sacreBLEU would warn of 100 lines that end in " .", as tokenised ones do."""
    target = tmp_path / "out put.txt"
    assert run(*files(*CORPORA["good"]), "--lang", "de", *options, "--output", target) == 0
    out, err = capsys.readouterr()
    assert target.read_text(encoding="utf-8") == out and not err and not caplog.messages
    assert re.fullmatch(
        r"BLEU4 = \d+\.\d\d, [\d./]+ \(BP=\d\.\d{3}, ratio=\d\.\d{3}, syslen=\d+, reflen=\d+\)  "
        rf"tokenised{how}, 200 sentences\n"
        rf"sacreBLEU = \d+\.\d\d  nrefs:1\|case:{case}\S+\nchrF2 = \d+\.\d\d  nrefs:1\|case:{case}\S+\n",
        out,
    )


def test_json_output_and_the_file_are_the_same(files, tmp_path, capsys):
    target = tmp_path / "score.json"
    target.write_text("old")
    got = as_json(capsys, *files(*CORPORA["good"]), "--lang", "de", "--output", target, "--force")
    assert json.loads(target.read_text(encoding="utf-8")) == got
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ref", "score.json", "sys"]
    assert set(got) >= {"bleu_tok", "precisions", "bp", "ratio", "sys_len", "ref_len", "sacrebleu", "signature", "chrf"}
    assert (got["n"], got["lang"], got["detok"]) == (200, "de", "moses")
    assert (got["lowercase"], got["compound_split"]) == (False, False)


def test_a_failed_write_loses_no_result_and_leaves_no_file(files, tmp_path, monkeypatch, capsys):
    def fail(source, target):
        raise OSError(28, "No space left on device")

    options = files(*CORPORA["good"])
    monkeypatch.setattr("os.replace", fail)
    assert run(*options, "--lang", "de", "--output", tmp_path / "score.json") == 2
    out, err = capsys.readouterr()
    assert out.startswith("BLEU4 = ") and "No space left" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ref", "sys"]


@pytest.mark.parametrize(
    "options, said",
    [
        ([], "give either --gen FILE or both --sys FILE and --ref FILE"),
        (["--sys", "three"], "give either --gen FILE or both"),
        (["--gen", "three", "--sys", "three"], "give either --gen or --sys with --ref"),
        (["--sys", ".", "--ref", "three"], ". is a folder: name a file to read"),
        (["--sys", "three", "--ref", "two"], "3 translations, but 2 references"),
        (["--sys", "three", "--ref", "three", "--raw-ref", "two"], "3 translations, but 2 raw references"),
        (["--sys", "empty", "--ref", "three"], "empty is empty"),
        (["--sys", "latin", "--ref", "three"], "latin is not UTF-8: byte 0xfc in line 2"),
        (["--sys", "three", "--ref", "three", "--output", "no/such"], "there is no folder"),
    ],
    ids=lambda value: "-".join(value).replace("--", "") or "nothing" if isinstance(value, list) else "",
)
def test_wrong_files(options, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "three", ["a b", "c", "d"])
    write(tmp_path / "two", ["a b", "c"])
    (tmp_path / "empty").touch()
    (tmp_path / "latin").write_bytes("ab\ngrün\n".encode("latin-1"))
    assert said in refused(capsys, *options, "--lang", "de")


@pytest.mark.parametrize("option", ["gen", "sys", "ref", "raw-ref", "against", "checkpoint"])
def test_what_is_scored_is_not_replaced(option, files, tmp_path, capsys):
    """Not even with --force, nor by a link."""
    path, link = write(tmp_path / "scored", SENTENCES), tmp_path / "link"
    link.symlink_to(path)
    options = ["--gen", path] if option == "gen" else [*files(SENTENCES, SENTENCES), f"--{option}", path]
    said = refused(capsys, *options, "--lang", "de", "--output", link, "--force")
    assert f"--output {link} is the file of --{option}" in said
    assert path.read_text(encoding="utf-8").splitlines() == SENTENCES


@pytest.mark.parametrize("lang", ["xx", "german", "DE", "xx_DE", ""])
def test_a_language_without_rules_is_refused(lang, files, capsys):
    said = refused(capsys, *files(["a"], ["a"]), "--lang", lang, "--detok", "moses")
    assert f"--lang: Moses has no rules for the language {lang!r}; it has " in said
    assert " de, " in said


@pytest.mark.parametrize("lang", ["de_AT", "de-AT"])
def test_a_region_has_the_rules_of_its_language(lang, files, tmp_path, capsys):
    options = (*files(TOKENISED, TOKENISED), "--raw-ref", write(tmp_path / "raw", PLAIN))
    got = as_json(capsys, *options, "--lang", lang)
    assert got == {**as_json(capsys, *options, "--lang", "de"), "lang": lang}
    assert got["sacrebleu"] == pytest.approx(100)


@pytest.mark.parametrize("lang", ["german", "d", "de-", ""])
def test_what_is_no_code_is_refused(lang, files, capsys):
    said = refused(capsys, *files(["a"], ["a"]), "--lang", lang, "--detok", "none")
    assert f"--lang must be the code of a language, such as de or pt_BR, got {lang!r}" in said


def test_a_missing_language_is_refused(files, capsys):
    assert "--lang is missing: detokenising needs the target language" in refused(capsys, *files(["a"], ["a"]))
    assert run(*files(["a"], ["a"]), "--detok", "none") == 0


def test_no_sentences_are_refused():
    with pytest.raises(InputError, match="no sentences"):
        bleu.score([], [], detok="none")


@pytest.mark.parametrize(
    "content, lines",
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\n\n", ["a", ""]),
        (b"\xef\xbb\xbfa\n", ["a"]),
        ("a\u2028b\x0b\x0cc\rd\n".encode(), ["a\u2028b\x0b\x0cc\rd"]),
    ],
    ids=["unix", "no-last-end", "dos", "empty-last-line", "byte-order-mark", "other-line-ends"],
)
def test_lines_end_where_wc_says(content, lines, tmp_path):
    (tmp_path / "x").write_bytes(content)
    assert read_lines(tmp_path / "x") == lines
