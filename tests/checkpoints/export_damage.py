"""What can be wrong with an exported directory: functions that damage one, and what the error has to say."""

import json
import os
import random
import struct

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import exports


class RunsACommand:
    """Leaves a file where it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


TABLE = "encoder.embed_tokens.weight"
FC1 = "encoder.layers.0.fc1.weight"


def tensors(directory, change) -> None:
    """Save what `change` makes of the tensors."""
    path = directory / "model.safetensors"
    known = load_file(path)
    known = {name: tensor.clone() for name, tensor in known.items()}
    known = change(known) or known
    save_file(known, path, metadata={"format": "pt"})


def set_tensor(name, tensor):
    return lambda directory: tensors(directory, lambda known: known.__setitem__(name, tensor(known[name])))


def drop(name):
    return lambda directory: tensors(directory, lambda known: {n: t for n, t in known.items() if n != name})


def huge_shape(directory):
    """In the header of safetensors, whatever the library says to it."""
    path = directory / "model.safetensors"
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    known = json.loads(content[8 : 8 + size])
    known[TABLE]["shape"] = [2**40, 2**40]
    new = json.dumps(known).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + content[8 + size :])


def cut(name, part):
    def damage(directory):
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[: int(len(content) * part)])

    return damage


def write(name, content):
    return lambda directory: (directory / name).write_bytes(content)


def change(name, values):
    return lambda directory: exports.change(directory / name, **{k.replace("__", "."): v for k, v in values.items()})


def config(**values):
    return change("config.json", values)


def text(**values):
    return change("text.json", values)


def without(name, key):
    def damage(directory):
        known = json.loads((directory / name).read_text())
        *above, last = key.split(".")
        place = known
        for part in above:
            place = place[part]
        del place[last]
        (directory / name).write_text(json.dumps(known))

    return damage


def pipe(directory):
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")


def link_to(name, target):
    def damage(directory):
        (directory / name).unlink()
        (directory / name).symlink_to(target)

    return damage


MIXER = exports.pair().as_json()["encoder_stack"]["mixers"][0]
DAMAGE = {
    # name: (what is done, a part of the message)
    "weights cut short": (cut("model.safetensors", 0.7), "not a safetensors file, or is damaged"),
    "weights missing": (lambda d: (d / "model.safetensors").unlink(), "incomplete: there is no model.safetensors"),
    "header of 2**63 bytes": (write("model.safetensors", struct.pack("<Q", 2**63) + b"{}"), "not a safetensors file"),
    "header with a huge shape": (huge_shape, "not a safetensors file, or is damaged"),
    "another shape": (
        set_tensor(TABLE, lambda t: t[:-1].clone()),
        "embed_tokens.weight has shape [159, 128] and type F32, config.json requires [160, 128]",
    ),
    "a flat tensor": (set_tensor(FC1, lambda t: t.flatten()), "fc1.weight has shape [18432]"),
    "another type": (set_tensor(FC1, lambda t: t.half()), "type F16, config.json requires [144, 128] and F32"),
    "NaN": (set_tensor(FC1, lambda t: t.index_fill(0, torch.tensor([3]), float("nan"))), "fc1.weight has NaN"),
    "infinity": (set_tensor(FC1, lambda t: t.index_fill(0, torch.tensor([3]), float("inf"))), "fc1.weight has NaN"),
    "infinities of both signs": (
        set_tensor(FC1, lambda t: torch.cat([t[2:], t[:2] * float("inf")])), "fc1.weight has NaN or infinite values",
    ),
    "a tensor too many": (
        lambda d: tensors(d, lambda k: {**k, "evil\n\x1b[31m": torch.ones(1)}),
        "has unknown tensors of the model in config.json: evil\\n\\x1b[31m (1 in all)",
    ),
    "a tensor missing": (drop(FC1), "lacks tensors of the model in config.json: encoder.layers.0.fc1.weight"),
    "config missing": (lambda d: (d / "config.json").unlink(), "incomplete: there is no config.json"),
    "config cut short": (cut("config.json", 0.5), "config.json is not JSON"),
    "config is not UTF-8": (write("config.json", b'{"model_type": "\xff"}'), "config.json is not JSON"),
    "config is a list": (write("config.json", b"[]"), "config.json must hold a JSON object, got []"),
    "config nested deeply": (write("config.json", b"[" * 200_000), "nested too deeply"),
    "config of many bytes": (write("config.json", b" " * 2_000_000), "at most 1,048,576 are read"),
    "config with NaN": (write("config.json", b'{"model_type": NaN}'), "NaN is not a number of JSON"),
    "config with a number of 10,000 digits": (
        write("config.json", b'{"format_version": 1' + b"0" * 10_000 + b"}"), "config.json",
    ),
    "another model_type": (config(model_type="bert"), "model_type must be lightconv, got 'bert'"),
    "a newer format": (config(format_version=2), "format_version 2 is not supported: this version reads 1"),
    "format_version is true": (config(format_version=True), "format_version True is not supported"),
    "unknown weights": (config(weights="int4"), "weights must be one of float32, bfloat16, float16, int8, got 'int4'"),
    "other weights than those stored": (config(weights="bfloat16"), "type F32, config.json requires"),
    "8 bits that are none": (config(weights="int8"), "lacks tensors"),
    "a stack is a text": (config(encoder_stack="evil"), "encoder_stack must be a mapping, got 'evil'"),
    "an unknown key": (config(encoder_stack__evil=1), "unknown key encoder_stack.evil"),
    "an unknown key with a line feed": (config(**{"encoder_stack__a\nb": 1}), "unknown key encoder_stack.a\\nb"),
    "a size is a text": (config(encoder_stack__ffn_dim="144"), "ffn_dim must be a whole number, got '144'"),
    "a size is true": (config(encoder_stack__num_heads=True), "num_heads must be a whole number, got True"),
    "another size": (config(encoder_stack__ffn_dim=145), "fc1.weight has shape [144, 128]"),
    "10^12 embeddings": (config(encoder_stack__vocab_size=10**12), "sizes must be at most 2147483647"),
    "10^9 embeddings": (config(encoder_stack__vocab_size=10**9), "embed_tokens.weight has shape [160, 128]"),
    "a kernel of 10^12": (
        config(encoder_stack__mixers=[{**MIXER, "kind": "talk", "kernel_size": 10**12}] * 2), "sizes must be at most",
    ),
    "a product of sizes beyond 64 bits": (
        config(**{f"{s}_stack__{n}": 2**31 - 1 for s in ("encoder", "decoder") for n in ("embed_dim", "ffn_dim")},
               encoder_stack__num_heads=1, decoder_stack__num_heads=1, encoder_stack__mixers=[
                   {**MIXER, "kind": "conv", "conv_dim": 2**31 - 1, "num_heads": 1, "kernel_size": 2**31 - 1}] * 2),
        "config.json",
    ),
    "4,000 layers": (
        config(encoder_stack__mixers=[MIXER] * 4000), "tensors, but config.json has 4002 layers and bands",
    ),
    "no layers": (config(encoder_stack__mixers=[]), "mixers must have an entry for each layer"),
    "a mixer that is not causal": (
        config(decoder_stack__mixers=[{**MIXER, "causal": False}] * 2), "unknown key decoder_stack.mixers.causal",
    ),
    "a pad that is not a word": (config(pad_token_id=10**6), "pad must be an index of the"),
    "another pad": (config(pad_token_id=5), "bos, pad, eos and unk_token_id must be 0, 1, 2 and 3"),
    "a vocabulary of another size": (config(vocab_size=5), "vocab_size must be 160 as in the rest of the file, got 5"),
    "another start symbol": (
        config(decoder_start_token_id=5),
        "decoder_start_token_id must be 2 as in the rest of the file, got 5",
    ),
    "no encoder, all the same": (config(encoder_stack=None), "encoder_dim and share_embeddings need an encoder"),
    "no languages": (config(source_lang=None, target_lang=None), "source_lang is missing for a model with"),
    "one language": (config(source_lang=None), "source_lang and target_lang must be two different names"),
    "the same language twice": (config(source_lang="en"), "must be two different names"),
    "a language that is a path": (config(source_lang="../../evil"), "must be the name of a language"),
    "a language that is hidden": (config(source_lang=".de"), "must be the name of a language"),
    "no longest target": (without("config.json", "max_target_positions"), "max_target_positions is missing"),
    "a longest target of 0": (config(max_target_positions=0), "max_target_positions must be in 1"),
    "more learned positions than there are": (
        config(encoder_stack__positions="learned", max_source_positions=65), "more than the 64 learned ones",
    ),
    "generation_config is not JSON": (write("generation_config.json", b"{"), "generation_config.json is not JSON"),
    "a beam of 0": (
        lambda d: exports.change(d / "generation_config.json", num_beams=0), "num_beams must be in 1 … 2147483647",
    ),
    "a minimum above the maximum": (
        lambda d: exports.change(d / "generation_config.json", min_length=9, max_length=9),
        "min_length must be below max_length = 9, got 9",
    ),
    "no new pieces": (
        lambda d: exports.change(d / "generation_config.json", max_new_tokens=0), "max_new_tokens must be in 1 … ",
    ),
    "an infinite length penalty": (
        write("generation_config.json", b'{"length_penalty": 1e999}'), "length_penalty must be a number, got inf",
    ),
    "text.json missing": (lambda d: (d / "text.json").unlink(), "incomplete: there is no text.json"),
    "text.json without a target": (without("text.json", "target"), "target is missing"),
    "text.json without a source": (text(source=None), "source is required if config.json has a source_lang"),
    "an unknown tokeniser": (text(source__recipe__tokeniser="os.system"), "tokeniser must be one of"),
    "a language of Moses that is a path": (text(source__recipe__lang="../../x"), "Moses has no rules for the language"),
    "unknown subwords": (text(source__subwords="pickle"), "subwords must be one of bpe, sentencepiece, words"),
    "a file above": (text(source__file="../codes"), "'../codes' is not the name of a file in this directory"),
    "a file with a NUL": (text(source__file="a\0b"), "is not the name of a file in this directory"),
    "a file without a name": (text(source__file=""), "'' is not the name of a file in this directory"),
    "a file that is above": (text(source__file=".."), "'..' is not the name of a file in this directory"),
    "a file of a Windows path": (text(source__file="..\\codes"), "is not the name of a file in this directory"),
    "a file that is not there": (text(source__file="nowhere"), "incomplete: there is no nowhere"),
    "a name of 5,000 characters": (text(source__file="x" * 5000), "is not the name of a file in this directory"),
    "a file that is a number": (text(source__file=7), "source.file must be a text or null, got 7"),
    "merges that are none": (write("source.bpe", b"this is a text, not merges\n"), "source.bpe is not a file of m"),
    "merges that are not UTF-8": (write("source.bpe", b"#version: 0.2\n\xff \xfe\n"), "source.bpe is not a file of m"),
    "merges in the place of a sentencepiece model": (
        text(source__subwords="sentencepiece"), "source.bpe is not a model of sentencepiece",
    ),
    "a shorter dictionary": (
        write("dict.de.txt", exports.dictionary(150)), "has 150 entries with fairseq's four special symbols, but",
    ),
    "a dictionary with a word twice": (write("dict.de.txt", b"a 1\na 1\n"), "dict.de.txt, line 2: 'a' occurs twice"),
    "a link out of the directory": (link_to("dict.de.txt", "/etc/passwd"), "a link to a file outside its directory"),
    "a relative link out": (link_to("source.bpe", "../codes"), "there is no source.bpe"),
    "a link to itself": (link_to("dict.de.txt", "dict.de.txt"), "dict.de.txt cannot be read"),
    "a pipe": (pipe, "model.safetensors is not a file"),
}  # fmt: skip

LISTED = {
    "missing": (lambda d: (d / "shortlist.txt").unlink(), "incomplete: there is no shortlist.txt"),
    "empty": (write("shortlist.txt", b""), "shortlist.txt is empty"),
    "random bytes": (write("shortlist.txt", random.Random(1).randbytes(999)), "shortlist.txt is not UTF-8"),
    "a line of 9 MB": (write("shortlist.txt", b"v1 " * 3_000_000), "line 1: expected a target word"),
    "neither true nor false": (config(shortlist="../codes"), "shortlist must be true or false, got '../codes'"),
}  # fmt: skip

SMALL = {
    "a scale of another shape": (set_tensor(f"{FC1}_scale", lambda t: t[:-1].clone()), "scale has shape [143]"),
    "one scale for all": (set_tensor(f"{FC1}_scale", lambda t: t[0].clone()), "fc1.weight_scale has shape []"),
    "a scale of another type": (set_tensor(f"{FC1}_scale", lambda t: t.double()), "type F64, config.json"),
    "a scale of 0": (set_tensor(f"{FC1}_scale", torch.zeros_like), "and encoder.layers.0.fc1.weight_scale positive"),
    "an infinite scale": (set_tensor(f"{FC1}_scale", lambda t: t / 0), "has NaN or infinite values"),
    "-128": (set_tensor(FC1, lambda t: torch.full_like(t, -128)), "fc1.weight must be in -127 … 127"),
    "no scale": (drop(f"{FC1}_scale"), "lacks tensors of the model in config.json: encoder.layers.0.fc1.weight_scale"),
    "unsigned": (set_tensor(FC1, lambda t: t.to(torch.uint8)), "type U8, config.json requires [144, 128] and I8"),
    "8 bits, and it says float32": (config(weights="float32"), "has unknown tensors"),
}  # fmt: skip
