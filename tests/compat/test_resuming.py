"""A training that is resumed in any epoch continues as if it had not stopped; one that is finished stays as it is."""

import inspect
import re
import shutil
import time
from argparse import Namespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq import checkpoint_utils, optim
from fairseq.data import Dictionary, LanguagePairDataset, iterators
from fairseq.dataclass.configs import CheckpointConfig
from fairseq.logging.meters import MetersDict, StopwatchMeter
from fairseq.optim.fp16_optimizer import FP16Optimizer
from fairseq.tasks.fairseq_task import FairseqTask, LegacyFairseqTask
from fairseq.trainer import Trainer

import lightconv_plugin.models  # noqa: F401 (the patches)
from benchmarks import systems, trainers
from lightconv_plugin.checkpoints.loading import safe_torch_load
from lightconv_plugin.compat.optimizing import as_parameters
from tests.compat.fairseq_runs import losses, train, unpatched
from tests.models.toys import build


def test_a_training_that_has_ended_stays_as_it_is(data, checkpoint, tmp_path):
    """Without finished_training fairseq trains one update more each time that the same command is given again."""
    shutil.copy(checkpoint, tmp_path)

    def again(**environment):
        return train(data, tmp_path, "--max-update", 4, **environment)

    log = again()
    assert "already has 4 updates" in log and "done training" in log
    assert losses(log) == {}
    assert (tmp_path / checkpoint.name).read_bytes() == checkpoint.read_bytes()
    assert sorted(losses(again(LIGHTCONV_SKIP_PATCHES="finished_training"))) == [5]


def test_a_trainer_that_is_not_fairseqs_is_left_alone():
    """load_checkpoint returns what it did, whatever the settings of the trainer are: here a test's mock."""
    trainer = MagicMock(checkpoint_suffix="")
    trainer.load_checkpoint.return_value = {"train_iterator": {"epoch": 2}}
    state, epochs = checkpoint_utils.load_checkpoint(CheckpointConfig(), trainer)
    assert state is trainer.load_checkpoint.return_value
    assert epochs is trainer.get_train_iterator.return_value


@pytest.mark.parametrize("last, ends", [(0, False), (4, True), (5, True), (6, False)])
def test_a_training_has_ended_at_its_last_update_if_there_is_one(last, ends):
    trainer = MagicMock(spec=Trainer, checkpoint_suffix="", cfg=MagicMock(), task=MagicMock())
    trainer.cfg.optimization.max_update, trainer.get_num_updates.return_value = last, 5
    trainer.load_checkpoint.return_value = {"train_iterator": {"epoch": 2}}
    _, epochs = checkpoint_utils.load_checkpoint(CheckpointConfig(), trainer)
    assert (epochs is not trainer.get_train_iterator.return_value) == ends


def test_the_clock_of_a_resumed_training_runs():
    """The meter that `wall` is read from: restored without resumed_clock, its time is 0 for ever."""
    meters = MetersDict()
    meters.add_meter("wall", StopwatchMeter(round=0), 790)
    meters["wall"].start()
    restored = MetersDict()
    restored.load_state_dict(meters.state_dict())
    time.sleep(0.01)
    assert 0.01 <= restored["wall"].elapsed_time < 60


def test_a_clock_that_is_started_and_stopped_counts_what_is_between():
    """train_wall, the other one: the time between two trainings does not count."""
    meter = StopwatchMeter()
    meter.load_state_dict({"sum": 5.0, "n": 2, "round": None})
    meter.start()
    meter.stop()
    assert 5 <= meter.sum < 5.01 and meter.n == 3


def test_a_finetuning_has_the_time_that_it_needs(data, checkpoint, tmp_path):
    """Without time_of_a_finetuning, a model that was trained for longer than --stop-time-hours gets one update."""
    state = safe_torch_load(checkpoint)
    state["extra_state"]["previous_training_time"] = 7200
    torch.save(state, long := tmp_path / "long.pt")
    options = ["--finetune-from-model", long, "--stop-time-hours", 1, "--max-update", 3]
    assert sorted(losses(train(data, tmp_path / "new", *options))) == [1, 2, 3]
    skipped = train(data, tmp_path / "old", *options, LIGHTCONV_SKIP_PATCHES="time_of_a_finetuning")
    assert sorted(losses(skipped)) == [1]


