"""A corpus as scripts/prepare.sh leaves it, and checkpoints with random weights for its dictionaries."""

import io
import json
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from fairseq import models
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerModel, base_architecture
from omegaconf import OmegaConf
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

import lightconv_plugin.models  # noqa: F401  (registers ours)
from lightconv_plugin.text.recipe import Recipe
from tests.checkpoints.fairseq_files import state
from tests.models import toys

RECIPE = Recipe("moses", "de", lowercase="last", plain_apostrophe=True)
SENTENCES = {
    "de": ["Der kleine Hund läuft.", "Wir sehen das große Haus nicht!", "Was kostet es, z.B. hier?", "Zwei Männer"],
    "en": ["The small dog runs.", "We don't see the big house!", "What does it cost, e.g. here?", "Two men"],
}
SIZE = {
    "encoder_embed_dim": 16, "decoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "decoder_ffn_embed_dim": 24,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 2, "decoder_layers": 2,
    "max_source_positions": 64, "max_target_positions": 64,
}  # fmt: skip
KERNELS = {"encoder_kernel_size_list": [3, 5], "decoder_kernel_size_list": [3, 5]}


def lines(number: int, seed: int = 0, longest: int = 12) -> list[str]:
    """German-looking sentences of very different lengths."""
    rng = random.Random(seed)
    words = " ".join(SENTENCES["de"]).split()
    return [" ".join(rng.choices(words, k=rng.randint(1, longest))) for _ in range(number)]


def make_corpus(folder: Path) -> Path:
    """corpus.json, bpe/codes and the dictionaries in data-bin/, whose path is returned."""
    (folder / "bpe").mkdir(parents=True)
    data = folder / "data-bin"
    data.mkdir()
    tokens = {lang: [RECIPE.tokenise()(line) for line in SENTENCES[lang]] for lang in SENTENCES}
    with (folder / "bpe" / "codes").open("w", encoding="utf-8") as codes:
        learn_bpe(io.StringIO("\n".join(tokens["de"] + tokens["en"])), codes, 30)
    encode = bpe(data)
    for lang, text in tokens.items():
        dictionary = Dictionary()
        for line in text:
            for piece in encode(line).split():
                dictionary.add_symbol(piece)
        dictionary.finalize(padding_factor=1)
        dictionary.save(str(data / f"dict.{lang}.txt"))
    about = {"src": "de", "tgt": "en", "lowercase": True, "text": {}}
    for lang in SENTENCES:
        about["text"][lang] = {**RECIPE.as_json(), "lang": lang}
    (folder / "corpus.json").write_text(json.dumps(about), encoding="utf-8")
    return data


def bpe(data: Path | str) -> Callable[[str], str]:
    """What encodes by the merges beside a folder of `make_corpus`, by subword-nmt itself."""
    with (Path(data).parent / "bpe" / "codes").open(encoding="utf-8") as codes:
        return BPE(codes).process_line


def make_checkpoint(
    path: Path, data: Path, architecture: str = "dynamicconv", seed: int = 0, task: dict | None = None, **options
) -> Path:
    """Random weights, the output layer of them enlarged so that hypotheses differ clearly in their scores.

    task: what its settings have beside or instead of the usual. options: of the model.
    """
    torch.manual_seed(seed)
    dictionaries = [Dictionary.load(str(data / f"dict.{lang}.txt")) for lang in ("de", "en")]
    task = {
        "_name": "translation", "data": str(data), "source_lang": "de", "target_lang": "en", "eval_bleu": False,
        "max_source_positions": 64, "max_target_positions": 64, **(task or {}),
    }  # fmt: skip
    if architecture == "transformer":  # fairseq's own, by a Namespace as all checkpoints of before 2021
        args = Namespace(arch="transformer", task="translation", **{**SIZE, **task, **options})
        base_architecture(args)
        model = TransformerModel.build_model(args, toys.task(*dictionaries))
        settings = {"args": args, "cfg": None}
    else:
        config = models.MODEL_DATACLASS_REGISTRY[architecture]()
        for name, value in {**SIZE, **KERNELS, **options}.items():
            setattr(config, name, value)
        config._name = architecture
        model = models.build_model(OmegaConf.structured(config), toys.task(*dictionaries))
        fields = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
        settings = {"cfg": {"model": {**fields, "_name": architecture}, "task": task}}
    with torch.no_grad():
        model.decoder.output_projection.weight.mul_(6)
    history = [{"criterion_name": "C", "optimizer_name": "O", "num_updates": 1, "lr_scheduler_state": {}}]
    torch.save(state(model.state_dict(), optimizer_history=history, **settings), path)
    return path


def with_embedding_files(path: Path) -> Path:
    """The checkpoint again, as if its training had started from pre-trained embeddings whose files are gone."""
    content = torch.load(path, weights_only=False)
    settings = content["cfg"]["model"] if content["cfg"] else vars(content["args"])
    settings.update({f"{side}_embed_path": f"/gone/{side}.vec" for side in ("encoder", "decoder")})
    torch.save(content, path)
    return path
