"""Several processes without a GPU."""

import json
import os
import re
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq", reason="fairseq is not installed")

import lightconv_plugin.models  # noqa: F401 (the patches)
from lightconv_plugin.checkpoints.loading import safe_torch_load
from lightconv_plugin.ops.instructions import instruction_set
from tests import programs
from tests.compat.fairseq_runs import NO_GPU, PLUGIN, RECIPE, TRANSFORMER, TWO, check_needed, losses, train
from tests.fairseq_cli import USER_DIR, run
from tests.warm_python import warm_python


@pytest.mark.long
def test_two_workers_equal_two_batches_per_update(data, tmp_path):
    """Plain --distributed-world-size 2, stopped and resumed, against one process; fails without each of three."""
    batches = ["--batch-size", 4, "--required-batch-size-multiple", 1]  # 15 of them: the last update has only one
    one = losses(train(data, tmp_path / "one", *batches, "--update-freq", 2, "--max-update", 8))
    first = train(data, tmp_path / "two", *batches, *TWO, "--max-update", 4)
    second = train(data, tmp_path / "two", *batches, *TWO, "--max-update", 8)
    assert "Loaded checkpoint" in second
    two = losses(first) | losses(second)
    assert sorted(two) == sorted(one) == list(range(1, 9))
    assert [two[update] for update in sorted(two)] == pytest.approx([one[update] for update in sorted(one)], abs=1e-3)

    for patch, message in (
        ("processes_without_gpu", "available devices"),
        ("ddp_without_gpu", "device_ids"),
        ("checkpoint_broadcast", "DictConfig"),
    ):
        check_needed(patch, message, lambda **e: train(data, tmp_path / "two", *TWO, "--max-update", 9, **e))


def test_init_method_starts_all_workers(data, tmp_path):
    """Without processes_without_gpu fairseq exits 0 having done nothing."""
    options = [*TWO, "--distributed-init-method", f"file://{tmp_path}/rendezvous", "--max-update", 2]
    assert losses(train(data, tmp_path / "without", *options, LIGHTCONV_SKIP_PATCHES="processes_without_gpu")) == {}
    assert not (tmp_path / "without").exists()
    assert sorted(losses(train(data, tmp_path / "with", *options))) == [1, 2]


@pytest.mark.parametrize("skipped, trainings", [("", 1), ("processes_without_gpu", 2)])
def test_torchrun(data, tmp_path, skipped, trainings):
    """Without processes_without_gpu each of the two workers trains alone."""
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["fairseq_cli.train", data, *PLUGIN, *TRANSFORMER, *RECIPE, "--no-save", "--max-update", 2]
    command += ["--ddp-backend", "legacy_ddp"]
    environment = {**NO_GPU, "OMP_NUM_THREADS": 1, "LIGHTCONV_SKIP_PATCHES": skipped}
    # fairseq makes its folder of checkpoints all the same.
    process = programs.run(*command, cwd=tmp_path, status=None, **environment)
    if skipped and process.returncode:  # fairseq 0.12.2 joins them, with a backend for GPUs
        assert "nccl" in process.stderr.lower()
        return
    assert process.returncode == 0, process.stderr[-6000:]
    log = process.stdout + process.stderr
    assert len(re.findall(r"train_inner\b.*\"num_updates\": \"2\"", log)) == trainings
    assert ("initialized host" in log) == (trainings == 1)


@pytest.mark.long
def test_validation_with_two_workers(data, checkpoint):
    """gather_without_gpu: two workers find the loss that the training found with one."""

    def validate(**environment):
        return run(
            "validate", data, *PLUGIN, *TWO, "--path", checkpoint, "--batch-size", 3,
            "--required-batch-size-multiple", 1, "--log-format", "simple", **NO_GPU, **environment,
        )  # fmt: skip

    best = safe_torch_load(checkpoint)["extra_state"]["best"]
    assert float(re.search(r"subset \| loss ([\d.]+)", validate())[1]) == pytest.approx(best, abs=1e-3)
    check_needed("gather_without_gpu", "torch.cuda.ByteTensor", validate)


