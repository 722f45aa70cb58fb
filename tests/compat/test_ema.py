"""--store-ema: the moving average is the whole model, and it starts where the training does."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.checkpoint_utils import save_ema_as_checkpoint
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema import EMA
from fairseq.models.transformer import TransformerConfig, TransformerModelBase
from fairseq.trainer import Trainer

import lightconv_plugin.models  # noqa: F401 (the patches)
from benchmarks import systems, trainers
from lightconv_plugin.checkpoints.loading import safe_torch_load
from tests.models.toys import batch, build, task

NORMS = {"encoder_normalize_before": True, "decoder_normalize_before": True}


def fairseqs_transformer(shared=False):
    config = TransformerConfig()
    config.share_all_embeddings = shared
    for side in (config.encoder, config.decoder):
        side.embed_dim, side.ffn_embed_dim, side.layers, side.attention_heads = 16, 24, 2, 2
        side.normalize_before = True
    config.decoder.input_dim = config.decoder.output_dim = 16
    return TransformerModelBase.build_model(config, task()).eval()


def perturb(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)


@pytest.mark.parametrize(
    "make, ema_fp32",
    [
        (lambda: build(**NORMS), False),
        (lambda: build(**NORMS, share_all_embeddings=True), False),
        (fairseqs_transformer, False),
        (lambda: fairseqs_transformer(shared=True), False),
        (lambda: fairseqs_transformer(shared=True), True),
    ],
    ids=["plugin", "plugin-shared", "transformer", "shared", "shared-fp32"],
)
def test_the_average_is_torchs_with_its_final_norms(make, ema_fp32, tmp_path):
    """Without ema_final_norm, the encoder and the decoder of the average have none; without ema_once, shared embeddings
    are averaged over fewer updates. And it is the same when saved."""
    torch.manual_seed(1)
    model = make()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    averaged.update_parameters(model)
    ema = EMA(model, EMAConfig(store_ema=True, ema_decay=0.75, ema_fp32=ema_fp32))
    for _ in range(3):
        perturb(model)
        averaged.update_parameters(model)
        ema.step(model)
    inputs = batch()
    wanted = averaged.module(*inputs)[0]
    torch.testing.assert_close(ema.get_model()(*inputs)[0], wanted)

    torch.save({"extra_state": {"ema": ema.get_model().state_dict()}}, tmp_path / "checkpoint.pt")
    save_ema_as_checkpoint(str(tmp_path / "checkpoint.pt"), str(tmp_path / "ema.pt"))
    loaded = make()
    loaded.load_state_dict(safe_torch_load(tmp_path / "ema.pt")["model"], strict=True)
    torch.testing.assert_close(loaded(*inputs)[0], wanted)


def test_a_resumed_average_takes_every_nth_update_as_without_interruption():
    """Without ema_interval it takes other updates."""
    model = build()
    config = EMAConfig(store_ema=True, ema_decay=0.5, ema_update_freq=3)
    ema, resumed = EMA(model, config), EMA(model, config)
    for update in range(1, 7):
        perturb(model)
        ema.step(model, update)
        if update > 1:
            resumed.step(model, update)
    wanted, found = ema.get_model().state_dict(), resumed.get_model().state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("make", [lambda: build(**NORMS), fairseqs_transformer], ids=["plugin", "transformer"])
def test_an_average_that_has_lost_its_final_norms_gets_the_models(make, caplog):
    """As fairseq has saved it: with versions from before there were any."""
    model = make()
    ema, average = EMA(model, EMAConfig(store_ema=True, ema_decay=0.75)), model.state_dict()
    lost = [name for name in average if name.split(".")[1] == "layer_norm"]
    state = {name: value.clone() for name, value in average.items() if name not in lost}
    state |= {name: torch.ones_like(value) for name, value in state.items() if name.endswith(".version")}
    ema.restore(state)
    inputs = batch()
    torch.testing.assert_close(ema.get_model()(*inputs)[0], model(*inputs)[0])
    assert len(lost) == 4 and len(caplog.messages) == 2
    assert "has no encoder.layer_norm.weight: it starts from the model's" in caplog.messages[0]


def trainer(dtype, **ema):
    preset = systems.sized(systems.PRESETS["iwslt_de_en"], True, None, None)
    task = systems.task(systems.dictionary(preset.vocabulary))
    made = trainers.trainer(build(task_=task, **NORMS), task, torch.device("cpu"), dtype)
    made.cfg.ema.update(ema)
    made.train_step(systems.random_batches(preset, task.target_dictionary, 1))
    return made


def saved(trainer, path):
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(str(path), {"train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 1}})
    return str(path)


@pytest.mark.parametrize("dtype, ema_fp32", [("float32", False), ("bfloat16", True)])
def test_the_average_starts_from_a_checkpoint_that_has_none(dtype, ema_fp32, tmp_path):
    """Without ema_of_a_checkpoint_without: KeyError: 'model'."""
    path = saved(trainer(dtype), tmp_path / "checkpoint.pt")
    resumed = trainer(dtype, store_ema=True, ema_fp32=ema_fp32)
    perturb(resumed.ema.get_model())
    assert resumed.load_checkpoint(path)["train_iterator"]["epoch"] == 1
    model, average = resumed.get_model().state_dict(), resumed.ema.get_model().state_dict()
    assert average.keys() == model.keys() and all(torch.equal(average[name], model[name]) for name in model)
    assert all(torch.equal(value, model[name].float()) for name, value in resumed.ema.fp32_params.items())
    assert bool(resumed.ema.fp32_params) == ema_fp32 and resumed.cfg.ema.store_ema


@pytest.mark.parametrize("dtype, ema_fp32", [("float32", False), ("bfloat16", True)])
def test_a_saved_average_is_resumed(dtype, ema_fp32, tmp_path):
    first = trainer(dtype, store_ema=True, ema_fp32=ema_fp32, ema_decay=0.5)
    perturb(first.ema.get_model())
    for value in first.ema.fp32_params.values():
        value.add_(2**-12)
    wanted = copy.deepcopy((first.ema.get_model().state_dict(), first.ema.fp32_params))
    path = saved(first, tmp_path / "checkpoint.pt")
    resumed = trainer(dtype, store_ema=True, ema_fp32=ema_fp32, ema_decay=0.5)
    resumed.load_checkpoint(path)
    for found, kept in zip((resumed.ema.get_model().state_dict(), resumed.ema.fp32_params), wanted, strict=True):
        assert found.keys() == kept.keys() and all(torch.equal(found[name], kept[name]) for name in kept)


def test_a_training_that_starts_anew_has_its_average(tmp_path):
    made = trainer("float32", store_ema=True)
    assert Trainer.load_checkpoint(made, str(tmp_path / "none.pt")) is None and made.cfg.ema.store_ema
