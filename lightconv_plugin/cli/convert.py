"""`lightconv convert`: convert checkpoints for the plugin or for upstream's code, and exported models for both."""

import argparse
from pathlib import Path

from lightconv_plugin.arguments import add_force
from lightconv_plugin.checkpoints.layouts import LAYOUTS
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import check_new_file, same_file
from lightconv_plugin.quiet import quietly


def run(args: argparse.Namespace) -> int:
    with quietly():
        from lightconv_plugin.checkpoints.conversion import convert
        from lightconv_plugin.checkpoints.loading import torch_save

        if same_file(args.output, args.input):
            raise InputError(f"{args.output} is also the file to convert: choose another name")
        check_new_file(args.output, args.force)
        converted, said = convert(args.input, args.to)
        torch_save(converted, args.output)
    for line in said:
        print(line)
    print(f"written to {args.output}")
    return 0


DESCRIPTION = """\
Converts a checkpoint to the layout of other code: names and shapes of the parameters, the options and, if the order
of the parameters allows it, the optimizer state. The layout of the input is detected.

  plugin           this plugin
  fairseq          fairseq's own lightconv and lightconv_lm, on its main branch since late 2022
  fairseq-0.12.2   the same in its releases up to 0.12.2, and in the files released in 2019
  talk             the TaLK paper's repository (fairseq 0.8: all settings are arguments)

An option that a layout cannot express is an error, such as several kinds of mixers on one side, or mixers or
normalisations that it lacks.

IN may also be an exported model (lightconv export). It becomes a checkpoint for fairseq-generate, and for fairseq-train
with --finetune-from-model and the printed options. Parameters that were exported in a smaller type become float32
again, but keep their rounding.

The results of fairseq's own code may still differ: in training, its dynamic decoder computes a different softmax
for targets shorter than the kernel."""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "convert",
        description=DESCRIPTION,
        epilog="example: lightconv convert runs/a/average10.pt fairseq.pt --to fairseq",
    )
    parser.add_argument("input", type=Path, metavar="IN", help="the checkpoint, or exported model, to convert")
    parser.add_argument("output", type=Path, metavar="OUT", help="the checkpoint to write")
    parser.add_argument("--to", choices=LAYOUTS, required=True, help="the layout to write")
    add_force(parser, "OUT, if it exists")
