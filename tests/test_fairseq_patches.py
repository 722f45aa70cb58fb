"""Every patch of fairseq_patches.py, on fairseq's own tiny Transformer.

A command runs twice: with the patches it must work; without the one under test (LIGHTCONV_SKIP_PATCHES) it must fail
the way the patch says, so that a patch which nobody needs any more shows. GPUs are hidden from all of them.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections import OrderedDict
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from tests.fairseq_cli import REPOSITORY, USER_DIR, binarise, run

pytest.importorskip("fairseq", reason="fairseq is not installed")

from lightconv_plugin import fairseq_patches
from lightconv_plugin.checkpoints.loading import safe_torch_load

PLUGIN = ["--user-dir", str(USER_DIR)]
RECIPE = "--optimizer adam --lr 0.01 --max-tokens 100 --num-workers 0 --log-format json --log-interval 1".split()
TRANSFORMER = (
    "--arch transformer --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-layers 1"
    " --encoder-attention-heads 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-layers 1"
    " --decoder-attention-heads 2 --dropout 0 --no-epoch-checkpoints"
).split()
LANGUAGE_MODEL = (
    "--task language_modeling --tokens-per-sample 20 --sample-break-mode eos --arch transformer_lm"
    " --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-layers 1 --decoder-attention-heads 2"
).split()
BLEU = ["--eval-bleu", "--eval-bleu-args", '{"beam": 2, "max_len_b": 12}']
TWO = ["--distributed-world-size", 2]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Data-bin for translation, and beside it its English side for language models."""
    folder = binarise(tmp_path_factory.mktemp("corpus"))
    english = folder.parent / "english"
    english.mkdir()
    shutil.copy(folder / "dict.en.txt", english / "dict.txt")
    for split in "train", "valid", "test":
        for suffix in "bin", "idx":
            shutil.copy(folder / f"{split}.de-en.en.{suffix}", english / f"{split}.{suffix}")
    return folder


def train(data, save_dir, *options, **environment) -> str:
    return run(
        "train", data, *PLUGIN, *TRANSFORMER, *RECIPE, "--save-dir", save_dir, *options, **NO_GPU, **environment
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(data, tmp_path_factory):
    """A checkpoint of four updates that holds all a fairseq checkpoint can: a Namespace, and numpy's BLEU counts."""
    folder = tmp_path_factory.mktemp("run")
    train(data, folder, *BLEU, "--max-update", 4)
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def old_checkpoint(checkpoint, tmp_path_factory):
    """`checkpoint` as fairseq 0.6 to 0.9 under numpy 1 wrote it: torch's old format, `args`, pickled meters."""
    state = safe_torch_load(checkpoint)
    state["args"] = state.pop("cfg")["model"]
    state["last_optimizer_state"] = None
    meters = ModuleType("fairseq.meters")
    for name in "AverageMeter", "TimeMeter", "StopwatchMeter":
        setattr(meters, name, type(name, (), {"__module__": "fairseq.meters"}))
    train_loss = meters.AverageMeter()
    train_loss.val = train_loss.avg = np.float64(5.0)
    saved = OrderedDict(train_loss=train_loss, wps=meters.TimeMeter(), train_wall=meters.StopwatchMeter())
    state["extra_state"] = {"train_meters": saved, "val_loss": np.float64(5.0), "epoch": 1}
    path = tmp_path_factory.mktemp("old") / "checkpoint_old.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fairseq.meters", meters)
        torch.save(state, path, _use_new_zipfile_serialization=False)
    written = path.read_bytes()
    assert b"fairseq.meters\nAverageMeter" in written
    path.write_bytes(written.replace(b"numpy._core.multiarray\n", b"numpy.core.multiarray\n"))
    return path


def losses(log: str) -> dict[int, float]:
    """Update number -> training loss."""
    lines = [json.loads(line) for line in re.findall(r"train_inner\b.*?(\{.*\})", log)]
    return {int(line["num_updates"]): float(line["loss"]) for line in lines}


def is_applied(letter: str) -> bool:
    return letter in {name.split()[0] for name, _ in fairseq_patches.applied()}


def check_needed(letter: str, message: str, command) -> None:
    """`command(environment)` without the patch: fails with `message`, or works where the patch was not applied."""
    if is_applied(letter):
        assert re.search(message, command(LIGHTCONV_SKIP_PATCHES=letter, fails=True))
        return
    command(LIGHTCONV_SKIP_PATCHES=letter)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy")}
    pytest.skip(f"works unpatched, and was left alone: {versions}")


ALL_AT_ONCE = [*BLEU, "--bf16", "--num-batch-buckets", 3, "--reset-optimizer", "--max-update", 6, "--restore-file"]