# ------------------------------------------------------------------------------------------------ scores


PLATEAU = "--lr-scheduler reduce_lr_on_plateau --lr-threshold 0.9 --lr-patience 1".split()  # no score is better


def rates(log):
    return {float(rate) for rate in re.findall(r'train_inner\b.*?"lr": "([^"]+)"', log)}


def test_a_plateau_goes_on_when_a_training_is_resumed(data, tmp_path):
    """The rate falls after the second epoch without a better score. Without resumed_plateau, that is the fourth."""
    train(data, tmp_path, *PLATEAU, "--max-epoch", 3)
    shutil.copytree(tmp_path, tmp_path / "skipped")
    command = [*PLATEAU, "--max-epoch", 4]
    assert rates(train(data, tmp_path, *command)) == {0.001}
    skipped = train(data, tmp_path / "skipped", *command, LIGHTCONV_SKIP_PATCHES="resumed_plateau")
    assert rates(skipped) == {0.01}


def test_patience_goes_on_when_a_training_is_resumed(data, tmp_path):
    """The model stays as it is: its first score is the best. Without best_scores three others follow in any case."""
    command = ["--lr", 0, "--patience", 3]
    one_epoch = max(losses(train(data, tmp_path, *command, "--max-epoch", 3))) // 3
    shutil.copytree(tmp_path, tmp_path / "skipped")
    assert len(losses(train(data, tmp_path, *command, "--max-epoch", 9))) == one_epoch
    assert losses(train(data, tmp_path, *command, "--max-epoch", 9)) == {}  # it has ended
    skipped = train(data, tmp_path / "skipped", *command, "--max-epoch", 9, LIGHTCONV_SKIP_PATCHES="best_scores")
    assert len(losses(skipped)) == 4 * one_epoch


def test_the_next_training_of_a_process_has_no_scores_yet():
    """As with hydra's --multirun."""
    from fairseq_cli.train import should_stop_early

    should_stop_early.best, should_stop_early.num_runs = 1.0, 2
    checkpoint_utils.save_checkpoint.best = 1.0
    trainer = MagicMock(checkpoint_suffix="")
    trainer.load_checkpoint.return_value = None
    checkpoint_utils.load_checkpoint(CheckpointConfig(), trainer)
    assert not vars(should_stop_early) and not vars(checkpoint_utils.save_checkpoint)


# ------------------------------------------------------------------------------------------------ batches


LENGTHS = np.array([3, 2, 3, 2, 3, 3, 2, 4] * 5)


class Task(LegacyFairseqTask):
    """A task whose batches are kept over epochs, or not."""

    def __init__(self, kept=True):
        super().__init__(args=None)
        self.kept = kept

    def can_reuse_epoch_itr(self, dataset):
        return self.kept


def batches(epoch, kept=True, get=FairseqTask.get_batch_iterator, seed=1, **options):
    """The batches that a training has which begins, or is resumed, in this epoch."""
    words = Dictionary()
    sentences = [[words.add_symbol(f"w{number}_{i}") for i in range(n)] for number, n in enumerate(LENGTHS)]
    dataset = LanguagePairDataset(sentences, LENGTHS, words, shuffle=True)
    iterator = get(Task(kept), dataset, max_sentences=4, seed=seed, epoch=epoch, **options)
    assert "ordered_indices" not in vars(dataset)
    return [list(map(int, batch)) for batch in iterator.frozen_batches]


def test_a_resumed_training_has_the_batches_of_the_first_epoch():
    assert batches(3) == batches(1) == batches(7)
    assert batches(1) != batches(1, seed=2)


