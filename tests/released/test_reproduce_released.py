"""`lightconv reproduce released/NAME`: scores, row and table."""

import io
import json

import pytest

pytest.importorskip("fairseq", reason="fairseq is not installed")
from sacrebleu.metrics import BLEU, CHRF
from subword_nmt.apply_bpe import BPE

from lightconv_plugin.files import read_lines
from lightconv_plugin.generation.translator import Translator
from lightconv_plugin.released import cache
from lightconv_plugin.released.models import MODELS
from lightconv_plugin.scoring.bleu import remove_bpe, split_compounds
from lightconv_plugin.scoring.generate_log import parse_gen_log
from tests.recipes.data.archive_server import tar_of
from tests.released.archives import binarised

NAMES = ["dynamicconv.glu.wmt16.en-de", "lightconv.no_glu.iwslt14.de-en"]


def served_test_set(world, server, model, pieces, folder):
    """Serve a test set with this target text."""
    folder.mkdir()
    both = {**world.pieces[model.task.name], model.task.pair[1]: pieces}
    files = binarised(folder, model.task, both, world.dictionaries[model.task.name])
    packed = tar_of({f"{model.test_folder}/{name}": data for name, data in files.items()}, "bz2")
    server.files[model.test_archive.rpartition("/")[2]] = packed


def tokenised_bleu(hypotheses, references):
    return BLEU(tokenize="none", smooth_method="none", force=True).corpus_score(hypotheses, [references]).score


def parameters_of(world, model):
    named = world.models[model.folder].named_parameters()
    return sum(p.numel() for key, p in named if "conv_bias" not in key)


