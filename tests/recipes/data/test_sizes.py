"""The configurations for own text: one table says which corpus gets which, and `lightconv prepare parallel` says so."""

import re
import shlex

import pytest
import yaml

from lightconv_plugin.checkpoints.loading import safe_torch_load
from lightconv_plugin.cli.prepare import next_step
from lightconv_plugin.paths import configs_dir
from lightconv_plugin.recipes.data.options import Options, Request
from lightconv_plugin.recipes.data.sizes import SIZES, size_for
from tests.recipes.conftest import write_parts
from tests.recipes.data.preparations import prepare


@pytest.mark.parametrize(
    "pairs, config",
    [
        (1, "small"), (10_000, "small"), (29_000, "small"), (69_999, "small"), (70_000, "medium"), (160_239, "medium"),
        (999_999, "medium"), (1_000_000, "large"), (35_482_654, "large"),
    ],
)  # fmt: skip
def test_a_corpus_gets_a_configuration(pairs, config):
    assert size_for(pairs).config == f"parallel/{config}"


def test_the_table_is_in_order_and_complete():
    assert SIZES[0].pairs == 0 and [size.pairs for size in SIZES] == sorted(size.pairs for size in SIZES)
    assert all(size_for(size.like_pairs) is size for size in SIZES)
    assert {size.config for size in SIZES} == {
        f"parallel/{path.stem}" for path in configs_dir().glob("parallel/*.yaml")
    }


def settings(name):
    """{group.option: value} of a configuration."""
    content = yaml.safe_load((configs_dir() / f"{name}.yaml").read_text(encoding="utf-8"))
    return {f"{group}.{key}": value for group, values in content.items() for key, value in values.items()}


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.config)
def test_a_configuration_has_the_settings_of_its_recipe(size):
    """Except for the data, which is the user's, and the joined dictionary that its preparation makes by default."""
    own, published = settings(size.config), settings(size.like)
    differ = {key for key in own.keys() | published.keys() if own.get(key) != published.get(key)}
    data = {"task.data", "task.source_lang", "task.target_lang", "checkpoint.save_dir"}
    assert data <= differ <= data | {"model.share_all_embeddings"}
    assert own["model.share_all_embeddings"] and not own.keys() & {"task.source_lang", "task.target_lang"}


def index(folder, sentences):
    """An index of binarised data, as far as the number of sentences."""
    (folder / "data-bin").mkdir()
    header = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\4" + sentences.to_bytes(8, "little")
    (folder / "data-bin" / "train.de-en.de.idx").write_bytes(header)


@pytest.mark.parametrize(
    "sentences, options, expected",
    [
        (12_000, Options(bpe=4000), ["parallel/small", "12,000 training pairs"]),
        (12_000 * 8, Options(bpe=4000, bpe_dropout=0.1), ["parallel/small", "12,000 training pairs"]),
        (12_000 * 3, Options(bpe=4000, bpe_dropout=0.1, bpe_copies=3), ["parallel/small", "12,000 training pairs"]),
        (12_000 * 2, Options(bpe=4000, bidirectional=True), ["parallel/small", "12,000 training pairs"]),
        (160_000, Options(separate_bpe=True), ["parallel/medium", "model.share_all_embeddings=false"]),
        (2_000_000, Options(), ["parallel/large", "has 32,000 BPE merges (--bpe), this text 10,000"]),
    ],
)
def test_what_is_suggested(tmp_path, monkeypatch, sentences, options, expected):
    monkeypatch.chdir(tmp_path)
    index(tmp_path, sentences)
    said = "\n".join(next_step(Request("parallel", tmp_path, tmp_path, options)))
    assert all(part in said for part in expected), said
    assert ("merges" in said) == (options.bpe != size_for(sentences // 8 if options.bpe_dropout else sentences).merges)
    assert ("share_all_embeddings" in said) == options.separate_bpe


def test_nothing_is_suggested_for_data_of_another_form(tmp_path):
    assert next_step(Request("parallel", tmp_path, tmp_path, Options())) == []


def test_the_suggested_command_trains(tmp_path, run_script, monkeypatch):
    """And so does another mixer, as docs/choose.md says."""
    pytest.importorskip("fairseq")
    monkeypatch.chdir(tmp_path)
    text = write_parts(tmp_path / "my text", ("train", "valid", "test"), (60, 8, 8))
    said = prepare(tmp_path, "parallel", "--data", text, "--name", "mine", "--bpe", "60", "--workers", "1")
    (line,) = re.findall(r"^  (lightconv train .*)$", said, re.MULTILINE)
    assert line == "lightconv train parallel/small task.data=data/mine/data-bin checkpoint.save_dir=runs/mine"
    words = shlex.split(line)[2:]
    # Two updates, without waiting for the warm-up of 800.
    other = ("model._name=lightweightconv", "checkpoint.save_dir=runs/light")
    for folder, mixer, more in (("mine", "dynamic", ()), ("light", "lightweight", other)):
        shorter = ("optimization.max_update=2", "dataset.max_tokens=300")
        run_script("train.sh", *words, *more, *shorter, cwd=tmp_path)
        model = safe_torch_load(tmp_path / f"runs/{folder}/checkpoint_last.pt")["cfg"]["model"]
        assert model["encoder_conv_type"] == mixer