def test_resume_in_bf16_with_buckets_and_bleu(data, checkpoint, tmp_path):
    """A, C, D and E in one training."""
    assert max(losses(train(data, tmp_path, *ALL_AT_ONCE, checkpoint))) == 6


@pytest.mark.parametrize(
    "letter, message",
    [
        pytest.param("A", "Weights only load failed", id="A-resume"),
        pytest.param("C", r"attribute 'compat'|compat. was removed", id="C-buckets"),
        pytest.param("D", "interpolation", id="D-buckets"),
        pytest.param("E", "xla_device", id="E-bf16"),
    ],
)
def test_that_training_without(data, checkpoint, tmp_path, letter, message):
    check_needed(letter, message, lambda **e: train(data, tmp_path, *ALL_AT_ONCE, checkpoint, **e))


def test_language_model_by_sentence(data, tmp_path):
    """C again: train and evaluate with one sentence per sample."""
    english = data.parent / "english"
    run(
        "train", english, *PLUGIN, *LANGUAGE_MODEL, *RECIPE, "--max-update", 2, "--save-dir", tmp_path, **NO_GPU
    )  # fmt: skip
    options = ["--path", tmp_path / "checkpoint_last.pt", "--sample-break-mode", "eos"]
    log = run("eval-lm", english, *PLUGIN, *options, **NO_GPU)
    assert float(re.search(r"Perplexity: ([\d.]+)", log)[1]) > 1


def generate(data, checkpoint, **environment) -> str:
    return run("generate", data, *PLUGIN, "--path", checkpoint, "--beam", 2, **NO_GPU, **environment)


def test_checkpoint_of_2019_translates_every_sentence(data, old_checkpoint):
    """A, I and J together."""
    log = generate(data, old_checkpoint)
    assert len(re.findall(r"^H-\d+\t", log, re.M)) == 12
    assert "Generate test with beam=2: BLEU4" in log


@pytest.mark.parametrize(
    "letter, message",
    [
        pytest.param("A", "Weights only load failed", id="A-old-checkpoint"),
        pytest.param("I", "Mask Type should be defined", id="I-encoder"),
    ],
)
def test_that_generation_without(data, old_checkpoint, letter, message):
    check_needed(letter, message, lambda **e: generate(data, old_checkpoint, **e))


def test_that_generation_without_whole_epochs_drops_sentences(data, old_checkpoint):
    """J: the twelve sentences of the test set are a batch of eight and one of four."""
    log = generate(data, old_checkpoint, LIGHTCONV_SKIP_PATCHES="J")
    assert len(re.findall(r"^H-\d+\t", log, re.M)) == (8 if is_applied("J") else 12)


def test_a_training_that_has_ended_stays_as_it_is(data, checkpoint, tmp_path):
    """M: fairseq trains one update more each time that the same command is given again."""
    shutil.copy(checkpoint, tmp_path)

    def again(**environment):
        return train(data, tmp_path, "--max-update", 4, **environment)

    log = again()
    assert "already has 4 updates" in log and "done training" in log
    assert losses(log) == {}
    assert (tmp_path / checkpoint.name).read_bytes() == checkpoint.read_bytes()
    assert sorted(losses(again(LIGHTCONV_SKIP_PATCHES="M"))) == [5]


def test_a_checkpoint_that_runs_a_command_is_refused(tmp_path):
    """A widens what may be loaded, not to code: neither a system call nor Python's own eval."""
    from fairseq import checkpoint_utils

    class Payload:
        def __init__(self, function, argument):
            self.call = (function, (argument,))

        def __reduce__(self):
            return self.call

    trace = tmp_path / "ran"
    for payload in (
        Payload(os.system, f"touch '{trace}'"),
        Payload(eval, f"open({str(trace)!r}, 'w')"),
        argparse.Namespace(arch=Payload(os.system, f"touch '{trace}'")),
    ):
        path = tmp_path / "checkpoint.pt"
        torch.save({"args": payload, "model": {}}, path)
        with pytest.raises(Exception, match="Weights only load failed"):
            checkpoint_utils.load_checkpoint_to_cpu(str(path))
        assert not trace.exists()


