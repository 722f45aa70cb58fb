"""The perplexity of a language model: fairseq-eval-lm with what the checkpoint says of its training.

fairseq-eval-lm asks for the sample length and the break mode again; with other values than the training's it skips what
it cannot score and reports a number all the same. Here the text's tokens are counted, and each must have been scored.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from steps import write_text

ROOT = Path(__file__).resolve().parent.parent
# The probabilities of all words for one batch: half a gigabyte.
BATCH_OF_PROBABILITIES = 1 << 27


def task_of(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of its task: the newer ones under cfg, those of 2019 among all their arguments."""
    cfg = state.get("cfg")
    if cfg:
        return {**cfg["task"], "max_target_positions": cfg["model"].get("max_target_positions")}
    return vars(state["args"])


def plain(value: Any) -> str:
    """A choice as it is typed: an enum's value, or the string itself."""
    return str(getattr(value, "value", value))


def evaluation(task: dict[str, Any], words: int, context_window: int) -> list[str]:
    """fairseq-eval-lm's options for a model trained by `task` over a dictionary of `words` entries.

    Raises:
        ValueError: the context window leaves no token of a sample to be scored.
    """
    length = int(task.get("max_target_positions") or task["tokens_per_sample"])
    length = min(length, int(task["tokens_per_sample"]))
    if not 0 <= context_window < length:
        raise ValueError(
            f"--context-window must be in 0 … {length - 1}, below the {length} tokens of a sample, got {context_window}"
        )
    # A row of a batch has the window's tokens besides those that count.
    scored = length - context_window
    tokens = max(scored, BATCH_OF_PROBABILITIES // words * scored // length)
    options = ["--task", "language_modeling", "--tokens-per-sample", str(length), "--max-tokens", str(tokens)]
    options += ["--sample-break-mode", plain(task.get("sample_break_mode") or "none")]
    options += ["--context-window", str(context_window)]
    if int(task.get("output_dictionary_size", -1)) >= 0:
        options += ["--output-dictionary-size", str(task["output_dictionary_size"])]
    return options + (["--add-bos-token"] if task.get("add_bos_token") else [])


def tokens_of(data: Path, subset: str) -> int:
    """Tokens of a binarised text, </s> of every line included."""
    from fairseq.data import data_utils

    dataset = data_utils.load_indexed_dataset(str(data / subset), None)  # its sizes live in the file it keeps open
    return int(dataset.sizes.sum())


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("data", type=Path, metavar="DATA_BIN")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--subset", "--gen-subset", default="test")
    parser.add_argument("--context-window", type=int, default=0, metavar="N")
    parser.add_argument("--json", action="store_true")
    return parser.parse_known_args()


def measure(args: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    """Runs fairseq-eval-lm; its log becomes CHECKPOINT.SUBSET.eval_lm.

    Raises:
        ValueError: an argument is wrong.
        RuntimeError: fairseq-eval-lm failed, or left tokens out.
    """
    for path, what in ((args.data / "dict.txt", "a dictionary"), (args.data / f"{args.subset}.idx", "a subset")):
        if not path.is_file():
            raise ValueError(f"{path} is missing: DATA_BIN is a folder of prepare_wikitext2.sh, with {what}")
    if not args.checkpoint.is_file():
        raise ValueError(f"no checkpoint {args.checkpoint}")
    from lightconv_plugin.tools.common import safe_torch_load
    from lightconv_plugin.tools.parameters import count_parameters

    with (args.data / "dict.txt").open(encoding="utf-8") as file:
        words = sum(1 for _ in file)
    task = task_of(safe_torch_load(args.checkpoint))
    command = [sys.executable, "-u", "-m", "fairseq_cli.eval_lm", str(args.data), "--path", str(args.checkpoint)]
    command += ["--user-dir", str(ROOT / "lightconv_plugin"), "--gen-subset", args.subset, "--log-format", "simple"]
    command += [*evaluation(task, words, args.context_window), *options]
    log = args.checkpoint.with_suffix(f".{args.subset}.eval_lm")
    temporary = log.with_name(log.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        failed = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    os.replace(temporary, log)
    text = log.read_text(encoding="utf-8")
    found = re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", text)
    if failed or not found:
        tail = "\n".join(text.splitlines()[-8:])
        raise RuntimeError(f"fairseq-eval-lm failed with status {failed}, see {log}:\n{tail}")
    scored = int(re.search(r"Evaluated ([\d,]+) tokens", text)[1].replace(",", ""))
    tokens = tokens_of(args.data, args.subset)
    if scored < tokens:
        raise RuntimeError(f"fairseq-eval-lm scored {scored} of the {tokens} tokens of {args.subset}, see {log}")
    return {
        "perplexity": float(found[2]),
        "loss": float(found[1]),
        "tokens": tokens,
        "subset": args.subset,
        "context_window": args.context_window,
        "tokens_per_sample": int(task["tokens_per_sample"]),
        "parameters": count_parameters(args.checkpoint),
    }


def main() -> int:
    args, options = parse()
    logging.disable(logging.INFO)  # what fairseq says while it is imported
    try:
        result = measure(args, options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"perplexity.sh: error: {error}", file=sys.stderr)
        return 1
    write_text(args.checkpoint.with_suffix(f".{args.subset}.ppl"), json.dumps(result) + "\n")
    line = (
        "{subset}: perplexity {perplexity:.2f} over {tokens:,} tokens, each with at least {context_window} before it "
        "where the text has them; {parameters:,} parameters"
    )
    print(json.dumps(result) if args.json else line.format(**result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