def test_without_resumed_batches_fairseq_makes_others():
    """What the patch is for; and its first epoch is as it was."""
    patched = FairseqTask.get_batch_iterator
    if not hasattr(patched, "__wrapped__"):
        assert "numpy_seed(seed)" in inspect.getsource(patched)
        pytest.skip("this fairseq draws by the seed alone")
    assert batches(3, get=patched.__wrapped__) != batches(1, get=patched.__wrapped__)
    assert batches(1, get=patched.__wrapped__) == batches(1)


@pytest.mark.parametrize(
    "options", [{"kept": False}, {"disable_iterator_cache": True}, {"update_epoch_batch_itr": True}], ids=str
)
def test_batches_that_are_made_anew_every_epoch_stay_so(options):
    if not hasattr(FairseqTask.get_batch_iterator, "__wrapped__"):
        pytest.skip("this fairseq draws by the seed alone")
    assert batches(3, **options) != batches(1, **options)


def epoch_of(batches, processes=1):
    """An epoch of a hundred sentences in so many batches, for the first of so many processes."""
    sampler = [list(part) for part in np.array_split(np.arange(100), batches)]
    words = Dictionary()
    dataset = LanguagePairDataset([words.encode_line("a", add_if_not_exist=True)] * 100, np.full(100, 2), words)
    return iterators.EpochBatchIterator(dataset, dataset.collater, sampler, num_shards=processes)


