"""Makes the golden files: checkpoints of today's code, with what they compute, which every later version has to load.

    python -m tests.robustness.make_golden tests/robustness/golden/NAME [MODEL …]

Run once for a version worth remembering, for all models or for those that are new; a folder that is complete it leaves
alone. Each model is trained for a few updates by `fairseq-train`; its checkpoint, without the optimiser, is kept packed
(some KB), with the logits of a fixed batch and the translations of fixed sentences in expected.json.
"""

import argparse
import gzip
import importlib.metadata
import json
import platform
import sys
import tempfile
from pathlib import Path

import torch
from fairseq import checkpoint_utils

import lightconv_plugin
from lightconv_plugin.generation.translator import Translator
from tests.fairseq_cli import USER_DIR, binarise, run
from tests.robustness.golden_files import (
    GOLDEN,
    LANGUAGE_MODEL,
    PREVIOUS,
    SENTENCES,
    SOURCE,
    TRANSLATION,
    both_sides,
    unpack,
)

EVERY = [*TRANSLATION, LANGUAGE_MODEL]
SIZES = {"embed-dim": 8, "ffn-embed-dim": 8, "attention-heads": 2, "layers": 2}
RECIPE = (
    "--optimizer adam --lr 0.03 --lr-scheduler inverse_sqrt --warmup-updates 4 --max-tokens 200 --cpu --seed 1"
    " --num-workers 0 --max-update 200 --save-interval 1000 --no-epoch-checkpoints --no-save-optimizer-state"
    " --disable-validation"
).split()


def sizes(*sides):
    return [f"--{side}-{name}={value}" for side in sides for name, value in SIZES.items()]


def train(folder: Path, data: Path, name: str) -> Path:
    """The checkpoint of a few updates."""
    save_dir = folder / name
    common = [data, "--user-dir", USER_DIR, "--save-dir", save_dir, *RECIPE]
    if name == LANGUAGE_MODEL:
        run(
            "train", *common, *sizes("decoder"), "--arch=dynamicconv_lm", "--task=language_modeling",
            "--tokens-per-sample=16", "--decoder-kernel-size-list=3,7", "--dropout=0", "--criterion=cross_entropy",
        )  # fmt: skip
    else:
        run(
            "train", *common, "--arch=dynamicconv", *sizes("encoder", "decoder"), *TRANSLATION[name],
            *both_sides(kernel_size_list="3,7"), "--dropout=0", "--criterion=cross_entropy",
            "--share-decoder-input-output-embed",
        )  # fmt: skip
    return save_dir / "checkpoint_last.pt"


def load(path: Path, data: Path) -> torch.nn.Module:
    """The model of a checkpoint, strictly, by fairseq's own function."""
    changes = {"data": str(data)}
    if path.stem != LANGUAGE_MODEL:
        changes |= {"source_lang": "de", "target_lang": "en"}  # there are no data sets that would tell
    (model,), _ = checkpoint_utils.load_model_ensemble([str(path)], arg_overrides=changes, strict=True)
    return model.eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """(B,T,V) log-probabilities of the fixed batch; of a language model, of what its decoder has written."""
    previous, source = torch.tensor(PREVIOUS), torch.tensor(SOURCE)
    if hasattr(model, "encoder"):
        out = model(source, torch.tensor([(row != 1).sum() for row in source]), previous)
    else:
        out = model(previous)
    return model.get_normalized_probs(out, log_probs=True, sample=None)


def translations(path: Path, data: Path) -> list[str]:
    with Translator(path, data, source_lang="de", target_lang="en", beam=3, bpe_codes="none", tokenizer="none") as made:
        return [each.text for each in made.translate(list(SENTENCES))]


def main() -> int:
    parser = argparse.ArgumentParser("make_golden", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=EVERY)
    arguments = parser.parse_args()
    if unknown := ", ".join({*arguments.models} - {*EVERY}):
        parser.error(f"there is no model {unknown}; there are {', '.join(EVERY)}")
    out = arguments.out
    if (out / "expected.json").exists():
        print(f"make_golden: error: {out} is complete: golden files stay as they are", file=sys.stderr)
        return 1
    expected = {"made": {"plugin": lightconv_plugin.__version__, "python": platform.python_version()}, "models": {}}
    for package in ("torch", "numpy", "fairseq", "fairseq-fixed"):
        try:
            expected["made"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = binarise(folder)
        parts = f"--trainpref={folder}/train.en", f"--validpref={folder}/valid.en"
        run("preprocess", "--only-source", *parts, f"--destdir={folder}/lm")
        out.mkdir(parents=True, exist_ok=True)
        for path in data.glob("dict.*.txt"):
            if path.read_bytes() != (GOLDEN / path.name).read_bytes():
                parser.error(f"{path.name} is another than that of the golden files there are")
        for name in arguments.models:
            where = folder / "lm" if name == LANGUAGE_MODEL else data
            kept = out / f"{name}.pt.gz"  # of a run that was interrupted, or of this one
            if not kept.exists():
                packed = gzip.compress(train(folder, where, name).read_bytes(), mtime=0)
                kept.with_suffix(".tmp").write_bytes(packed)
                kept.with_suffix(".tmp").replace(kept)
            path = unpack(out, name, folder)
            values = logits(load(path, where))
            about = {"log_probabilities": [[[round(v, 6) for v in row] for row in rows] for rows in values.tolist()]}
            if name != LANGUAGE_MODEL:
                about["translations"] = translations(path, data)
            expected["models"][name] = about
            print(name, *about.get("translations", ()), sep="\n    ")
    lines = [f"{json.dumps(name)}: {json.dumps(about)}" for name, about in expected["models"].items()]
    text = f'{{"made": {json.dumps(expected["made"])},\n"models": {{\n' + ",\n".join(lines) + "\n}}\n"
    (out / "expected.json").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
