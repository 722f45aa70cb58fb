"""An architecture that a user registers on top of a model."""

import pytest

TINY = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (
    ("embed_dim", 16), ("ffn_embed_dim", 24), ("attention_heads", 4), ("layers", 2), ("kernel_size_list", [3, 5]),
    ("glu", False))}  # fmt: skip


def tiny(args):
    """As fairseq's documentation writes an architecture: it sets what the command line left unset."""
    for name, value in TINY.items():
        setattr(args, name, getattr(args, name, value))


@pytest.fixture
def registered(monkeypatch):
    """Registers `tiny` on top of a model as "a_tiny_model", for one test; returns `tiny`."""
    from fairseq import models

    for name in ("ARCH_MODEL_REGISTRY", "ARCH_MODEL_NAME_REGISTRY", "ARCH_CONFIG_REGISTRY", "ARCH_MODEL_INV_REGISTRY"):
        kept = {key: list(v) if isinstance(v, list) else v for key, v in getattr(models, name).items()}
        monkeypatch.setattr(models, name, kept)
    return lambda model: models.register_model_architecture(model, "a_tiny_model")(tiny)
