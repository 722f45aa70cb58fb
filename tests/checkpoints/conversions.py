"""What the tests of `lightconv convert` share: checkpoints of small models, and the command."""

from argparse import Namespace
from dataclasses import fields

import pytest
import torch

from lightconv_plugin.cli import main

pytest.importorskip("fairseq")

from fairseq import models
from fairseq.models import lightconv as upstream

from tests.models.toys import SMALL

# fairseq ≤ 0.12.2 has other classes under the same names, and is not what "fairseq" means here.
NEW_FAIRSEQ = hasattr(upstream.LightConvEncoderLayer(Namespace(
    encoder_embed_dim=4, encoder_conv_dim=4, encoder_glu=False, encoder_conv_type="lightweight", weight_softmax=True,
    encoder_attention_heads=1, weight_dropout=0, dropout=0, relu_dropout=0, input_dropout=0,
    encoder_normalize_before=False, encoder_ffn_embed_dim=4), 3), "layer_norm1")  # fmt: skip
with_new_fairseq = pytest.mark.skipif(
    not NEW_FAIRSEQ, reason="needs a fairseq whose LightConv is that of its main branch"
)


def settings(architecture, **options):
    """All options of one of our architectures, as fairseq saves them under cfg."""
    config = models.MODEL_DATACLASS_REGISTRY[architecture]()
    values = {f.name: getattr(config, f.name) for f in fields(config) if not f.name.startswith("_")}
    assert options.keys() <= values.keys()
    return {"_name": architecture, **values, **options}


def checkpoint(path, model, section, **more):
    """A file as fairseq's trainer writes it, with settings under cfg."""
    cfg = {
        "_name": None,
        "common": {"_name": None, "user_dir": "/somewhere/lightconv_plugin", "seed": 1},
        "model": section,
        "task": {"_name": "translation", "data": "data-bin", "source_lang": "de"},
        "criterion": {"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1},
    }
    history = [{"num_updates": 7, "criterion_name": "C", "optimizer_name": "O", "lr_scheduler_state": {}}]
    content = {"args": None, "cfg": cfg, "model": model.state_dict(), "optimizer_history": history, "task_state": {}}
    torch.save({**content, "extra_state": {"epoch": 1}, "last_optimizer_state": None, **more}, path)
    return path


def run(*arguments):
    return main.main(["convert", *map(str, arguments)])


def load(path):
    return torch.load(path, weights_only=False)


def same(left, right):
    """Bitwise equality of two state dictionaries, names, shapes, types and ties."""
    assert list(left) == list(right)
    for key, value in left.items():
        assert value.dtype == right[key].dtype and torch.equal(value, right[key]), key

    def ties(state):
        return sorted(sorted(k for k in state if state[k].data_ptr() == v.data_ptr()) for v in state.values())

    assert ties(left) == ties(right)


MIXED = {"encoder_conv_type": "lightweight", "decoder_conv_type": "dynamic"}
LIGHTCONVS = [
    pytest.param("dynamicconv_iwslt_de_en", {}, id="dynamic"),
    pytest.param("lightweightconv_wmt_en_de", {}, id="lightweight"),
    pytest.param("dynamicconv", {**MIXED, "share_decoder_input_output_embed": True}, id="mixed-tied"),
    pytest.param("dynamicconv", {"share_all_embeddings": True}, id="all-shared"),
    pytest.param("dynamicconv_cnndm", {"weight_normalization": "none"}, id="no-softmax"),
    pytest.param(
        "lightweightconv",
        {"encoder_normalize_before": True, "decoder_normalize_before": True, "encoder_learned_pos": True},
        id="prenorm-learned",
    ),
    pytest.param(
        "dynamicconv", {"encoder_conv_dim": 32, "decoder_conv_dim": 8, "decoder_kernel_size_list": [5]}, id="dims"
    ),
    pytest.param("dynamicconv", {"adaptive_softmax_cutoff": [8, 20]}, id="adaptive-softmax"),
]


def small(options):
    return {**SMALL, "dropout": 0.0, "attention_dropout": 0.0, **options}
