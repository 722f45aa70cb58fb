"""`lightconv distill`: the same text whatever interrupts it, a folder like any prepared one, and what it refuses."""

import json
import os
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import sacrebleu
import torch

pytest.importorskip("fairseq")

from lightconv_plugin.cli import main
from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.distillation import choosing, translating
from lightconv_plugin.recipes.distillation import teacher as teaching
from lightconv_plugin.recipes.distillation.source import open_source
from lightconv_plugin.recipes.distillation.teacher import Teacher, work_with
from tests import fairseq_cli
from tests.generation import translation_toys
from tests.recipes.distillation import toys
from tests.robustness.torture import Fork
from tests.warm_python import warm_python

PAIRS = 80  # of a block: four for the miniature corpus
SEARCH = ["--beam", "3", "--max-len-b", "12", "--dtype", "float32", "--threads", "1"]
OPTIONS = {"beam": 3, "max_len_b": 12, "dtype": "float32", "threads": 1}
KEEP = ["--max-ratio", "3.2", "--max-repeats", "9"]  # most, though a random model repeats itself
LOOSE = ("digests.json", "preprocess.log", "lock")  # of times, or of nothing


@pytest.fixture(scope="module")
def data(prepared, tmp_path_factory):
    return shutil.copytree(prepared[1], tmp_path_factory.mktemp("a corpus") / "mini, en-de")


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory):
    return toys.export_teacher(tmp_path_factory.mktemp("teachers") / "one", data)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(translating, "PAIRS", PAIRS)
    monkeypatch.setattr(sys, "executable", warm_python())  # by which fairseq-preprocess is started


def distill(*arguments) -> int:
    return main.main(["distill", *map(str, arguments), *KEEP])


@pytest.fixture(scope="module")
def distilled(data, teacher, tmp_path_factory):
    out = tmp_path_factory.mktemp("distilled") / "out"
    with mock.patch.object(sys, "executable", warm_python()), mock.patch.object(translating, "PAIRS", PAIRS):
        assert distill(teacher, data, *SEARCH, "--out", out) == 0
    return out


