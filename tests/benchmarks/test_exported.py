"""benchmarks.exported and benchmarks.agreement: all that they compare gets the options."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("fairseq")
pytest.importorskip("transformers")

import transformers

from benchmarks import agreement, exported, machine
from lightconv_plugin.cli.main import subparser
from lightconv_plugin.generation import fairseq_generate
from tests.generation import translation_toys as toys


@pytest.fixture(autouse=True)
def _any_device(monkeypatch):
    """Whatever --device says is there."""
    monkeypatch.setattr(machine, "prepare", lambda options: torch.device("cpu"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_searches_are_on_the_device_and_get_the_same_sources(device, tmp_path, monkeypatch, capsys):
    data = toys.make_corpus(tmp_path)
    checkpoint = toys.make_checkpoint(tmp_path / "a.pt", data)
    lines, source, places = toys.lines(3), tmp_path / "test.de", []
    source.write_text("\n".join([*lines[:2], "other words"]) + "\n", encoding="utf-8")

    def generate_log(data, path, subset, options):
        places.append("cpu" if "--cpu" in options else "cuda")
        pieces = map(toys.bpe(data), map(toys.RECIPE.tokenise(), lines))
        return "".join(f"S-{number}\t{line}\nH-{number}\t-1.0\ta\n" for number, line in enumerate(pieces))

    def translator(*arguments, device="cpu", **options):
        places.append(device)
        return translator_class(*arguments, **options)

    def to(self, device):
        places.append(device)
        return self

    translator_class = agreement.Translator
    monkeypatch.setattr(fairseq_generate, "generate_log", generate_log)
    monkeypatch.setattr(agreement, "Translator", translator)
    monkeypatch.setattr(transformers.PreTrainedModel, "to", to)
    monkeypatch.setattr(transformers.BatchEncoding, "to", to)
    given = {"--path": checkpoint, "--data": data, "--source": source, "--device": device}
    agreement.main([str(part) for pair in given.items() for part in pair])
    assert places == [device] * 4
    assert "not compared: 1 lines" in capsys.readouterr().out


def test_the_commands_that_start_up_have_the_options(tmp_path, monkeypatch):
    for name in ("a.pt", "test.de", "test.en"):
        (tmp_path / name).write_text("a\n", encoding="utf-8")
    commands = {}

    def start_up(given, line, repeats):
        commands.update(given)
        return {name: {"wall_s": 1.0, "processor_s": 1.0} for name in given}

    monkeypatch.setattr(exported, "_export", lambda checkpoint, directory, options, kind: directory.mkdir())
    monkeypatch.setattr(exported, "_bleu", lambda *_: {"bleu": 1.0, "sentences_per_s": 1.0})
    monkeypatch.setattr(exported, "_start_up", start_up)
    given = ["--path", f"a={tmp_path / 'a.pt'}", "--source", tmp_path / "test.de", "--reference", tmp_path / "test.en"]
    options = ["--data", "data-bin", "--device", "cuda", "--threads", 1, "--beam", 3, "--lenpen", 0.5]
    exported.main([str(argument) for argument in (*given, *options)])
    parser = subparser("translate")
    parsed = {name: parser.parse_args(command[4:]) for name, command in commands.items() if name != "import torch"}
    assert len(parsed) == 5 and {(of.device, of.threads) for of in parsed.values()} == {("cuda", 1)}
    of = parsed["a, checkpoint"]
    assert (of.data, of.beam, of.lenpen) == (Path("data-bin"), 3, 0.5)