@pytest.mark.parametrize("name", NAMES)
def test_the_published_search_on_the_released_test_set(name, world, server, home, lightconv, tmp_path):
    model = MODELS[name]
    source, target = model.task.pair
    lightconv("released", name, "--url", server.address)
    with Translator(name, dtype="float32") as translator:
        found = translator.translate(world.texts[model.task.name][source])
    pieces = [one.hypotheses[0].tokens for one in found]
    # References that have more than the translations: compounds, which are three tokens each if they are split.
    compound = BPE(io.StringIO(world.merges[model.task.name])).process_line("old-fashioned").split()
    references = [" ".join([*tokens, *compound * (1 + len(tokens) // 9)]) for tokens in pieces]
    served_test_set(world, server, model, references, tmp_path / "test")
    out, _ = lightconv("reproduce", f"released/{name}", "--url", server.address, "--results", tmp_path / "results")
    log = parse_gen_log(read_lines(cache.checkpoint(model).with_name("model.test.gen")), "log")
    sides = [[remove_bpe(line, "@@") for line in side] for side in (map(" ".join, pieces), references)]
    assert [log.hypotheses, log.references] == sides
    whole, split = tokenised_bleu(*sides), tokenised_bleu(*([split_compounds(line) for line in side] for side in sides))
    assert 5 < whole < 95 and whole != pytest.approx(split)
    expected = split if target == "de" else whole
    row = json.loads((tmp_path / f"results/released/{name}.json").read_text(encoding="utf-8"))
    assert row["scores"]["bleu_tok"] == pytest.approx(expected)
    assert row["parameters"] == parameters_of(world, model)
    table = (tmp_path / "results/RESULTS.md").read_text(encoding="utf-8")
    assert out.strip() in table and table.count("## ") == 1 and "## Released weights" in table
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name}")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:4] == [model.task.name, f"upstream's {model.test_folder}", f"{expected:.2f}"]
    assert cells[6:9] == [model.bleu, str(model.beam), f"{model.lenpen:g}"] and float(cells[11]) > 0
    assert f"lightconv reproduce released/{name}\n" in table
    assert "nrefs:1" in table and f"- machine: {row['machine']}." in table


@pytest.fixture
def asked(world, tmp_path, monkeypatch):
    """What sacreBLEU was asked for; it has our English and German text."""
    texts, asked = world.texts["WMT16 En-De"], []

    def files(field, lines, found):
        (tmp_path / field).write_text("\n".join([*lines, ""]), encoding="utf-8")
        return lambda *arguments: asked.append(arguments) or found(str(tmp_path / field))

    monkeypatch.setattr("sacrebleu.utils.get_source_file", files("src", texts["en"], str))
    monkeypatch.setattr("sacrebleu.utils.get_reference_files", files("ref", texts["de"], lambda path: [path]))
    return asked


def test_from_text_scores_sacrebleus_test_set(world, server, home, lightconv, asked, tmp_path):
    name = NAMES[0]
    model = MODELS[name]
    texts = world.texts[model.task.name]
    lightconv("released", name, "--url", server.address)
    (home / "files.json").unlink()  # as the error about a damaged one says
    arguments = ("reproduce", f"released/{name}", "--url", server.address, "--results", tmp_path / "results")
    out, _ = lightconv(*arguments, "--from-text")
    assert asked == [("wmt14/full", "en-de")] * 2
    row = json.loads((tmp_path / f"results/released/{name}.from_text.json").read_text(encoding="utf-8"))
    assert row["parameters"] == parameters_of(world, model)
    with Translator(name, dtype="float32") as translator:
        mine = [one.text for one in translator.translate(texts["en"])]
    assert row["scores"] == {
        "sacrebleu": pytest.approx(BLEU(trg_lang="de").corpus_score(mine, [texts["de"]]).score),
        "chrf": pytest.approx(CHRF().corpus_score(mine, [texts["de"]]).score),
    }
    assert "sacreBLEU's wmt14/full | –" in " ".join(out.split()) and "--from-text" in out


def test_from_text_needs_merges_and_the_released_weights(world, server, home, lightconv, asked, tmp_path):
    talk = "talkconv.wmt16.en-de"
    (tmp_path / "talk.pt").write_bytes(world.checkpoints[talk])
    (tmp_path / "test.tar.bz2").write_bytes(tar_of(world.tests[f"{talk}.test"], "bz2"))
    lightconv("released", talk, "--file", tmp_path / "talk.pt", "--test-file", tmp_path / "test.tar.bz2")
    lightconv("released", NAMES[0], "--url", server.address, "--dtype", "int8")
    for name, message in (
        (talk, f"{talk} came without merges, so raw text cannot be split into its subwords: leave out --from-text"),
        (NAMES[0], f"are int8, not the released ones: run lightconv released {NAMES[0]} --dtype float32 first"),
    ):
        _, err = lightconv("reproduce", f"released/{name}", "--from-text", "--results", tmp_path / "results", status=2)
        assert err.rstrip().endswith(message)
    assert not asked and not (tmp_path / "results").exists()


def test_from_text_refuses_an_export_that_prepares_text_otherwise(server, home, lightconv, asked, tmp_path):
    """As those have that are older than what is known of the training text."""
    model = MODELS[NAMES[0]]
    lightconv("released", NAMES[0], "--url", server.address)
    prepared = cache.exported(model) / "text.json"
    text = json.loads(prepared.read_text(encoding="utf-8"))
    for changed in ({"lowercase": "last"}, {"aggressive": True}):
        source = {**text["source"], "recipe": {**text["source"]["recipe"], **changed}}
        prepared.write_text(json.dumps({**text, "source": source}))
        _, err = lightconv("reproduce", f"released/{NAMES[0]}", "--from-text", status=2)
        said = f"not prepare text as {NAMES[0]} needs it: run lightconv released {NAMES[0]} --dtype float32 first\n"
        assert err.endswith(said)
    assert not asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["released/dynamicconv.glu.wmt16.ende"], "no released model dynamicconv.glu.wmt16.ende: did you mean dyn"),
        ([f"released/{NAMES[0]}", "--seeds", "1"], "is trained already: only --results, --url and --from-text"),
        ([f"released/{NAMES[1]}", "--from-text"], "sacreBLEU has no test set of IWSLT14 De-En: leave out --from-text"),
        (["released/lightconv.glu.wmt17.zh-en", "--from-text"], "Chinese text was segmented is not known: leave out"),
        (["iwslt14_de_en/dynamicconv", "--seeds", "1", "--from-text"], "--from-text is for released models, such as"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, home, lightconv):
    _, err = lightconv("reproduce", *arguments, status=2)
    assert err.count("\n") == 1 and message in err
    assert not home.exists()


def test_a_test_set_of_other_dictionaries_is_refused(world, server, home, lightconv, tmp_path):
    wrong = MODELS["lightconv.glu.wmt14.en-fr"].test_archive.rpartition("/")[2]
    model = MODELS[NAMES[0]]
    server.files[model.test_archive.rpartition("/")[2]] = server.files[wrong]
    _, err = lightconv("reproduce", f"released/{NAMES[0]}", "--url", server.address, "--results", tmp_path, status=2)
    assert "dict.en.txt is not the dictionary of dynamicconv.glu.wmt16.en-de" in err.splitlines()[-1]