def texts(folder: Path) -> dict[str, bytes]:
    """The content of all files that do not depend on the time or the place."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if path.name not in LOOSE and "steps" not in name}


def killed(blocks: int, *arguments) -> None:
    """Run the command in a process that is killed while it writes the block after so many."""
    write = translating.atomic_write

    def count_down(path):
        nonlocal blocks
        if blocks == 0:
            path.with_name(f".{path.name}.{os.getpid()}.00000000.tmp").write_text("the first half of")
            os.kill(os.getpid(), signal.SIGKILL)
        blocks -= 1
        return write(path)

    with mock.patch.object(translating, "atomic_write", count_down):
        process = Fork(distill, *arguments, log=Path(os.devnull), token="distill")
        assert process.wait() == -signal.SIGKILL


def test_killed_and_resumed_it_makes_the_same_text(data, teacher, distilled, tmp_path, capsys):
    out = tmp_path / "out"
    for number in (0, 2):
        killed(2 - number, teacher, data, *SEARCH, "--out", out)
        left = {path.name for path in (out / "teacher/blocks").glob("[0-9]*")}
        assert left == {"000000", "000001"} and {path.name for path in out.iterdir()} == {".steps", "teacher"}
    assert distill(teacher, data, *SEARCH, "--out", out) == 0
    assert "160 of 300 pairs were translated before" in capsys.readouterr().err
    assert texts(out) == texts(distilled)
    assert not list(out.rglob("*.tmp")) and not (out / "teacher/blocks").exists()


def test_workers_divide_the_same_text(data, teacher, distilled, tmp_path):
    one, source = Teacher((teacher,), OPTIONS), open_source(data)
    translating.translate_blocks(one, one.open(source), source, tmp_path / "blocks", 2)
    translating.join_blocks(tmp_path / "blocks", tmp_path / "text")
    assert (tmp_path / "text").read_bytes() == (distilled / "teacher/train.de").read_bytes()


def test_all_but_the_target_side_of_the_training_text_is_kept(data, distilled):
    new, old = texts(distilled), texts(data)
    train = [f"train.en-de.{lang}.{kind}" for lang in ("en", "de") for kind in ("bin", "idx")]
    changed = {"corpus.json", "bpe/train.en", "bpe/train.de", *(f"data-bin/{name}" for name in train)}
    extra = {"teacher/train.de", "teacher/counts.json"}
    gone = {name for name in old if name.startswith(("raw/train", "tok/train"))}
    assert set(new) == set(old) - gone | extra
    assert {name for name in old if name in new and new[name] != old[name]} == changed
    about = json.loads(new["corpus.json"])
    how = about.pop("distilled")
    assert about == json.loads(old["corpus.json"])
    assert (how["beam_size"], how["max_len_b"], how["dtype"], how["nbest"]) == (3, 12, "float32", 1)
    assert how["pairs"] == 300 == how["kept"] + sum(how["dropped"].values())
    assert how["dropped"]["empty"] == 0 and how["dropped"]["ratio"] > 5 and how["dropped"]["loop"] > 5
    kept = list(zip(*(new[f"bpe/train.{lang}"].decode().splitlines() for lang in ("en", "de")), strict=True))
    assert len(kept) == how["kept"] > 200
    pairs = zip(old["bpe/train.en"].decode().splitlines(), new["teacher/train.de"].decode().splitlines(), strict=True)
    rest = iter(pairs)
    assert all(pair in rest for pair in kept)  # in order


def translations(teachers, data: Path, nbest: int = 1) -> list:
    """Of the first block, as `lightconv translate` finds them."""
    from lightconv_plugin.generation.translator import Translator

    lines = (data / "bpe/train.en").read_text(encoding="utf-8").splitlines()[:PAIRS]
    with Translator(teachers, beam=3, max_len_b=12, dtype="float32") as translator:
        return translator.translate(lines, nbest, pieces=True)


def first_block(teacher: Teacher, data: Path) -> list[str]:
    source = open_source(data)
    with teacher.open(source) as translator:
        number, lines = work_with(translator, teacher.nbest, source)(next(source.blocks(PAIRS)))
    assert number == 0
    return lines


def test_the_text_is_what_the_teacher_finds(data, teacher, distilled, tmp_path):
    want = [" ".join(one.tokens) for one in translations(teacher, data)]
    assert (distilled / "teacher/train.de").read_text(encoding="utf-8").splitlines()[:PAIRS] == want
    both = (teacher, toys.export_teacher(tmp_path / "other", data, seed=4))
    ensemble = [" ".join(one.tokens) for one in translations(both, data)]
    assert first_block(Teacher(both, OPTIONS), data) == ensemble != want


def test_of_n_translations_the_closest_to_the_reference_is_taken(data, teacher):
    found, first = [], 0
    references = (data / "bpe/train.de").read_text(encoding="utf-8").splitlines()
    for one, reference in zip(translations(teacher, data, nbest=3), references, strict=False):
        lines = [" ".join(hypothesis.tokens) for hypothesis in one.hypotheses]
        words, tokens = ([line.replace("@@ ", "") for line in side] for side in (lines, [reference]))
        scores = [
            sacrebleu.sentence_bleu(line.removesuffix("@@"), tokens, tokenize="none", use_effective_order=True).score
            for line in words
        ]
        found.append(lines[scores.index(max(scores))])
        first += scores.index(max(scores)) == 0
    assert first_block(Teacher((teacher,), OPTIONS, nbest=3), data) == found
    assert first < PAIRS  # not always the best by the score


def test_a_student_trains_on_it(distilled, tmp_path):
    sizes = [f"model.{side}_{what}=16" for side in ("encoder", "decoder") for what in ("embed_dim", "ffn_embed_dim")]
    train = ["train", "multi30k_en_de/student/dynamicconv", f"task.data='{distilled / 'data-bin'}'", *sizes]
    train += ["optimization.max_update=2", f"checkpoint.save_dir={tmp_path / 'run'}", "common.tensorboard_logdir=null"]
    train += ["dataset.num_workers=0", "checkpoint.save_interval_updates=2", "common.cpu=true"]
    status, _, said = fairseq_cli.run_module("lightconv_plugin", train, cwd=tmp_path)
    assert status == 0, said
    assert (tmp_path / "run/checkpoint_1_2.pt").is_file()
    said = fairseq_cli.run(
        "train", distilled / "data-bin", "--user-dir", fairseq_cli.USER_DIR, "--arch", "dynamicconv_iwslt_de_en",
        *fairseq_cli.SIZE, *fairseq_cli.RECIPE, "--max-update", 2, "--save-dir", tmp_path / "fairseq",
    )  # fmt: skip
    assert (tmp_path / "fairseq/checkpoint_last.pt").is_file(), said


def test_what_is_done_is_not_repeated_and_limits_need_no_teacher(
    data, teacher, distilled, tmp_path, capsys, monkeypatch
):
    out = shutil.copytree(distilled, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    (out / "teacher/blocks").mkdir()  # as after a kill at the end
    (out / "teacher/blocks/000000").touch()
    monkeypatch.setattr(translating, "translate_blocks", lambda *_: pytest.fail("it is translated already"))
    assert distill(teacher, data, *SEARCH, "--out", out) == 0
    assert capsys.readouterr().err.count("done before") == 4
    changed = {path.name for path, when in before.items() if path.stat().st_mtime_ns != when}
    assert changed <= {"corpus.json", "lock"} and not (out / "teacher/blocks").exists()
    command = ["distill", str(teacher), str(data), *SEARCH, "--out", str(out), "--max-ratio", "2"]
    assert main.main([*command, "--max-repeats", "9"]) == 0
    how, first = (json.loads((folder / "corpus.json").read_text())["distilled"] for folder in (out, distilled))
    assert how["dropped"]["ratio"] > first["dropped"]["ratio"] and how["kept"] < first["kept"]


def test_an_older_version_has_kept_what_is_dropped_now(data, teacher, distilled, tmp_path, monkeypatch):
    """A word of the translations that is a symbol of fairseq: the binarisation failed, and should not fail again."""
    out = shutil.copytree(distilled, tmp_path / "out")
    with monkeypatch.context() as older:
        older.delitem(choosing.PROBLEMS, "symbol")
        assert distill(teacher, data, *SEARCH, "--out", out) == 0
    rarest = Counter((out / "bpe/train.de").read_text().split()).most_common()[-1][0]
    monkeypatch.setattr(choosing, "SYMBOLS", {rarest})
    assert distill(teacher, data, *SEARCH, "--out", out) == 0
    assert json.loads((out / "corpus.json").read_text())["distilled"]["dropped"]["symbol"] > 0


def test_other_options_need_force(data, teacher, distilled, tmp_path, capsys, refusal):
    out = tmp_path / "out"
    killed(1, teacher, data, *SEARCH, "--out", out)
    block = (out / "teacher/blocks/000000").read_bytes()
    other = toys.export_teacher(tmp_path / "other", data, seed=4)
    for command, said in (
        ((teacher, data, *SEARCH, "--lenpen", "0.5"), "len_penalty 1.0 → 0.5"),
        ((other, data, *SEARCH), "teacher"),
        ((teacher, data, *SEARCH, "--nbest", "2"), "nbest 1 → 2; reference is new"),
    ):
        assert distill(*command, "--out", out) == 2
        wanted = f"--out {out} was made with another teacher or other options ({said}): give --force to replace it"
        assert wanted in capsys.readouterr().err
        assert (out / "teacher/blocks/000000").read_bytes() == block
    assert distill(other, data, *SEARCH, "--out", out, "--force") == 0
    lines = (out / "teacher/train.de").read_bytes().splitlines(keepends=True)
    assert len(lines) == 300 and b"".join(lines[:PAIRS]) != block
    said = refusal("prepare", "multi30k_en_de", "--data", data, "--out", out)
    assert f"--out {out} has a text that lightconv distill made" in said


def test_a_shortlist_and_what_it_is_applied_to_are_options(data, teacher, tmp_path, capsys):
    """The words that may be chosen are those of a batch, whose sentences depend on its size."""
    out, table = tmp_path / "out", tmp_path / "shortlist.txt"
    words = [line.split()[0] for line in (data / "data-bin/dict.de.txt").read_text(encoding="utf-8").splitlines()]
    table.write_text("".join(f"{word} NULL 0.1\n" for word in words[:150]), encoding="utf-8")
    distilled = (teacher, data, *SEARCH, "--shortlist", table, "--out", out)
    assert distill(*distilled) == 0
    assert json.loads((out / "corpus.json").read_text())["distilled"]["shortlist"] == str(table)
    for command, said in (
        ((teacher, data, *SEARCH, "--out", out), "shortlist"),
        ((*distilled, "--batch-tokens", "100"), "batch_tokens 4096 → 100"),
        ((*distilled, "--batch-size", "3"), "batch_size is new"),
    ):
        assert distill(*command) == 2
        assert said in capsys.readouterr().err
    assert distill(*distilled) == 0 and capsys.readouterr().err.count("done before") == 4
    table.write_text("".join(f"{word} NULL 0.1\n" for word in words[:140]), encoding="utf-8")
    assert distill(*distilled) == 2
    assert "shortlist" in capsys.readouterr().err


def test_a_shortlist_of_the_teacher(data, tmp_path, capsys):
    out, table = tmp_path / "out", tmp_path / "table.txt"
    words = [line.split()[0] for line in (data / "data-bin/dict.de.txt").read_text(encoding="utf-8").splitlines()]
    table.write_text("".join(f"{word} NULL 0.1\n" for word in words[:150]), encoding="utf-8")
    teacher = toys.export_teacher(tmp_path / "teacher", data, shortlist=table)
    assert distill(teacher, data, *SEARCH, "--out", out) == 0
    about = json.loads((out / "corpus.json").read_text())["distilled"]
    assert about["shortlist"] == str(teacher / "shortlist.txt")
    for option, said in ((("--batch-size", "3"), "batch_size is new"), (("--shortlist", "none"), "shortlist")):
        assert distill(teacher, data, *SEARCH, *option, "--out", out) == 2
        assert said in capsys.readouterr().err
    whole = (teacher, data, *SEARCH, "--shortlist", "none", "--out", tmp_path / "whole")
    assert distill(*whole) == 0
    assert "shortlist" not in json.loads((tmp_path / "whole/corpus.json").read_text())["distilled"]
    assert (tmp_path / "whole/teacher/train.de").read_bytes() != (out / "teacher/train.de").read_bytes()


def test_a_distilled_text_is_distilled_again(data, teacher, distilled, tmp_path):
    """Its record keeps the first one, which decided which pairs are left."""
    assert distill(teacher, distilled, *SEARCH, "--lenpen", "0.5", "--out", tmp_path / "out") == 0
    first, again = (json.loads((folder / "corpus.json").read_text()) for folder in (distilled, tmp_path / "out"))
    how = again.pop("distilled")
    assert how.pop("earlier") == first.pop("distilled") and again == first
    assert how["len_penalty"] == 0.5 and how["pairs"] == len((distilled / "bpe/train.de").read_bytes().splitlines())


def test_batches_count_if_the_longest_translations_depend_on_them(data, teacher, tmp_path, capsys):
    command = (teacher, data, *SEARCH, "--max-len-a", "0.5", "--out", tmp_path / "out")
    killed(1, *command)
    assert distill(*command, "--batch-size", "3") == 2
    assert "batch_size is new" in capsys.readouterr().err


def make_wrong(what: str, data: Path, teacher: Path, place: Path) -> tuple[list, str]:
    """The arguments of a command that is wrong, and what is said about it."""
    copy = shutil.copytree(data, place / "copy")
    about = json.loads((copy / "corpus.json").read_text())
    if what == "no corpus.json":
        (copy / "corpus.json").unlink()
        return [teacher, copy], f"DATA {copy} has no corpus.json: give a folder that lightconv prepare made"
    if what == "data-bin":
        return [teacher, copy / "data-bin"], f"DATA {copy / 'data-bin'} has no corpus.json: give {copy}"
    if what == "no pieces":
        (copy / "bpe/train.de").unlink()
        return [teacher, copy], f"DATA {copy} has no bpe/train.de: run lightconv prepare again"
    if what == "a symbol":
        with (copy / "bpe/train.en").open("a") as file:
            file.write("a b </s> c\n")
        return [teacher, copy], f"{copy}/bpe/train.en, line 301: </s> in 'a b </s> c' is fairseq's symbol"
    if what == "both directions":
        (copy / "corpus.json").write_text(json.dumps({**about, "bidirectional": True}))
        return [teacher, copy], f"DATA {copy} has its training text in both directions"
    if what == "another vocabulary":
        other = toys.export_teacher(place / "other", data, words=50)
        return [other, copy], f"TEACHER {other} has another dictionary (54 entries) than {copy}/data-bin/dict.en.txt"
    if what == "another direction":
        other = toys.export_teacher(place / "other", data, langs=("de", "en"))
        return [other, copy], f"TEACHER {other} translates de → en, but DATA {copy} is en → de"
    if what == "nbest":
        return [teacher, copy, "--nbest", "4"], "--nbest must be in 1 … --beam = 3, got 4"
    if what == "no teacher":
        return [place / "none.pt", copy], f"no such checkpoint or exported directory: {place / 'none.pt'}"
    if what == "itself":
        return [teacher, copy, "--out", copy], f"--out {copy} is DATA"
    if what == "a link":
        (place / "link").symlink_to(copy)
        (place / "link_distilled").mkdir()
        (place / "link_distilled/file").write_text("mine")
        return [teacher, place / "link"], f"--out {place / 'link_distilled'} is not empty"
    assert what == "another folder"
    (place / "mine").mkdir()
    (place / "mine/file").write_text("mine")
    return [teacher, copy, "--out", place / "mine"], f"--out {place / 'mine'} is not empty, and lightconv distill did"


WRONG = ("no corpus.json", "data-bin", "no pieces", "both directions", "another vocabulary", "another direction")
WRONG = (*WRONG, "a symbol", "nbest", "no teacher", "itself", "a link", "another folder")


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_one_line_and_nothing_is_written(what, data, teacher, tmp_path, capsys):
    arguments, said = make_wrong(what, data, teacher, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert distill(*arguments, *SEARCH, "--force") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lightconv distill: error: ")]
    assert len(errors) == 1 and said in errors[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_whose_training_data_are_gone(data, tmp_path):
    """Its dictionaries must be those of the data; whether they can be is checked by their size."""
    languages = {"data": str(tmp_path / "gone"), "source_lang": "en", "target_lang": "de"}
    checkpoint = translation_toys.make_checkpoint(tmp_path / "m.pt", data / "data-bin", task=languages)
    source = open_source(data)
    with Teacher((checkpoint,), {"dtype": "float32"}).open(source) as translator:
        assert [dictionary.symbols for dictionary in translator.dictionaries] == [
            source.dictionary(lang).symbols for lang in ("en", "de")
        ]
        assert translator.translate(["a@@ b", ""], pieces=True)[0].text


def test_the_dictionaries_of_a_training_count(data, tmp_path):
    """Those of the data would fit its embeddings as well, with other words."""
    own = tmp_path / "own"
    own.mkdir()
    for path in (data / "data-bin").glob("dict.*.txt"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (own / path.name).write_text("".join(reversed(lines)), encoding="utf-8")
    languages = {"data": str(own), "source_lang": "en", "target_lang": "de"}
    checkpoint = translation_toys.make_checkpoint(tmp_path / "m.pt", own, task=languages)
    with pytest.raises(InputError, match="has another dictionary"):
        Teacher((checkpoint,), {"dtype": "float32"}).open(open_source(data))


def test_the_dictionaries_of_each_teacher_count(data, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    for path in (data / "data-bin").glob("dict.*.txt"):
        (own / path.name).write_bytes(b"".join(reversed(path.read_bytes().splitlines(keepends=True))))
    languages = {"source_lang": "en", "target_lang": "de"}
    teachers = tuple(
        translation_toys.make_checkpoint(tmp_path / f"{number}.pt", folder, task=languages | {"data": str(folder)})
        for number, folder in enumerate((data / "data-bin", own))
    )
    with pytest.raises(InputError, match=r"0\.pt and .*1\.pt have different dictionaries"):
        Teacher(teachers, {"dtype": "float32"}).open(open_source(data))


def test_workers_share_the_cores_and_the_gpus(monkeypatch):
    monkeypatch.setattr(teaching, "cores", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    shares = Teacher((), {"device": "cuda", "threads": None}).divided(3)
    assert [(share.options["device"], share.options["threads"]) for share in shares] == [
        ("cuda:0", 2), ("cuda:1", 2), ("cuda:0", 2)
    ]  # fmt: skip
    assert Teacher((), {"device": "cpu", "threads": 3}).divided(1)[0].options == {"device": "cpu", "threads": 3}
