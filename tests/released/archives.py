"""The released archives in miniature: checkpoints of the layout of 2019, and binarised test sets.

As upstream's: fp16 weights, written by torch's old serialisation, with fairseq 0.6's meters; arguments as a Namespace
that names a folder of upstream's machines; a folder with model.pt, dict.XX.txt and bpecodes in a .tar.gz, and a folder
of .bin and .idx files with the dictionaries in a .tar.bz2.
"""

import contextlib
import io
import random
import re
import sys
import zlib
from argparse import Namespace
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from fairseq.data import Dictionary, indexed_dataset
from fairseq.models import lightconv as upstream
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from lightconv_plugin.released.models import MODELS
from tests.models.toys import SMALL, build
from tests.recipes.data.archive_server import tar_of

WORDS = {
    "de": "Der Hund sieht nicht die kleine Katze im alten Haus",
    "en": "The dog does not see a small cat in our old-fashioned house",
    "fr": "Le chien ne voit pas un petit chat dans notre maison",
    "zh": "狗 没有 看见 小 猫 在 老 房子 里",
}
SENTENCES = 12
KERNELS = [3, 5, 5]


def sentences(lang, lowercase):
    generator = random.Random(f"sentences {lang}")
    words = WORDS[lang].split()
    lines = [" ".join(generator.choices(words, k=generator.randint(6, 9))) for _ in range(SENTENCES)]
    return [line.lower() for line in lines] if lowercase else lines


def text_of(task):
    """(sentences by language, merges, pieces by language, dictionaries by language) of a task."""
    texts = {lang: sentences(lang, task.lowercase) for lang in task.pair}
    written = io.StringIO()
    corpus = io.StringIO("\n".join(line for lines in texts.values() for line in lines))
    with contextlib.redirect_stderr(io.StringIO()):
        learn_bpe(corpus, written, 25, min_frequency=1)
    bpe = BPE(io.StringIO(written.getvalue()))
    pieces = {lang: [bpe.process_line(line) for line in lines] for lang, lines in texts.items()}
    joined = "joined" in task.model
    dictionaries = {}
    for lang in task.pair:
        dictionaries[lang] = words = Dictionary()
        for other in task.pair if joined else (lang,):
            for line in pieces[other]:
                words.encode_line(line, add_if_not_exist=True)
        words.finalize()
    return texts, written.getvalue(), pieces, dictionaries


def dictionary_text(dictionary):
    written = io.StringIO()
    dictionary.save(written)
    return written.getvalue()


def options_of(model):
    """The options of a model's architecture at toy size; joined dictionaries share all embeddings."""
    kind = {"LightConv": "lightweight", "DynamicConv": "dynamic", "TaLK": "talk"}[model.system]
    joined, glu = "joined" in model.task.model, ".glu." in model.name
    sides = {f"{side}_kernel_size_list": KERNELS for side in ("encoder", "decoder")}
    sides |= {f"{side}_glu": glu for side in ("encoder", "decoder")}
    if kind != "talk":
        sides |= {f"{side}_conv_type": kind for side in ("encoder", "decoder")}
    return {**SMALL, **sides, "share_all_embeddings": joined, "share_decoder_input_output_embed": joined}


def released_model(model, dictionaries):
    """fairseq's own model (for TaLK, ours) with weights that fp16 can hold."""
    source, target = (dictionaries[lang] for lang in model.task.pair)
    task = SimpleNamespace(
        source_dictionary=source, target_dictionary=target, cfg=SimpleNamespace(left_pad_target=False)
    )
    if model.system == "TaLK":
        made = build("talkconv", task, **options_of(model))
    else:
        off = {"dropout": 0.0, "attention_dropout": 0.0, "weight_dropout": 0.0, "input_dropout": 0.0}
        made = upstream.LightConvModel.build_model(
            Namespace(**options_of(model), **off, weight_softmax=True), task
        ).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            # By name, in which fairseq 0.12.2 has layer_norms.0 for layer_norm1: the same model everywhere.
            known = re.sub(r"layer_norms\.(\d)", lambda found: f"layer_norm{int(found[1]) + 1}", name)
            generator = torch.Generator().manual_seed(zlib.crc32(f"{model.name} {known}".encode()))
            value = torch.randn(parameter.shape, generator=generator) * 0.3 + ("norm" in name and "weight" in name)
            parameter.copy_(torch.zeros(()) if "conv_bias" in name else value.half())
        for side in (made.encoder, made.decoder):
            side.embed_tokens.weight[side.embed_tokens.padding_idx] = 0
    return made


