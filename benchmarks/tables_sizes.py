"""The tables of docs/choose.md: configurations for own text, and the trainings behind them. See benchmarks/pages.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import yaml

from benchmarks.costs import read_run
from benchmarks.tables import Cell, Table
from benchmarks.tables_scores import scores
from lightconv_plugin.paths import configs_dir
from lightconv_plugin.recipes.data.sizes import SIZES

# The recipes of which both systems were trained to the end, and the training pairs of their corpora.
_TRAINED = {
    "multi30k_en_de": 29_000,
    "multi30k_en_de/bpe_dropout": 29_000,
    "iwslt15_en_vi/small": 133_129,
    "iwslt15_en_vi/large_batch": 133_129,
    "tatoeba_de_en": 160_078,
}


def _settings(config: str) -> Mapping[str, Any]:
    return yaml.safe_load((configs_dir() / f"{config}.yaml").read_text(encoding="utf-8"))


def _tokens(settings: Mapping[str, Any]) -> int:
    """Tokens per update."""
    return settings["dataset"]["max_tokens"] * settings["optimization"]["update_freq"][0]


def _model(config: str) -> list[str]:
    """Architecture and size, GLU, kernel sizes, dropout; what the architecture decides is its own business."""
    model = _settings(config)["model"]
    given = {name: model.get(f"encoder_{name}") for name in ("embed_dim", "layers", "kernel_size_list")}
    size = f", d {given['embed_dim']}, {given['layers']} + {model['decoder_layers']} layers" if given["layers"] else ""
    kernels = ",".join(map(str, given["kernel_size_list"] or ())) or "the architecture's"
    glu = "yes" if model["encoder_glu"] else "no"
    return [f"`{model['_name']}`{size}", glu, kernels, f"{model['dropout']:g}"]


def own_text() -> Table:
    columns = []
    for number, size in enumerate(SIZES):
        settings, run = _settings(size.config), read_run(configs_dir() / f"{size.config}.yaml", "", None)
        following = SIZES[number + 1].pairs if number + 1 < len(SIZES) else None
        columns.append(
            [
                f"`{size.config}`",
                f"{size.pairs:,} – {following - 1:,}" if following else f"{size.pairs:,} and more",
                *_model(size.config),
                f"{run.parameters / 1e6:.1f}M",
                f"{size.merges:,}",
                f"{run.updates:,} × {_tokens(settings):,} tokens",
                f"`{settings['lr_scheduler']['_name']}`, {settings['optimization']['lr'][0]:g}",
                f"`{size.like}`, {size.like_pairs:,} pairs",
            ]
        )
    titles = ("training pairs", "model", "GLU", "kernel sizes", "dropout", "parameters", "`--bpe`")
    titles = (*titles, "updates", "learning rate", "settings of")
    first, *others = zip(*columns, strict=True)
    rows: list[list[Cell | str]] = [[title, *cells] for title, cells in zip(titles, others, strict=True)]
    return Table("configs", ["", *first], rows)


def trained() -> Table:
    rows = []
    for task, pairs in _TRAINED.items():
        config = f"{task}/dynamicconv"
        settings = _settings(config)
        ours, attention = scores(task, "dynamicconv", "transformer").rows
        updates = f"{settings['optimization']['max_update']:,} × {_tokens(settings):,}"
        rows.append([f"`{task}`", Cell(pairs, f"{pairs:,}"), *_model(config), updates, ours[3], attention[3]])
    headers = ["recipe", "pairs", "DynamicConv", "GLU", "kernel sizes", "dropout", "updates × tokens"]
    return Table("reproduction", [*headers, "test BLEU", "self-attention"], rows)


TABLES: dict[str, Callable[[], Table]] = {"own text": own_text, "trained": trained}
