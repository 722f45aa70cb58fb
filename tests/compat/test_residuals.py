"""residuals_in_one_pass: whoever trains a model has its layers joined, and nobody else."""

import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.logging import metrics
from fairseq.trainer import Trainer

from benchmarks import systems, trainers


def operators_of_a_step(system):
    metrics.reset()  # trainings on "meta" leave numbers of theirs
    preset = systems.sized(systems.PRESETS["iwslt_de_en"], True, None, None)
    task = systems.task(systems.dictionary(preset.vocabulary))
    trainer = trainers.trainer(systems.build(system, preset, task, tiny=True), task, torch.device("cpu"), "float32")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trainer.train_step(systems.random_batches(preset, task.target_dictionary, 1))
    return {event.name for event in profile.events()}


@pytest.mark.parametrize("system", [systems.DYNAMIC, systems.TRANSFORMER])
def test_a_training_takes_one_operator(system, monkeypatch):
    assert "lightconv::dropout_add_norm_backward" in operators_of_a_step(system)
    monkeypatch.setattr(Trainer, "__init__", Trainer.__init__.__wrapped__)
    assert "lightconv::dropout_add_norm" not in operators_of_a_step(system)


def test_a_model_that_is_not_trained_keeps_fairseqs_layers():
    preset = systems.sized(systems.PRESETS["iwslt_de_en"], True, None, None)
    model = systems.build(systems.TRANSFORMER, preset, systems.task(systems.dictionary(preset.vocabulary)), tiny=True)
    assert {type(layer.final_layer_norm) for layer in model.encoder.layers} == {torch.nn.LayerNorm}