@pytest.mark.parametrize(
    "before, after, left",
    [((50, 1), (50, 1), 20), ((50, 1), (10, 1), 4), ((10, 1), (50, 1), 20), ((50, 1), (50, 5), 4)],
    ids=["as-before", "larger-batches", "smaller-batches", "more-processes"],
)
def test_an_epoch_is_resumed_at_the_same_part(before, after, left):
    """Three fifths are done. Without resumed_place, 30 batches of 10 would be: fairseq refuses."""
    first, second = epoch_of(*before), epoch_of(*after)
    batches = first.next_epoch_itr(shuffle=False)
    for _ in range(len(first) * 3 // 5):
        next(batches)
    second.load_state_dict(first.state_dict())
    assert len(list(second.next_epoch_itr(shuffle=False))) == left


def test_a_checkpoint_without_the_number_of_batches_is_resumed_as_fairseq_does():
    iterator = epoch_of(10)
    iterator.load_state_dict({"version": 2, "epoch": 3, "iterations_in_epoch": 4, "shuffle": False})
    assert (iterator.epoch, iterator.iterations_in_epoch) == (3, 4)


def orders(resumed=False):
    """The batches of the second and the third epoch, after a first one that is not shuffled."""
    words = Dictionary()
    dataset = LanguagePairDataset([words.encode_line("a", add_if_not_exist=True)] * 40, np.full(40, 2), words)
    epochs = Task().get_batch_iterator(dataset, max_sentences=4)
    if resumed:
        epochs.load_state_dict({"version": 2, "epoch": 2, "iterations_in_epoch": 0})
    else:
        list(epochs.next_epoch_itr(shuffle=False))
    return [[batch["id"].tolist() for batch in epochs.next_epoch_itr()] for _ in range(2)]


def test_batches_are_shuffled_after_the_end_of_the_curriculum():
    """Without end_of_the_curriculum they are not, except in a training that is resumed."""
    second, third = orders()
    assert second != third
    assert [second, third] == orders(resumed=True)


# ------------------------------------------------------------------------------------------------ optimizers


ADAM = {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "use_old_adam": True, "fp16_adam_stats": False}
OPTIMIZERS = {"adam": ADAM, "nag": {"momentum": 0.9}, "adafactor": {
    "adafactor_eps": "(1e-30, 1e-3)", "clip_threshold": 1.0, "decay_rate": -0.8, "beta1": None, "scale_parameter": True,
    "relative_step": False, "warmup_init": False}}  # fmt: skip


def optimizer(name, *shapes):
    """fairseq's optimizer after an update of parameters of these shapes."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    settings = {"optimizer": name, "lr": [0.1], "weight_decay": 0.0, "tpu": False, **OPTIMIZERS[name]}
    made = optim.build_optimizer(Namespace(**settings), parameters)
    made.step()
    return made


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_parameters_are_resumed(name):
    saved = optimizer(name, (4, 3), (3,)).state_dict()
    again = optimizer(name, (4, 3), (3,))
    again.load_state_dict(saved, {"lr": 0.5})
    assert again.get_lr() == 0.5


@pytest.mark.parametrize("name", ["adam", "nag"])
def test_parameters_of_another_order_are_named(name):
    saved = optimizer(name, (2,), (4, 3), (3, 3)).state_dict()
    said = r"for other parameters: the shape of its parameter 2 is \(4, 3\), but the model's is \(3, 3\); use --reset"
    with pytest.raises(ValueError, match=said):
        optimizer(name, (2,), (3, 3), (4, 3)).load_state_dict(saved)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_number_of_parameters_is_named(name):
    saved = optimizer(name, (4, 3), (3,)).state_dict()
    said = "for 2 parameters, but the model has 1; use --reset-optimizer"
    with pytest.raises(ValueError, match=said):
        optimizer(name, (4, 3)).load_state_dict(saved)


def test_without_optimizer_state_another_order_fails_in_the_first_update(monkeypatch):
    original = unpatched(optim.FairseqOptimizer.load_state_dict)
    monkeypatch.setattr(optim.FairseqOptimizer, "load_state_dict", original)
    other = optimizer("adam", (3, 3), (4, 3))
    other.load_state_dict(optimizer("adam", (4, 3), (3, 3)).state_dict())
    with pytest.raises(RuntimeError, match="must match the size"):
        other.step()


OUTPUT, OLD_OUTPUT = "decoder.output_projection.weight", "decoder.embed_out"


@pytest.fixture
def trainer(monkeypatch):
    """Makes fairseq's Trainer for a small model, which --fp16 updates in one row, here on the CPU."""

    def in_a_row(cls, args, parameters, flatten=True):
        return {None: torch.nn.Parameter(torch.cat([p.data.float().flatten() for p in parameters]))}

    monkeypatch.setattr(FP16Optimizer, "build_fp32_params", classmethod(in_a_row))
    task = systems.task(systems.dictionary(30))

    def made(dtype):
        model = build(task_=task)
        model.encoder.layers[0].fc1.weight.requires_grad_(False)  # of no optimizer
        return trainers.trainer(model, task, torch.device("cpu"), dtype)

    return made


def written_by_0_12_2(trainer, path, rows=None):
    """A checkpoint of its model, whose output comes before the decoder's other parameters: (its path, moments)."""
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(str(path), {"train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 1}})
    state = safe_torch_load(path)
    state["model"][OLD_OUTPUT] = state["model"].pop(OUTPUT)
    trained = [(name, value) for name, value in trainer.get_model().named_parameters() if value.requires_grad]
    moments = {name: torch.rand(value.shape) for name, value in trained}
    order = [name for name in moments if name != OUTPUT]
    order.insert(order.index("decoder.embed_tokens.weight"), OUTPUT)
    saved = [moments[name] for name in order]
    if trainer.cfg.common.fp16:
        saved = torch.cat([moment.flatten() for moment in saved]).split(rows or 10**9)
    optimizer = state["last_optimizer_state"]
    optimizer["state"] = {i: {"step": 3, "exp_avg": value, "exp_avg_sq": value} for i, value in enumerate(saved)}
    optimizer["param_groups"][0]["params"] = list(optimizer["state"])
    torch.save(state, path)
    return str(path), moments


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_moments_stay_with_their_parameters(dtype, trainer, tmp_path):
    """Without optimizer_order, those of --fp16 are of others after the encoder, and nothing is said."""
    resumed = trainer(dtype)
    path, moments = written_by_0_12_2(resumed, tmp_path / "old.pt")
    resumed.load_checkpoint(path)
    [group] = resumed.optimizer.optimizer.param_groups
    found = [resumed.optimizer.optimizer.state[p]["exp_avg"] for p in group["params"]]
    assert len(found) == (1 if dtype == "float16" else len(moments))
    wanted = torch.cat([moment.flatten() for moment in moments.values()])
    assert torch.equal(torch.cat([moment.flatten() for moment in found]), wanted)


def test_moments_that_cannot_be_told_apart_are_refused(trainer, tmp_path):
    """As in several rows, for several devices."""
    resumed = trainer("float16")
    path, _ = written_by_0_12_2(resumed, tmp_path / "old.pt", rows=5000)
    with pytest.raises(
        ValueError, match=r"cannot be reordered: it has . parameters, .*; give .*; otherwise use --reset-opt"
    ):
        resumed.load_checkpoint(path)
    resumed.load_checkpoint(path, reset_optimizer=True)


# ------------------------------------------------------------------------------------------------ half precision


def trained(data, folder, updates, **environment):
    """The checkpoint of a training with bfloat16 that is started, or resumed, and stopped after so many updates."""
    train(data, folder, "--bf16", "--cpu", "--max-update", updates, "--seed", 3, **environment)
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


def test_a_resumed_training_in_half_precision_continues_from_the_float32_parameters(data, tmp_path):
    whole = trained(data, tmp_path / "whole", 6)
    trained(data, tmp_path / "parts", 3)
    shutil.copytree(tmp_path / "parts", tmp_path / "rounded")
    parts = trained(data, tmp_path / "parts", 6)
    for name, value in whole["model"].items():
        assert torch.equal(value, parts["model"][name]), name
    saved, again = (state["last_optimizer_state"]["fp32_params"] for state in (whole, parts))
    assert all(map(torch.equal, saved, again))
    assert any((full.bfloat16() != full).any() for full in saved)  # more than the model holds

    # fairseq without the patch resumes from such a checkpoint too, though with rounded parameters, and from its own
    # the plugin does.
    rounded = trained(data, tmp_path / "rounded", 6, LIGHTCONV_SKIP_PATCHES="float32_parameters")
    assert "fp32_params" not in rounded["last_optimizer_state"]
    assert any(not torch.equal(value, rounded["model"][name]) for name, value in whole["model"].items())
    trained(data, tmp_path / "rounded", 7)


@pytest.mark.parametrize("flat", [False, True])
def test_the_models_own_parameters_win_where_the_saved_ones_are_not_theirs(flat):
    """A model may be changed, averaged for example, while the state of its optimizer stays."""
    torch.manual_seed(1)
    half = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((5, 3), (4,))]

    def made():
        if flat:
            kept = {None: torch.nn.Parameter(torch.cat([p.data.float().flatten() for p in half]))}
        else:
            kept = [torch.nn.Parameter(p.data.float()) for p in half]
        mixin = type("Optimizer", (FP16Optimizer,), {"has_flat_params": flat, "__init__": lambda self: None})()
        mixin.fp16_params, mixin.fp32_params, mixin.scaler = half, kept, None
        mixin.fp32_optimizer = MagicMock(state_dict=lambda: {"state": {}, "param_groups": []})
        return mixin

    first = made()
    for full in first.fp32_params.values() if flat else first.fp32_params:
        full.data.mul_(1 + 2**-12)  # rounds to the same
    state = first.state_dict()
    half[1].data[2] = 7.0
    second = made()
    second.load_state_dict(state)
    read = as_parameters(second)
    assert torch.equal(read[0], as_parameters(first)[0]) and not torch.equal(read[0], half[0].float())
    assert read[1][2] == 7.0 and torch.equal(read[1][:2], as_parameters(first)[1][:2])
    assert "fp32_params" in state and "fp32_params" not in second.fp32_optimizer.load_state_dict.call_args.args[0]
    second.load_state_dict({"state": {}, "param_groups": [], "fp32_params": [torch.zeros(2)]})  # of another model
    assert torch.equal(as_parameters(second)[0], read[0])
