"""steps_in_graphs: who asks for it trains with recorded steps, and gets the same model."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.tasks.fairseq_task import FairseqTask

from benchmarks import systems, trainers
from lightconv_plugin.compat import step_graphs as patch
from lightconv_plugin.errors import InputError
from tests.generation.recordings import Recordings
from tests.models.test_step_graphs import LEARNED, STILL, criterion
from tests.models.toys import build


@contextlib.contextmanager
def patched(monkeypatch, recordings):
    with monkeypatch.context() as patches:
        patches.setattr(patch, "on_gpu", lambda tensor: True)
        patches.setattr(patch, "CudaGraphs", lambda device: recordings)
        with trainers.in_graphs():
            yield


def trained(updates, dtype="float32"):
    """Averages of the gradients after updates of one or two batches each, by fairseq's Trainer."""
    preset = systems.sized(systems.PRESETS["iwslt_de_en"], True, None, None)
    task = systems.task(systems.dictionary(preset.vocabulary))
    torch.manual_seed(1)
    trainer = trainers.trainer(build(task_=task, **LEARNED, **STILL), task, torch.device("cpu"), dtype)
    for number in range(updates):
        batches = systems.random_batches(preset, task.target_dictionary, 2)
        trainer.train_step(batches if number % 3 else batches[:1])
    optimizer = getattr(trainer.optimizer, "fp32_optimizer", trainer.optimizer).optimizer
    return [state["exp_avg"] for state in optimizer.state.values()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_of_fairseqs(dtype, monkeypatch):
    wanted, recordings = trained(8, dtype), Recordings()
    with patched(monkeypatch, recordings):
        found = trained(8, dtype)
    assert (recordings.recorded, recordings.replayed) == (1, 11)
    for one, other in zip(found, wanted, strict=True):
        limit = 1e-2 if dtype == "bfloat16" else 1e-5
        # The bias of the keys has no gradient but for roundings, which may depend on where a tensor is in memory.
        torch.testing.assert_close(one, other, rtol=limit, atol=max(limit * other.abs().max().item(), 1e-8))


def test_forward_hooks_are_called(monkeypatch):
    """fairseq's NanDetector sets them and computes a batch again, here one of a size that would be repeated."""
    preset = systems.sized(systems.PRESETS["iwslt_de_en"], True, None, None)
    task = systems.task(systems.dictionary(preset.vocabulary))
    model = build(task_=task, **LEARNED, **STILL)
    trainer = trainers.trainer(model, task, torch.device("cpu"), "float32")
    batches = systems.random_batches(preset, task.target_dictionary, 1)
    seen, recordings = [], Recordings()
    with patched(monkeypatch, recordings):
        for _ in range(3):
            trainer.train_step(batches)
        for module in model.modules():
            module.register_forward_hook(lambda module, *_: seen.append(module))
        trainer.train_step(batches)
    assert recordings.replayed == 1 and {model, model.encoder, model.decoder.layers[0]} <= set(seen)


def test_recordings_make_room_for_a_batch_that_is_computed_normally(monkeypatch):
    """fairseq's Trainer leaves out the batch, and would do so with every other one of its size."""

    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(FairseqTask, "train_step", full)
    stopped, loss = [], criterion()
    vars(loss)["step_graphs"] = SimpleNamespace(step=lambda *given: None, stop=lambda: stopped.append(True))
    with patched(monkeypatch, Recordings()), pytest.raises(torch.OutOfMemoryError):
        FairseqTask.train_step(None, {}, build(**LEARNED), loss, None, 0)
    assert stopped


def test_a_step_that_is_repeated_tells_the_model_its_update_and_one_without_gradients_is_not_repeated(monkeypatch):
    monkeypatch.setattr(FairseqTask, "train_step", lambda *given: ("fairseq's", given[-1]))
    model, loss, seen = build(**LEARNED), criterion(), []
    model.set_num_updates = seen.append
    vars(loss)["step_graphs"] = SimpleNamespace(step=lambda *given: "repeated")
    with patched(monkeypatch, Recordings()):
        assert FairseqTask.train_step(None, {}, model, loss, None, 7) == "repeated" and seen == [7]
        assert FairseqTask.train_step(None, {}, model, loss, None, 8, ignore_grad=True) == ("fairseq's", True)


@pytest.mark.parametrize("value, needed", [("", False), ("0", False), ("1", True)])
def test_it_is_asked_for(value, needed, monkeypatch):
    monkeypatch.setenv("LIGHTCONV_GRAPHS", value)
    assert patch.steps_in_graphs.needed() is needed


def test_other_values_are_refused(monkeypatch):
    monkeypatch.setenv("LIGHTCONV_GRAPHS", "yes")
    with pytest.raises(InputError, match="LIGHTCONV_GRAPHS must be 0, 1 or unset, got 'yes'"):
        patch.steps_in_graphs.needed()


def test_processes_that_train_together_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with patched(monkeypatch, Recordings()), pytest.raises(InputError, match="LIGHTCONV_GRAPHS=1 is for one GPU"):
        FairseqTask.train_step(None, {}, build(**LEARNED), criterion(), None, 0)
