"""fairseq's commands for language models, with `--user-dir` added and nothing else; their numbers, computed again."""

import re

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary

import lightconv_plugin.models  # noqa: F401 (registers the architectures)
from tests.fairseq_cli import USER_DIR, run

from .language_model_toys import log_probabilities

PLUGIN = ["--user-dir", USER_DIR, "--task", "language_modeling", "--cpu"]
LENGTH = 20
SIZE = (
    "--decoder-embed-dim 16 --decoder-ffn-embed-dim 24 --decoder-attention-heads 4 --decoder-layers 2"
    " --decoder-kernel-size-list 3,7"
).split()
RECIPE = (
    f"--optimizer adam --lr 1e-2 --max-tokens 200 --log-format json --log-interval 1 --num-workers 0"
    f" --tokens-per-sample {LENGTH} --ddp-backend legacy_ddp"
).split()
ADAPTIVE = (
    "--adaptive-softmax-cutoff 6,12 --adaptive-input --adaptive-input-cutoff 6,12 --tie-adaptive-weights"
    " --tie-adaptive-proj --criterion adaptive_loss"
).split()


@pytest.fixture(scope="module")
def data(toy_data):
    return toy_data.parent / "english"


def valid_losses(log: str) -> list[float]:
    """Of each epoch, base 2."""
    return [float(loss) for loss in re.findall(r'"valid_loss": "([\d.]+)"', log)]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Upstream's names, sentence by sentence: (checkpoint, losses on the validation set)."""
    folder = tmp_path_factory.mktemp("run")
    log = run(
        "train", data, *PLUGIN, "--arch", "lightconv_lm", *SIZE, *RECIPE, *ADAPTIVE, "--sample-break-mode", "eos",
        "--save-dir", folder, "--max-epoch", 4,
    )  # fmt: skip
    assert "lightconv architectures are lightconv_plugin's" in log
    return folder / "checkpoint_last.pt", valid_losses(log)


@pytest.fixture(scope="module")
def model(trained, data):
    (model,), _ = checkpoint_utils.load_model_ensemble([str(trained[0])], arg_overrides={"data": str(data)})
    return model.eval()


@pytest.fixture(scope="module")
def words(data):
    return Dictionary.load(str(data / "dict.txt"))


def lines_of(data, split: str) -> list[str]:
    return (data.parent / f"{split}.en").read_text(encoding="utf-8").splitlines()


@torch.no_grad()
def scores(model, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """log₂ p of each target token; both (T,)."""
    return (
        log_probabilities(model, inputs.unsqueeze(0))[0].gather(-1, target.unsqueeze(-1)).flatten()
        / torch.tensor(2.0).log()
    )


def test_training_learns_what_it_says(trained, model, data, words):
    """A sentence is predicted from </s> on, and its own </s> is part of it."""
    total = [
        scores(model, torch.cat([line[-1:], line[:-1]]), line)
        for line in (words.encode_line(text, add_if_not_exist=False).long() for text in lines_of(data, "valid"))
    ]
    losses = trained[1]
    assert -torch.cat(total).mean().item() == pytest.approx(losses[-1], abs=0.002)
    assert len(losses) == 4 and losses[-1] < losses[0]


@pytest.mark.parametrize("context", [0, 12])
def test_eval_lm(trained, model, data, words, context):
    """The text in one row, in pieces; each piece with the tokens before it that the context window asks for."""
    log = run(
        "eval-lm", data, *PLUGIN, "--path", trained[0], "--gen-subset", "test", "--tokens-per-sample", LENGTH,
        "--context-window", context,
    )  # fmt: skip
    lines = [words.encode_line(text, add_if_not_exist=False) for text in lines_of(data, "test")]
    text = torch.cat(lines).long()
    inputs = torch.cat([text[:1] * 0 + words.eos(), text[:-1]])
    total, step = [], LENGTH - context
    for start in range(0, len(text), step):
        begin, end = max(0, start - context), start + step
        total.append(scores(model, inputs[begin:end], text[begin:end])[start - begin :])
    expected = -torch.cat(total).mean().item()
    found = re.search(r"Evaluated (\d+) tokens[\s\S]*Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", log)
    assert int(found[1]) == len(text)
    assert float(found[2]) == pytest.approx(expected, abs=2e-4)
    assert float(found[3]) == pytest.approx(2**expected, abs=0.02)


def test_generate_and_interactive_go_on_from_a_prefix(trained, model, data, words):
    """What beam search scored token by token is what the model says of the whole sentence."""
    options = ["--path", trained[0], "--beam", 3, "--max-len-b", 12]
    log = run(
        "generate", data, *PLUGIN, *options, "--gen-subset", "test", "--sample-break-mode", "eos", "--prefix-size", 2
    )
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)\nD-.*\nP-\d+\t(.*)$", log, re.M)
    assert len(found) == len(lines_of(data, "test"))
    for number, _, text, positional in found:
        assert text.split()[:2] == lines_of(data, "test")[int(number)].split()[:2]
        line = words.encode_line(text, add_if_not_exist=False).long()
        expected = scores(model, torch.cat([line[-1:], line[:-1]]), line)
        assert list(map(float, positional.split())) == pytest.approx(expected.tolist(), abs=2e-3)
    prompt = " ".join(lines_of(data, "test")[0].split()[:2])
    answer = run("interactive", data, *PLUGIN, *options, stdin=prompt + "\n")
    assert re.search(r"^H-0\t\S+\t(.*)$", answer, re.M)[1] == {n: text for n, _, text, _ in found}["0"]


@pytest.mark.parametrize(
    "flags",
    [
        "--arch talkconv_lm --sample-break-mode complete --share-decoder-input-output-embed --criterion cross_entropy",
        "--arch lightweightconv_lm --decoder-conv-type lightweight,attention --sample-break-mode none"
        " --character-embeddings --criterion cross_entropy"
        " --character-filters [(1,8),(2,8)] --checkpoint-activations",
    ],
    ids=["talk-complete", "mixed-none-characters"],
)
def test_other_ways_to_train(data, tmp_path, flags):
    log = run(
        "train", data, *PLUGIN, *SIZE, *RECIPE, *flags.split(), "--max-epoch", 4, "--save-dir", tmp_path, "--no-save"
    )
    losses = valid_losses(log)
    assert len(losses) == 4 and losses[-1] < losses[0]
