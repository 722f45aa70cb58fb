"""configs/cnndm from training to ROUGE on a miniature of summarisation: long articles, short summaries."""

import json
import random
import re
from pathlib import Path

import pytest
import yaml

pytest.importorskip("fairseq")
pytest.importorskip("rouge_score", reason="needs rouge-score")

from tests import ROOT
from tests.fairseq_cli import run as fairseq
from tests.recipes.conftest import run_script  # noqa: F401  (a fixture)

CONFIGS = ROOT / "configs/cnndm"
# All but protocol.yaml, which is for scripts/reproduce.sh.
SYSTEMS = sorted(path for path in CONFIGS.glob("*.yaml") if path.stem != "protocol")
ARTICLE = 400  # tokens that are kept of an article, the end of the sentence among them
TINY = (
    *(f"+model.{side}_{what}=16" for side in ("encoder", "decoder") for what in ("embed_dim", "ffn_embed_dim")),
    *("+model.encoder_layers=3", "+model.encoder_kernel_size_list=[3,7,31]"),
    *("+model.decoder_layers=2", "+model.decoder_kernel_size_list=[3,31]"),
    *("optimization.update_freq=[1]", "optimization.max_update=6", "lr_scheduler.warmup_updates=2"),
    *("dataset.num_workers=0", "common.log_interval=1"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Articles of 300 to 600 words, whose summaries are their first words; the data-bin folder."""
    folder = tmp_path_factory.mktemp("mini summaries")
    rng = random.Random(9)
    vocabulary = [f"word{i}" for i in range(50)]
    for split, n in ("train", 40), ("valid", 4), ("test", 6):
        articles = [rng.choices([*vocabulary, "."], k=rng.choice((300, 500, 600))) for _ in range(n)]
        for lang, end in ("article", None), ("summary", 70):
            lines = (" ".join([*article[:end], "."]) + "\n" for article in articles)
            (folder / f"{split}.{lang}").write_text("".join(lines), encoding="utf-8")
    fairseq(
        "preprocess", "--source-lang=article", "--target-lang=summary", "--joined-dictionary", "--workers=1",
        *(f"--{name}pref={folder / name}" for name in ("train", "valid", "test")), f"--destdir={folder / 'data-bin'}",
    )  # fmt: skip
    return folder / "data-bin"


@pytest.fixture(scope="module")
def trained(data, run_script, tmp_path_factory):  # noqa: F811
    """(save_dir, what train.sh printed)"""
    save_dir = tmp_path_factory.mktemp("training") / "run"
    done = run_script(
        "train.sh", CONFIGS / "dynamicconv.yaml", f"task.data={data}", f"checkpoint.save_dir={save_dir}", *TINY
    )
    return save_dir, done.stdout


@pytest.fixture(scope="module")
def generated(data, trained, run_script):  # noqa: F811
    """(the printed score, the log's lines by their kind and number) of evaluate.sh with the arguments of cnndm."""
    checkpoint = trained[0] / "checkpoint_last.pt"
    done = run_script("evaluate.sh", data, checkpoint, "@cnndm/generate.args", "--json", "--batch-size", "3")
    log = (trained[0] / "checkpoint_last.test.gen").read_text(encoding="utf-8")
    lines = re.findall(r"^([STHD])-(\d+)\t(?:-?[\d.]+\t)?(.*)$", log, re.MULTILINE)
    return json.loads(done.stdout), {(kind, int(i)): text.split() for kind, i, text in lines}, log


def test_no_long_article_is_left_out_of_the_training(trained):
    """40 articles, most of them too long, in 5 batches of 8: cut to 400 tokens, 8 of them fit 3584."""
    _, log = trained
    assert "will be skipped" not in log
    batches = re.findall(r"epoch 001: +\d+ / (\d+) .* bsz=(\d+),", log)
    assert batches == [("5", "8")] * 5
    assert "num_updates: 6 >= max_update: 6" in log


def test_articles_are_cut_and_not_left_out(generated, data):
    _, lines, _ = generated
    articles = [line.split() for line in (data.parent / "test.article").read_text().splitlines()]
    assert len([key for key in lines if key[0] == "H"]) == len(articles) == 6
    assert max(map(len, articles)) > ARTICLE
    for i, article in enumerate(articles):
        assert lines["S", i] == article[: ARTICLE - 1]


def test_summaries_keep_the_bounds(generated):
    _, lines, log = generated
    assert "with beam=4" in log
    for i in range(6):
        words = lines["H", i]
        assert 55 <= len(words) <= 140
        trigrams = [tuple(words[j : j + 3]) for j in range(len(words) - 2)]
        assert len(trigrams) == len(set(trigrams))


def test_score_prints_rouge_parameters_and_speed(generated, trained):
    score = generated[0]
    assert score == json.loads((trained[0] / "checkpoint_last.test.score").read_text())
    assert (score["n"], score["empty"], score["stem"]) == (6, 0, True)
    assert 0 < score["rouge2"] < score["rouge1"] < 100
    assert 0 < score["rougeL"] <= score["rougeLsum"] <= score["rouge1"]
    assert score["sentences_per_second"] > 0
    assert len(re.findall("Translated 6 sentences", generated[2])) == 1
    assert not list(trained[0].glob("*.tmp"))
    said = re.search(r"num\. shared model params: ([\d,]+)", trained[1])[1]
    assert score["parameters"] == int(said.replace(",", ""))


# ------------------------------------------------------------------------------------------------ configurations


def test_training_and_generation_cut_articles_alike():
    words = [line.partition("#")[0].split() for line in (CONFIGS / "generate.args").read_text().splitlines()]
    arguments = [word for line in words for word in line]
    assert "--truncate-source" in arguments
    cut = int(arguments[arguments.index("--max-source-positions") + 1])
    for path in SYSTEMS:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert config["task"]["truncate_source"] is True
        assert config["task"]["max_source_positions"] == config["model"]["max_source_positions"] == cut == ARTICLE
        assert config["checkpoint"]["save_dir"] == f"runs/cnndm/{Path(path).stem}"
        assert config["dataset"]["max_tokens"] * config["optimization"]["update_freq"][0] == 57344