def test_bf16_when_the_parser_is_already_running():
    """E holds for arguments that fairseq's parser has already marked as a TPU's, but not for a real --tpu."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    for flags, on_tpu in (["--bf16"], False), (["--tpu"], True):
        parser = options.get_training_parser()
        arguments = options.parse_args_and_arch(parser, ["data", *TRANSFORMER, "--optimizer", "adam", *flags])
        assert arguments.tpu
        config = convert_namespace_to_omegaconf(arguments)
        assert config.common.tpu == on_tpu
        assert config.common.bf16 != on_tpu


@pytest.mark.long
def test_two_workers_equal_two_batches_per_update(data, tmp_path):
    """F and H: plain --distributed-world-size 2, stopped and resumed (B), against one process; fails without each."""
    batches = ["--batch-size", 4, "--required-batch-size-multiple", 1]  # 15 of them: the last update has only one
    one = losses(train(data, tmp_path / "one", *batches, "--update-freq", 2, "--max-update", 8))
    first = train(data, tmp_path / "two", *batches, *TWO, "--max-update", 4)
    second = train(data, tmp_path / "two", *batches, *TWO, "--max-update", 8)
    assert "Loaded checkpoint" in second
    two = losses(first) | losses(second)
    assert sorted(two) == sorted(one) == list(range(1, 9))
    assert [two[update] for update in sorted(two)] == pytest.approx([one[update] for update in sorted(one)], abs=1e-3)

    for letter, message in ("F", "available devices"), ("H", "device_ids"), ("B", "DictConfig"):
        check_needed(letter, message, lambda **e: train(data, tmp_path / "two", *TWO, "--max-update", 9, **e))


def test_init_method_starts_all_workers(data, tmp_path):
    """F: fairseq exits 0 having done nothing."""
    options = [*TWO, "--distributed-init-method", f"file://{tmp_path}/rendezvous", "--max-update", 2]
    assert losses(train(data, tmp_path / "without", *options, LIGHTCONV_SKIP_PATCHES="F")) == {}
    assert not (tmp_path / "without").exists()
    assert sorted(losses(train(data, tmp_path / "with", *options))) == [1, 2]


@pytest.mark.parametrize("skipped, trainings", [("", 1), ("F", 2)], ids=["with-F", "without-F"])
def test_torchrun(data, tmp_path, skipped, trainings):
    """F: without it each of the two workers trains alone."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["fairseq_cli.train", data, *PLUGIN, *TRANSFORMER, *RECIPE, "--no-save", "--max-update", 2]
    process = subprocess.run(
        [*map(str, command), "--ddp-backend", "legacy_ddp"],
        cwd=tmp_path,  # fairseq makes its folder of checkpoints all the same
        env={**os.environ, **NO_GPU, "OMP_NUM_THREADS": "1", "LIGHTCONV_SKIP_PATCHES": skipped},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if skipped and process.returncode:  # fairseq 0.12.2 joins them, with a backend for GPUs
        assert "nccl" in process.stderr.lower()
        return
    assert process.returncode == 0, process.stderr[-6000:]
    log = process.stdout + process.stderr
    assert len(re.findall(r"train_inner\b.*\"num_updates\": \"2\"", log)) == trainings
    assert ("initialized host" in log) == (trainings == 1)


@pytest.mark.long
def test_validation_with_two_workers(data, checkpoint):
    """G: two workers find the loss that the training found with one."""

    def validate(**environment):
        return run(
            "validate", data, *PLUGIN, *TWO, "--task", "translation", "--path", checkpoint, "--batch-size", 3,
            "--required-batch-size-multiple", 1, "--log-format", "simple", **NO_GPU, **environment,
        )  # fmt: skip

    best = safe_torch_load(checkpoint)["extra_state"]["best"]
    assert float(re.search(r"subset \| loss ([\d.]+)", validate())[1]) == pytest.approx(best, abs=1e-3)
    check_needed("G", "torch.cuda.ByteTensor", validate)


def test_hydra_train_with_two_workers(data, tmp_path):
    """F comes too late for fairseq-hydra-train, unless the plugin is imported first, as fairseq_patches.py says."""
    config = {
        "common": {"user_dir": str(USER_DIR), "log_interval": 1, "log_format": "json"},
        "task": {"_name": "language_modeling", "data": str(data.parent / "english"), "tokens_per_sample": 20},
        "model": {"_name": "transformer_lm", "decoder_embed_dim": 16, "decoder_ffn_embed_dim": 16, "decoder_layers": 1},
        "criterion": {"_name": "cross_entropy"},
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "fixed"},
        "optimization": {"lr": [0.01], "max_update": 2},
        "dataset": {"max_tokens": 100, "num_workers": 0},
        "distributed_training": {"distributed_world_size": 2},
        "checkpoint": {"no_save": True},
    }
    (tmp_path / "two.yaml").write_text(json.dumps(config))  # JSON is YAML
    command = [f"--config-dir={tmp_path}", "--config-name=two", f"hydra.run.dir={tmp_path}/hydra"]
    process = subprocess.run(
        [sys.executable, "-c", "import lightconv_plugin, fairseq_cli.hydra_train as h; h.cli_main()", *command],
        env={**os.environ, **NO_GPU, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-6000:]
    assert sorted(losses(process.stdout + process.stderr)) == [1, 2]


def parallel(**changes) -> SimpleNamespace:
    """The part of a configuration that `call_main` reads, for two workers on the CPU."""
    settings = {
        "distributed_world_size": 2, "distributed_rank": 0, "distributed_init_method": None, "distributed_port": -1,
        "distributed_backend": "nccl", "distributed_no_spawn": False, "tpu": False, "pipeline_model_parallel": False,
        **changes,
    }  # fmt: skip
    common = SimpleNamespace(cpu=True, tpu=False)
    return SimpleNamespace(common=common, model=None, distributed_training=SimpleNamespace(**settings))


@pytest.mark.parametrize(
    "changes, tasks, message",
    [
        pytest.param({"distributed_rank": 1}, "1", "starts all 2 workers", id="rank-without-no-spawn"),
        pytest.param({}, "2", "starts all 2 workers", id="two-slurm-tasks"),
        pytest.param({"distributed_no_spawn": True}, "1", "needs --distributed-init-method", id="no-spawn-alone"),
    ],
)
def test_what_cannot_start_on_the_cpu_says_so(monkeypatch, changes, tasks, message):
    from fairseq.distributed import utils

    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
    with pytest.raises(ValueError, match=message):
        utils.call_main(parallel(**changes), pytest.fail)


def test_torchrun_does_not_split_an_evaluation(monkeypatch):
    from fairseq.distributed import utils

    for name, value in ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1"), ("WORLD_SIZE", "2"), ("RANK", "1"):
        monkeypatch.setenv(name, value)
    called = []
    config = parallel(distributed_world_size=1)
    utils.call_main(config, called.append)
    assert called == [config]
    assert config.distributed_training.distributed_world_size == 1


def test_encoder_layer_takes_any_mixer_and_holds_no_copies():
    """I: the layer of fairseq 0.12.2 is that of every other fairseq, and loads what it wrote itself."""
    from fairseq.models.transformer import TransformerConfig
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    class Layer(TransformerEncoderLayerBase):
        def build_self_attention(self, embed_dim, cfg):
            return torch.nn.Identity()

    config = TransformerConfig()
    config.encoder.embed_dim, config.encoder.ffn_embed_dim = 8, 12
    layer = Layer(config)
    names = {name.split(".")[0] for name in layer.state_dict()}
    assert names == {"self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"}
    assert not vars(layer.self_attn).keys() & {"q_proj", "out_proj"}
    assert "build_self_attention" not in vars(layer)
    if not is_applied("I"):
        pytest.skip("fairseq-fixed's layer: no copies, and it reads none")
    stored = {**layer.state_dict(), "fc1_weight": layer.fc1.weight, "in_proj_bias": torch.zeros(24)}
    layer.load_state_dict(stored, strict=True)
    with pytest.raises(RuntimeError, match="surprise"):
        layer.load_state_dict({**stored, "surprise": torch.zeros(1)}, strict=True)


SWISH = """
import torch, lightconv_plugin
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
config = TransformerConfig(activation_fn="swish")
config.encoder.embed_dim, config.encoder.ffn_embed_dim, config.encoder.attention_heads = 8, 12, 2
layer = TransformerEncoderLayerBase(config).eval()
x = torch.randn(5, 2, 8)
out = layer(x, None)
layer.activation_fn = lambda h: h * torch.sigmoid(h)
torch.testing.assert_close(out, layer(x, None))
"""


@pytest.mark.parametrize("skipped", ["", "K"])
def test_swish_is_a_function(skipped):
    """K: in fairseq's own layer; without the patch it makes a module of its input."""
    environment = {**os.environ, "LIGHTCONV_SKIP_PATCHES": skipped, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([sys.executable, "-c", SWISH], env=environment, capture_output=True, text=True, timeout=300)
    assert (result.returncode == 0) == (not skipped or not is_applied("K")), result.stderr[-2000:]


def test_applied_once_and_listed(monkeypatch):
    from fairseq.distributed import utils

    before = utils.call_main, utils._broadcast_object_slow, fairseq_patches.applied()
    fairseq_patches.apply()
    assert (utils.call_main, utils._broadcast_object_slow, fairseq_patches.applied()) == before
    listed = dict(fairseq_patches.applied())
    assert {"A safe_globals", "B broadcast_object", "F processes_without_gpu"} <= listed.keys()
    assert all(reason.endswith(".") and len(reason) > 40 for reason in listed.values())
    monkeypatch.setenv("LIGHTCONV_SKIP_PATCHES", "A, Z")
    with pytest.raises(ValueError, match="Z is not one of A, B"):
        fairseq_patches.apply()
