"""Every released model, from its archive to a translation."""

import pytest
import torch

from lightconv_plugin.checkpoints.exported import load_model, open_exported
from lightconv_plugin.generation.translator import Translator
from lightconv_plugin.released.models import MODELS

DOWNLOADED = [name for name, model in MODELS.items() if model.archive]


@pytest.mark.parametrize("name", DOWNLOADED)
@torch.no_grad()
def test_every_name_from_its_archive_to_a_translation(name, world, server, home, lightconv, tmp_path):
    model = MODELS[name]
    out, _ = lightconv("released", name, "--url", server.address)
    assert out == f"{home / model.folder}\n"
    exported = open_exported(home / model.folder / "exported")
    assert (exported.settings.source_lang, exported.settings.target_lang) == model.task.pair
    assert (exported.search.num_beams, exported.search.length_penalty) == (model.beam, model.lenpen)
    theirs, ours = world.models[model.folder], load_model(exported, "float32")
    source = torch.randint(4, len(exported.source), (2, 9))
    target = torch.randint(4, len(exported.target), (2, 8))
    expected = theirs(source, torch.tensor([9, 9]), target)[0]
    torch.testing.assert_close(ours(source, target).logits, expected, atol=2e-5, rtol=2e-5)
    lines = [line.capitalize() for line in world.texts[model.task.name][model.task.pair[0]]]
    (tmp_path / "in").write_text("\n".join([*lines, ""]), encoding="utf-8")
    lightconv("translate", name, "--input", tmp_path / "in", "--output", tmp_path / "out", "--dtype", "float32")
    with Translator(name, dtype="float32") as translator:
        texts = [one.text for one in translator.translate(lines)]
        assert translator.beam == model.beam
    assert (tmp_path / "out").read_text(encoding="utf-8").splitlines() == texts and all(texts)
