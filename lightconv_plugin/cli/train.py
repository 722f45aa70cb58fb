"""`lightconv train`: train a configuration with fairseq-hydra-train, or resume its training."""

import argparse
import re

from lightconv_plugin.arguments import natural, positive
from lightconv_plugin.errors import InputError

DESCRIPTION = """\
Trains a configuration with fairseq-hydra-train. Rerun the same command to resume from the last checkpoint.

CONFIG is the path of a YAML file, or the name of a configuration such as multi30k_en_de/dynamicconv. It is followed by
hydra's overrides, such as optimization.max_epoch=30; an option that the configuration leaves to fairseq needs no +, and
bf16 or fp16 replaces the other one of the configuration. +criterion/rdrop and +criterion/simcut change a recipe with
label_smoothed_cross_entropy to consistency training, with the papers' settings.

Checkpoints, records.jsonl (settings, statistics and the end, for the other commands), train.log (with several machines
also train.nodeR.log: everything that machine R printed) and tensorboard/ go to checkpoint.save_dir
(common.tensorboard_logdir=DIR puts the latter elsewhere, null disables it); the data is read from task.data. Relative
paths in a configuration are relative to LIGHTCONV_HOME (default: the working directory), those in an override to the
working directory; also those of a shortlist, and of the checkpoints and pretrained embeddings that a training starts
from.

All cores are used (or OMP_NUM_THREADS per process, if set). max_tokens × update_freq of a configuration is the number
of tokens per update: N processes share them (a language model's in whole samples), so that an update is the same on any
number of machines. On a GPU, the largest batches that fit into its memory are used, and fewer of them in an update (see
--micro-batch)."""
EXAMPLE = """\
example:
  lightconv train multi30k_en_de/dynamicconv common.seed=2 checkpoint.save_dir=runs/seed2
  lightconv train multi30k_en_de/dynamicconv optimization.max_update=3500 lr_scheduler.total_num_update=3500
  lightconv train multi30k_en_de/dynamicconv +criterion/simcut checkpoint.save_dir=runs/simcut
  lightconv train my/config.yaml task.data=data/mine/data-bin checkpoint.save_dir=runs/mine
  lightconv train wmt16_en_de/dynamicconv --nodes 2 --node-rank 0 --rendezvous node0:29500"""


def run(args: argparse.Namespace) -> int:
    if wrong := [argument for argument in args.unknown if argument.startswith("-")]:
        raise InputError(
            f"there is no option {wrong[0]}: fairseq's are overrides, such as dataset.max_tokens=4000 (lightconv train "
            "--help)"
        )
    if args.nodes is None and (args.node_rank is not None or args.rendezvous is not None):
        raise InputError("--node-rank and --rendezvous need --nodes")
    if args.nodes is not None and (args.node_rank is None or args.rendezvous is None):
        raise InputError(f"--nodes {args.nodes} needs --node-rank and --rendezvous")
    if args.nodes is not None and args.node_rank >= args.nodes:
        raise InputError(f"--node-rank must be below --nodes {args.nodes}, got {args.node_rank}")
    from lightconv_plugin.recipes.training.run import train

    return train(
        args.config,
        args.unknown,
        processes=args.processes or 0,
        nodes=args.nodes or 1,
        node_rank=args.node_rank or 0,
        rendezvous=args.rendezvous,
        micro_batch=args.micro_batch,
        max_restarts=args.max_restarts,
        timeout=args.timeout,
    )


def tokens_or_auto(text: str) -> int | str:
    """A number of tokens, or "auto", for argparse."""
    return text if text == "auto" else positive(text)


def host_and_port(text: str) -> str:
    """HOST:PORT, for argparse."""
    if not re.fullmatch(r"[^:/]+:[0-9]+", text):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, got {text!r}")
    return text


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "train",
        usage="lightconv train CONFIG [key=value …] [options]",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="path or name of a configuration")
    parser.add_argument(
        "--processes", type=positive, metavar="N",
        help="processes on this machine (default: one per GPU; without a GPU or with common.cpu=true, one). "
        "Without a GPU, several processes exchange gradients by gloo",
    )  # fmt: skip
    parser.add_argument(
        "--micro-batch", type=tokens_or_auto, metavar="N",
        help="tokens of the largest batch; update_freq follows, so that the tokens per update stay. auto: the largest "
        "that fits into memory; updates are tried for a minute, and the result is kept in save_dir (default: auto on "
        "one machine with GPUs, otherwise max_tokens of the configuration). Not with dataset.batch_size",
    )  # fmt: skip
    parser.add_argument(
        "--max-restarts", type=natural, default=3, metavar="N",
        help="restarts from the last checkpoint when a process dies (default: %(default)s), if a checkpoint was "
        "written since the last start. Ctrl-C and SIGTERM end the training",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=positive, default=600, metavar="SECONDS",
        help="time after which a process or machine that does not respond counts as dead (default: %(default)s); must "
        "be longer than any of them may be busy alone",
    )  # fmt: skip
    several = parser.add_argument_group(
        "several machines",
        "Start the same command on each machine, with its --node-rank. They must share the file system of save_dir and "
        "the data.",
    )
    several.add_argument("--nodes", type=positive, metavar="N", help="machines that train together")
    several.add_argument("--node-rank", type=natural, metavar="R", help="number of this machine, 0 … N-1")
    several.add_argument(
        "--rendezvous",
        type=host_and_port,
        metavar="HOST:PORT",
        help="address of machine 0 for the others, and a free port on it",
    )
    parser.set_defaults(unknown=[])