def test_hydra_train_with_two_workers(data, tmp_path):
    """processes_without_gpu is too late for fairseq-hydra-train unless the plugin is imported first (compat/)."""
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
    # This process is a new one; those that it starts need not be.
    program = f"import multiprocessing; multiprocessing.set_executable({warm_python()!r});"
    program += "import lightconv_plugin, fairseq_cli.hydra_train as h; h.cli_main()"
    process = programs.run(sys.executable, "-c", program, *command, **NO_GPU, OMP_NUM_THREADS=1)
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


@pytest.mark.parametrize("workers, share", [(2, "3"), (8, "1")])
def test_workers_share_the_cores_that_this_process_may_use(workers, share, monkeypatch):
    from fairseq.distributed import utils

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr("torch.multiprocessing.spawn", lambda *args, **options: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OMP_NUM_THREADS")
    config = parallel(distributed_world_size=workers, distributed_port=29501)
    utils.call_main(config, pytest.fail)
    assert os.environ["OMP_NUM_THREADS"] == share
    assert config.distributed_training.distributed_init_method == "tcp://localhost:29501"


def test_torchrun_does_not_split_an_evaluation(monkeypatch):
    from fairseq.distributed import utils

    for name, value in ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1"), ("WORLD_SIZE", "2"), ("RANK", "1"):
        monkeypatch.setenv(name, value)
    called = []
    config = parallel(distributed_world_size=1)
    utils.call_main(config, called.append)
    assert called == [config]
    assert config.distributed_training.distributed_world_size == 1


FAULTS = """
import resource
import fairseq, torch, lightconv_plugin
torch.set_num_threads(1)
count = []
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
    count.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*count)
"""


@pytest.mark.parametrize(
    "skipped, message",
    [
        ("", r"common.fp16 \(--fp16\) needs a GPU, and torch sees none"),
        ("fp16_without_gpu", "CUDA|NVIDIA driver"),  # torch without CUDA, or with it and no driver
    ],
)
def test_fp16_needs_a_gpu(data, tmp_path, skipped, message):
    log = train(data, tmp_path, "--fp16", "--max-update", 1, LIGHTCONV_SKIP_PATCHES=skipped, fails=True)
    assert re.search(message, log.strip().splitlines()[-1])


@pytest.mark.skipif(instruction_set() is None, reason="the processor has neither AVX2 nor AVX-512")
@pytest.mark.parametrize("skipped", ["", "bf16_without_avx512"])
def test_bf16_is_warned_about_where_it_is_slow(data, tmp_path, skipped):
    limited = {"LIGHTCONV_CPU_ISA": "avx2", "LIGHTCONV_SKIP_PATCHES": skipped}
    warning = "with AVX2 alone, common.bf16 (--bf16) makes a training more than ten times as slow"
    assert (warning in train(data, tmp_path / "bf16", "--bf16", "--max-update", 1, **limited)) == (not skipped)
    assert warning not in train(data, tmp_path / "float32", "--max-update", 1, **limited)


@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="the C library is not glibc")
@pytest.mark.parametrize("skipped", ["", "freed_memory_without_gpu"])
def test_freed_memory_is_kept_without_any_kernel_of_ours(skipped):
    """A model of fairseq's own: without freed_memory_without_gpu every block of 64 MiB is mapped page by page."""
    own = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LIGHTCONV_KEEP_MALLOC")
    environment = {**dict.fromkeys(own), **NO_GPU, "LIGHTCONV_SKIP_PATCHES": skipped}
    done = programs.run(warm_python(), "-c", FAULTS, **environment)
    faults = [int(count) for count in done.stdout.split()]
    pages = (64 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert (min(faults[-5:]) > 0.9 * pages) if skipped else (max(faults[-5:]) < 0.1 * pages)
