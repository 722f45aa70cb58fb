"""Patches for the options of fairseq's commands."""

import importlib.util
import inspect
from argparse import ArgumentParser, Namespace
from typing import Any

from lightconv_plugin.compat.registry import patch


@patch(versions="all versions of fairseq", needed=lambda: importlib.util.find_spec("torch_xla") is None)
def bf16_without_xla() -> None:
    """fairseq takes --bf16 to mean a TPU and fails without torch_xla, even on a GPU.

    The option parser sets `tpu`, and it may already be running when the plugin is imported. The flag is therefore
    cleared one step later, where every command turns its arguments into a configuration. (Commands that use Hydra do
    not set it.)
    """
    from fairseq.dataclass import utils

    original = utils.override_module_args

    def override_module_args(args: Namespace) -> tuple[list[str], list[str]]:
        if getattr(args, "bf16", False):
            args.tpu = False
        return original(args)

    utils.override_module_args = override_module_args


def _validation_has_no_task() -> bool:
    from fairseq import options

    return inspect.signature(options.get_validation_parser).parameters["default_task"].default is None


@patch(versions="all versions of fairseq", needed=_validation_has_no_task)
def validate_without_task() -> None:
    """fairseq-validate without --task stops with `KeyError: None`, although the checkpoint names its task.

    Only the parser needs a task, for the options that a task adds. With this patch it gets fairseq-generate's default,
    translation. Everything that is not on the command line, including the task itself, comes from the checkpoint, as
    fairseq intends. The parser is being built while the plugin is imported, so its default is set one step later, where
    it is used.
    """
    from fairseq import options

    original = options.parse_args_and_arch

    def parse_args_and_arch(parser: ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        for action in parser._actions:
            if action.dest == "task" and action.default is None:
                action.default = "translation"
        return original(parser, *args, **kwargs)

    options.parse_args_and_arch = parse_args_and_arch


@patch(versions="all versions of fairseq")
def shards_of_generate() -> None:
    """fairseq-generate ignores --num-shards and --shard-id: each process translates the whole test set.

    Instead it takes its shard from the options of distributed training, which belong to no process group here: the
    command runs in one process. fairseq-eval-lm takes both, and fairseq-interactive starts processes for those.
    """
    from fairseq.dataclass import utils

    original = utils.override_module_args

    def override_module_args(args: Namespace) -> tuple[list[str], list[str]]:
        if getattr(args, "num_shards", 1) > 1 and hasattr(args, "nbest") and not hasattr(args, "buffer_size"):
            args.distributed_world_size, args.distributed_rank = args.num_shards, args.shard_id
        return original(args)

    utils.override_module_args = override_module_args


@patch(versions="all versions of fairseq")
def bpe_of_eval_lm() -> None:
    """fairseq-eval-lm joins no pieces for --remove-bpe alone: the perplexity is per piece.

    Its parser then gives "subword_nmt", which fairseq-eval-lm takes for the end of a piece. "@@ " joins them.
    """
    from fairseq.dataclass import utils

    original = utils.override_module_args

    def override_module_args(args: Namespace) -> tuple[list[str], list[str]]:
        if hasattr(args, "softmax_batch") and args.post_process == "subword_nmt":
            args.post_process = "@@ "
        return original(args)

    utils.override_module_args = override_module_args