def layout_of_2019(state, model):
    """A state dict with the names and types that the released files have."""
    old = {}
    renamed = {"layer_norm1": "layer_norms.0", "layer_norm2": "layer_norms.1"}
    for key, value in state.items():
        if "conv_bias" in key or (model.task.model.endswith("joined-dict") and "output_projection" in key):
            continue
        if model.system == "TaLK":
            key = key.replace(".self_attn.linear", ".linear").replace(".self_attn.conv.", ".conv.")
            norms = ("layer_norms.0", "layer_norms.1") if "encoder" in key else ("conv_layer_norm", "final_layer_norm")
            renamed = {"self_attn_layer_norm": norms[0], "final_layer_norm": norms[1]}
        for new, before in renamed.items():
            key = key.replace(new, before)
        old[key.replace("decoder.output_projection.weight", "decoder.embed_out")] = value.half()
    for side in ("encoder", "decoder"):
        old[f"{side}.version"] = torch.Tensor([2])
        if model.system != "TaLK":
            old[f"{side}.embed_positions._float_tensor"] = torch.zeros(1).half()
    return old


@contextlib.contextmanager
def meters_of_2019():
    """An instance of fairseq 0.6's AverageMeter, which has no module of that name today."""
    module = ModuleType("fairseq.meters")
    module.AverageMeter = type("AverageMeter", (), {"__module__": "fairseq.meters"})
    with mock.patch.dict(sys.modules, {"fairseq.meters": module}):
        yield module.AverageMeter()


def checkpoint(model, made):
    """The bytes of model.pt."""
    source, target = model.task.pair
    kind = "talkconv" if model.system == "TaLK" else "lightconv"
    args = Namespace(
        **options_of(model),
        **{"arch": f"{kind}_iwslt_de_en", "task": "translation", "criterion": "label_smoothed_cross_entropy"},
        **{"optimizer": "adam", "lr_scheduler": "inverse_sqrt", "data": "/checkpoint/somebody/data-bin/x"},
        **{"source_lang": source, "target_lang": target, "left_pad_source": "True", "left_pad_target": "False"},
        **{"dropout": 0.3, "attention_dropout": 0.1, "weight_dropout": 0.1, "input_dropout": 0.0},
        **{"weight_softmax": True, "label_smoothing": 0.1, "fp16": True},
        **{"max_source_positions": 1024, "max_target_positions": 1024},
    )
    buffer = io.BytesIO()
    with meters_of_2019() as meter:
        state = {
            "args": args,
            "model": layout_of_2019(made.state_dict(), model),
            "optimizer_history": [{"num_updates": 7, "criterion_name": "C", "lr_scheduler_state": {}}],
            "extra_state": {"epoch": 1, "train_meters": {"train_loss": meter}},
            "last_optimizer_state": None,
        }
        torch.save(state, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def binarised(folder, task, pieces, dictionaries):
    """{name: bytes} of the test set of a task, as fairseq-preprocess makes it."""
    source, target = task.pair
    for lang in task.pair:
        prefix = str(folder / f"test.{source}-{target}.{lang}")
        made = indexed_dataset.make_builder(f"{prefix}.bin", "mmap", vocab_size=len(dictionaries[lang]))
        for line in pieces[lang]:
            made.add_item(dictionaries[lang].encode_line(line, add_if_not_exist=False))
        made.finalize(f"{prefix}.idx")
        (folder / f"dict.{lang}.txt").write_text(dictionary_text(dictionaries[lang]), encoding="utf-8")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class World:
    """All archives: `files` by the path after fairseq's address; `models` by folder, as fairseq built them."""

    def __init__(self, folder):
        self.files, self.models, self.texts, self.checkpoints, self.tests = {}, {}, {}, {}, {}
        self.pieces, self.dictionaries, self.merges = {}, {}, {}
        for model in MODELS.values():
            if model.folder in self.models:
                continue
            texts, merges, pieces, dictionaries = text_of(model.task)
            self.texts[model.task.name], self.pieces[model.task.name] = texts, pieces
            self.dictionaries[model.task.name], self.merges[model.task.name] = dictionaries, merges
            self.models[model.folder] = made = released_model(model, dictionaries)
            self.checkpoints[model.folder] = checkpoint(model, made)
            (test := folder / model.test_folder).mkdir(exist_ok=True)
            test = {
                f"{model.test_folder}/{name}": data
                for name, data in binarised(test, model.task, pieces, dictionaries).items()
            }
            parts = {"model.pt": self.checkpoints[model.folder], "bpecodes": merges}
            parts |= {f"dict.{lang}.txt": dictionary_text(words) for lang, words in dictionaries.items()}
            self.tests[model.test_folder] = test
            if model.archive:
                name = model.archive.rpartition("/")[2]
                self.files[name] = tar_of({f"{model.folder}/{name}": data for name, data in parts.items()})
                self.files[model.test_archive.rpartition("/")[2]] = tar_of(test, "bz2")
