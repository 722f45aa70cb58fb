"""docs/hugging_face.md: its Python is run, one block after the other, beside an exported model."""

import os
import shutil
import sys

import pytest

from tests import ROOT, programs
from tests.docs.pages import blocks
from tests.hf.models import export_language_model

PAGE = ROOT / "docs" / "hugging_face.md"
LINES = PAGE.read_text(encoding="utf-8").splitlines()


def needs_more(block) -> bool:
    return LINES[block.line - 3].startswith("<!-- needs:")


RUN = [block for block in blocks(PAGE, "python") if not needs_more(block)]


def test_the_page_is_read():
    assert len(RUN) == 4 and sum(map(needs_more, blocks(PAGE, "python"))) == 1


@pytest.mark.parametrize("block", RUN, ids=str)
def test_what_the_page_shows(block, exported, tmp_path, monkeypatch, capsys):
    shutil.copytree(exported, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), {"__name__": "page"})
    if "tuned" in block.text:
        assert (tmp_path / "tuned" / "model.safetensors").is_file()


def test_the_language_model_of_the_page(tmp_path, monkeypatch, capsys):
    (block,) = filter(needs_more, blocks(PAGE, "python"))
    export_language_model(tmp_path / "language-model")
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.startswith("The tower is ")


def test_without_fairseq_and_with_a_torchaudio_that_does_not_fit(exported, tmp_path):
    """In a process of its own, as what runs here may have imported everything."""
    (tmp_path / "torchaudio.py").write_text("raise OSError('Could not load this library: _torchaudio.so')")
    program = (
        "import sys, lightconv_plugin.hf\n"
        "from transformers import Seq2SeqTrainer, pipeline\n"
        f"print(pipeline('translation', model={str(exported)!r})('Ein Hund')[0].keys())\n"
        "sys.exit(f'imported: {found}' if (found := {'fairseq', 'hydra', 'omegaconf'} & sys.modules.keys()) else 0)"
    )
    found = programs.run(sys.executable, "-c", program, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert found.stdout == "dict_keys(['translation_text'])\n"
