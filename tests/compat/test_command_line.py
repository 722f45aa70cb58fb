"""Options of fairseq's commands that fail without a patch."""

import re

import pytest

pytest.importorskip("fairseq", reason="fairseq is not installed")

from argparse import ArgumentParser

import torch
from fairseq import options
from fairseq.data import Dictionary

import lightconv_plugin.models  # noqa: F401 (the patches)
from lightconv_plugin.checkpoints.loading import safe_torch_load
from tests.compat.fairseq_runs import NO_GPU, PLUGIN, TRANSFORMER, check_needed, is_applied
from tests.fairseq_cli import run
from tests.models.language_model_toys import build_lm, lm_task


def test_bf16_when_the_parser_is_already_running():
    """bf16_without_xla: for arguments that fairseq's parser has already marked as a TPU's, but not for a real --tpu."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    for flags, on_tpu in (["--bf16"], False), (["--tpu"], True):
        parser = options.get_training_parser()
        arguments = options.parse_args_and_arch(parser, ["data", *TRANSFORMER, "--optimizer", "adam", *flags])
        assert arguments.tpu
        config = convert_namespace_to_omegaconf(arguments)
        assert config.common.tpu == on_tpu
        assert config.common.bf16 != on_tpu


def validate(data, checkpoint, **environment) -> str:
    size = ["--max-tokens", 100, "--log-format", "simple"]
    return run("validate", data, *PLUGIN, "--path", checkpoint, *size, **NO_GPU, **environment)


def loss(log: str) -> float:
    return float(re.search(r"subset \| loss ([\d.]+)", log)[1])


def test_validate_without_a_task(data, checkpoint):
    best = safe_torch_load(checkpoint)["extra_state"]["best"]
    assert loss(validate(data, checkpoint)) == pytest.approx(best, abs=1e-3)
    check_needed("validate_without_task", "KeyError: None", lambda **e: validate(data, checkpoint, **e))


def test_validate_takes_the_task_of_the_checkpoint(data, language_model):
    """Translation is only the parser's default: a language model is validated as one."""
    log = validate(data.parent / "english", language_model)
    assert "'_name': 'language_modeling'" in log
    assert loss(log) == pytest.approx(safe_torch_load(language_model)["extra_state"]["best"], abs=1e-3)


def test_a_task_that_is_given_stays_and_a_parser_without_tasks_gets_none():
    given = ["data", "--path", "model.pt", "--task", "language_modeling"]
    assert options.parse_args_and_arch(options.get_validation_parser(), given).task == "language_modeling"
    overrides = options.parse_args_and_arch(options.get_validation_parser(), given[:3], suppress_defaults=True)
    assert not hasattr(overrides, "task")
    parser = ArgumentParser()
    parser.add_argument("--batch-size")
    parser.add_argument("--max-tokens")
    assert not hasattr(options.parse_args_and_arch(parser, []), "task")


def translated(data, checkpoint, shard: int, **environment) -> set[str]:
    """The numbers of the sentences of a shard of two."""
    options = ["--num-shards", 2, "--shard-id", shard, "--batch-size", 3, "--beam", 1, "--max-len-b", 5]
    log = run("generate", data, *PLUGIN, "--path", checkpoint, *options, **NO_GPU, **environment)
    return set(re.findall(r"^H-(\d+)\t", log, re.M))


def test_shards_of_generate(data, checkpoint):
    first, second = (translated(data, checkpoint, shard) for shard in (0, 1))
    assert len(first) == len(second) == 6 and len(first | second) == 12
    if is_applied("shards_of_generate"):
        assert len(translated(data, checkpoint, 1, LIGHTCONV_SKIP_PATCHES="shards_of_generate")) == 12


def test_shards_of_other_commands_are_not_processes():
    """fairseq-interactive would start them."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    given = ["data", "--path", "model.pt", "--num-shards", "2", "--shard-id", "1"]
    parsers = options.get_generation_parser(interactive=True), options.get_eval_lm_parser()
    for parser, task in zip(parsers, ("translation", "language_modeling"), strict=True):
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, [*given, "--task", task]))
        processes = cfg.distributed_training
        assert (processes.distributed_world_size, processes.distributed_rank) == (1, 0)


def test_bpe_of_eval_lm():
    """`--remove-bpe` alone joins "a@@ b": the loss is per word. fairseq-generate takes the option as it is."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq_cli.eval_lm import eval_lm

    task = lm_task()
    task.dictionary = task.source_dictionary = task.output_dictionary = task.target_dictionary = words = Dictionary()
    for word in ("a@@", "b", "c"):
        words.add_symbol(word)
    model, target = build_lm(task=task), torch.tensor([[4, 5, 6, 4, 4, 5, 2]])
    sample = {"id": torch.tensor([0]), "ntokens": 7, "target": target, "net_input": {"src_tokens": target.roll(1, 1)}}
    given = ["data", "--path", "model.pt", "--remove-bpe", "--task"]
    config = options.parse_args_and_arch(options.get_eval_lm_parser(), [*given, "language_modeling"])
    joined = convert_namespace_to_omegaconf(config).common_eval.post_process
    by_piece = eval_lm([model], words, [sample])["loss"]
    assert eval_lm([model], words, [sample], post_process=joined)["loss"] == pytest.approx(by_piece * 7 / 4)
    if is_applied("bpe_of_eval_lm"):
        assert eval_lm([model], words, [sample], post_process="subword_nmt")["loss"] == pytest.approx(by_piece)
    config = options.parse_args_and_arch(options.get_generation_parser(), [*given, "translation"])
    assert convert_namespace_to_omegaconf(config).common_eval.post_process == "subword_nmt"
