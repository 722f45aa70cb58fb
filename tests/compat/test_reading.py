"""A training step reads the norm and the losses once, before the optimizer; what is logged stays the same."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.logging import metrics
from fairseq.trainer import Trainer

from benchmarks import systems, trainers
from benchmarks.counting import on_meta
from benchmarks.launches import Counter
from lightconv_plugin.compat import reading


@pytest.fixture(autouse=True)
def reported():
    """What is reported on "meta" must not be added to what later trainings of this process report."""
    yield
    metrics.reset()


def counted_step(dtype, monkeypatch, patched, samples):
    """The waits of a step before the optimizer's update, and those after it."""
    if not patched:
        monkeypatch.setattr(Trainer, "train_step", Trainer.train_step.__wrapped__)
        monkeypatch.setattr(Trainer, "clip_grad_norm", Trainer.clip_grad_norm.__wrapped__)
    preset = systems.sized(systems.PRESETS["iwslt_de_en"], True, None, None)
    task = systems.task(systems.dictionary(preset.vocabulary))
    model = systems.build(systems.DYNAMIC, preset, task, tiny=True)
    trainer = trainers.trainer(model, task, torch.device("cpu"), dtype)
    trainer._model.to("meta")
    trainer.device = torch.device("meta")
    batches = on_meta(systems.random_batches(preset, task.target_dictionary, samples))
    with Counter() as counter:
        trainer.train_step(batches)
        counter.begin("before")
        update = task.optimizer_step

        def marked(*args, **kwargs):
            counter.begin("after")
            update(*args, **kwargs)

        monkeypatch.setattr(task, "optimizer_step", marked)
        trainer.train_step(batches)
    return [counter.parts[part].waits for part in ("before", "after")]


@pytest.mark.parametrize("dtype, samples", [("float32", 3), ("bfloat16", 1)])
def test_one_wait_and_none_after_the_norm(dtype, samples, monkeypatch):
    """Without reads_after_the_norm: the norm before the update, and norm and losses after it."""
    before, after = counted_step(dtype, monkeypatch, True, samples)
    assert [place.partition(":")[0] for place in before] == ["reading.py"] and not after
    before, after = counted_step(dtype, monkeypatch, False, samples)
    assert len(before) == 1 and len(after) > 2


def test_the_numbers_are_the_same(monkeypatch):
    monkeypatch.setattr(reading, "_on_device", lambda value: isinstance(value, torch.Tensor))  # the CPU is the device
    losses = [torch.tensor(1 / 3), torch.tensor(0.1, dtype=torch.bfloat16), torch.tensor([2**40 + 1])]
    several = torch.tensor([1.0, 2.0])
    logged = [{"loss": losses[0], "ntokens": 7, "several": several}, {"loss": losses[1], "n_correct": losses[2]}]
    norm = reading.read_at_once(torch.tensor(2.5), logged)
    assert norm == 2.5 and norm.dtype == torch.float32 and norm.shape == ()
    assert logged[0] == {"loss": losses[0], "ntokens": 7, "several": several}
    for found, given in ((logged[1]["loss"], losses[1]), (logged[1]["n_correct"], losses[2])):
        assert torch.equal(found, given) and found.dtype == given.dtype and found is not given


def test_what_was_replaced_is_restored():
    thing = SimpleNamespace(step=1)
    with reading.replaced(thing, "step", 2), reading.replaced(thing, "other", 3):
        with pytest.raises(KeyError), reading.replaced(thing, "step", 4):
            raise KeyError
        assert vars(thing) == {"step": 2, "other": 3}
    assert vars(thing) == {"step": 1}
