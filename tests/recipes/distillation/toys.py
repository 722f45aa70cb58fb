"""A teacher with random weights for a prepared folder."""

from pathlib import Path
from typing import Any

from lightconv_plugin.modules import ModelConfig
from lightconv_plugin.text.dictionary import Dictionary
from lightconv_plugin.text.recipe import Recipe
from lightconv_plugin.text.sides import TextSide
from tests.checkpoints.exports import DIM, build_model, stack


def export_teacher(
    directory: Path,
    data: Path,
    langs=("en", "de"),
    seed: int = 3,
    words: int | None = None,
    shortlist: Path | None = None,
) -> Path:
    """An exported model that translates between these languages; `words`: with so many entries of the dictionaries."""
    from lightconv_plugin.checkpoints.saving import Side, save_exported

    sides = []
    for lang in langs:
        lines = (data / "data-bin" / f"dict.{lang}.txt").read_bytes().splitlines(keepends=True)[:words]
        sides.append(Side(lang, b"".join(lines), TextSide(Recipe("moses", lang), "bpe", data / "bpe/codes")))
    size = len(Dictionary.of_bytes(sides[0].dictionary, "dictionary"))
    options: dict[str, Any] = {"vocab_size": size, "max_positions": 256}
    decoder = stack(encoder_dim=DIM, share_input_output=False, **options)
    model = build_model(ModelConfig(decoder, stack(causal=False, **options)), seed)
    model.decoder.output_projection.weight.data.mul_(6)  # hypotheses differ clearly in their scores
    save_exported(
        directory,
        model,
        source=sides[0],
        target=sides[1],
        max_source_positions=256,
        max_target_positions=256,
        shortlist=shortlist,
    )
    return directory
