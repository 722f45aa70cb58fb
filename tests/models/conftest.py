"""An architecture that a user registers on top of a model."""

import pytest


@pytest.fixture
def registered(monkeypatch):
    """Registers a function on top of a model as the architecture "a_tiny_model", for one test."""
    from fairseq import models

    for name in ("ARCH_MODEL_REGISTRY", "ARCH_MODEL_NAME_REGISTRY", "ARCH_CONFIG_REGISTRY", "ARCH_MODEL_INV_REGISTRY"):
        kept = {key: list(v) if isinstance(v, list) else v for key, v in getattr(models, name).items()}
        monkeypatch.setattr(models, name, kept)
    return lambda model, function: models.register_model_architecture(model, "a_tiny_model")(function)
