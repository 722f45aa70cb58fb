"""`lightconv score --speed --checkpoint`: what a table needs beside the score."""

import pytest
import torch

from lightconv_plugin.checkpoints.loading import count_parameters
from tests.scoring.corpora import SENTENCES, as_json, refused, run, write
from tests.scoring.test_gen_log import log_of

SPEED = (
    "2026-01-01 00:00:00 | INFO | fairseq_cli.generate | Translated 10 sentences (1,234 tokens) in 0.8s "
    "(12.34 sentences/s, 567.89 tokens/s)"
)


@pytest.fixture
def log(tmp_path):
    """A log with the line that states the speed."""
    lines = [SPEED if "Translated" in line else line for line in log_of(SENTENCES, SENTENCES)]
    return write(tmp_path / "gen.out", lines)


def save(path, model, **more):
    torch.save({"model": model, "args": None, **more}, path)
    return path


def state():
    torch.manual_seed(3)
    embedding = torch.randn(10, 4)
    return {
        "encoder.version": torch.tensor([3.0]),
        "encoder.embed_positions._float_tensor": torch.zeros(1),
        "encoder.embed_tokens.weight": embedding,
        "encoder.layers.0.conv.weight": torch.randn(2, 1, 3),
        "encoder.layers.0.layer_norm1.weight": torch.ones(4),
        "encoder.layers.0.layer_norm1.bias": torch.zeros(4),
        "encoder.layers.1.layer_norm1.weight": torch.ones(4),
        "encoder.layers.0.zeros.weight": torch.zeros(5, 2),
        "encoder.layers.1.zeros.weight": torch.zeros(5, 2),
        "decoder.embed_tokens.weight": embedding,
        "decoder.output_projection.weight": embedding,
    }


def test_tied_matrices_count_once(tmp_path):
    assert count_parameters(save(tmp_path / "a.pt", state())) == 40 + 6 + 3 * 4 + 2 * 10


def test_copies_of_tied_matrices_count_once_too(tmp_path):
    copied = {key: value.clone() for key, value in state().items()}
    assert count_parameters(save(tmp_path / "a.pt", copied)) == 40 + 6 + 3 * 4 + 2 * 10
    copied["decoder.output_projection.weight"][9, 3] += 1
    assert count_parameters(save(tmp_path / "a.pt", copied)) == 80 + 6 + 3 * 4 + 2 * 10


def test_one_object_has_score_parameters_and_speed(log, tmp_path, capsys):
    checkpoint = save(tmp_path / "a.pt", state())
    got = as_json(capsys, "--gen", log, "--lang", "de", "--speed", "--checkpoint", checkpoint)
    assert (got["parameters"], got["sentences_per_second"]) == (78, 12.34)
    assert got["bleu_tok"] == pytest.approx(100)
    assert not {"parameters", "sentences_per_second"} & set(as_json(capsys, "--gen", log, "--lang", "de"))


def test_human_output(log, tmp_path, capsys):
    checkpoint = save(tmp_path / "a.pt", {"weight": torch.arange(1234.0)})
    assert run("--gen", log, "--lang", "de", "--speed", "--checkpoint", checkpoint) == 0
    assert capsys.readouterr().out.endswith("\nparameters = 1,234\nspeed = 12.34 sentences/s\n")


def test_speed_needs_a_log_that_states_it(files, tmp_path, capsys):
    said = refused(capsys, *files(["a"], ["a"]), "--detok", "none", "--speed")
    assert "--speed is read from the log of fairseq-generate: give it by --gen FILE" in said
    lines = [line for line in log_of(SENTENCES, SENTENCES) if "Translated" not in line]
    said = refused(capsys, "--gen", write(tmp_path / "gen.out", lines), "--lang", "de", "--speed")
    assert "--speed: " in said and "has no line 'Translated" in said


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "no such checkpoint"),
        ({"model": {}}, "is not a checkpoint of fairseq: it has no parameters under 'model'"),
        ([1, 2], "is not a checkpoint of fairseq: it has no parameters under 'model'"),
        ("text", "cannot be read as a checkpoint: it is truncated or another kind of file"),
    ],
    ids=["missing", "empty", "list", "text"],
)
def test_other_files_are_refused(content, said, log, tmp_path, capsys):
    path = tmp_path / "a.pt"
    if content == "text":
        path.write_text("hello")
    elif content is not None:
        torch.save(content, path)
    assert said in refused(capsys, "--gen", log, "--lang", "de", "--checkpoint", path)
