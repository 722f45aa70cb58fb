"""Runs fairseq-generate and fairseq-eval-lm in this process, to try many settings without restarting Python."""

import contextlib
import importlib
import io
import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

from lightconv_plugin.errors import InputError
from lightconv_plugin.paths import package_dir
from lightconv_plugin.scoring.generate_log import Generated, parse_gen_log

# Always passed to fairseq-generate, before the caller's options. The task searches with FastGenerator, which gives the
# results of fairseq's generator; the log says which of the two searched.
DEFAULTS = ("--task", "translation_fast", "--beam", "5", "--lenpen", "1", "--remove-bpe", "--max-tokens", "8000")


def generate(data: Path, checkpoint: Path, subset: str, options: Sequence[str]) -> Generated:
    """The sentences in the output of `generate_log`; raises its errors, and InputError if the log is not complete."""
    text = generate_log(data, checkpoint, subset, options)
    return parse_gen_log(text.split("\n"), Path(f"the output of fairseq-generate for {checkpoint}"))


def generate_log(data: Path, checkpoint: Path, subset: str, options: Sequence[str]) -> str:
    """The output of `fairseq-generate DATA --path CHECKPOINT --gen-subset SUBSET OPTIONS`: sentences and messages.

    This calls that command's own main function, with the plugin imported and DEFAULTS before the options. A progress
    bar goes to standard error if that is a terminal.

    Raises InputError for unknown options, and if the command fails.
    """
    return _run("generate", data, checkpoint, subset, [*DEFAULTS, *options])


def eval_lm_log(data: Path, checkpoint: Path, subset: str, options: Sequence[str]) -> str:
    """The output of `fairseq-eval-lm DATA --path CHECKPOINT --gen-subset SUBSET OPTIONS`; see `generate_log`."""
    return _run("eval_lm", data, checkpoint, subset, options)


def parse_options(arguments: Sequence[str], command: str = "generate"):
    """The configuration of fairseq's generate or eval_lm, from its own parser; raises InputError for wrong options."""

    def fail(message: str):
        raise InputError(f"in the options for fairseq-{command.replace('_', '-')}: {message}")

    with _messages_to(io.StringIO()):  # drops fairseq's messages at its start
        from fairseq import options, utils
        from fairseq.dataclass.utils import convert_namespace_to_omegaconf

        utils.import_user_module(Namespace(user_dir=str(package_dir())))
        parser = options.get_generation_parser() if command == "generate" else options.get_eval_lm_parser()
        parser.error = fail
        parsed = options.parse_args_and_arch(parser, list(arguments))
        try:
            return convert_namespace_to_omegaconf(parsed)
        except Exception as error:  # of hydra, whose own have no common base
            fail(" ".join(str(error).split()))


def check_strategy(generation) -> None:
    """Raise InputError for options of the search that fairseq does not take together; it says so once the model is
    loaded."""
    from fairseq.data import Dictionary
    from fairseq.tasks import FairseqTask

    task = SimpleNamespace(target_dictionary=Dictionary())
    try:
        FairseqTask.build_generator(task, [], generation, seq_gen_cls=lambda *_, **__: None)
    except (AssertionError, ValueError) as error:
        raise InputError(f"in the options for fairseq-generate: {error}") from None


def _run(command: str, data: Path, checkpoint: Path, subset: str, options: Sequence[str]) -> str:
    """What fairseq's command prints and logs; raises InputError if it fails."""
    # Names may begin with a dash.
    args = [str(data.absolute()), f"--path={checkpoint}", "--gen-subset", subset, "--user-dir", str(package_dir())]
    # Ending a data-loading process takes five seconds while this process keeps running, and the search does not wait
    # for its data.
    args += ["--num-workers", "0", "--log-format", "tqdm" if sys.stderr.isatty() else "none"]
    config = parse_options([*args, *options], command)
    printed = io.StringIO()
    try:
        with _messages_to(printed), contextlib.redirect_stdout(printed), _whole_paths():
            importlib.import_module(f"fairseq_cli.{command}").main(config)
    except Exception as error:
        # fairseq raises a bare Exception for a sentence that is too long, RuntimeError for other parameters, …
        name = f"fairseq-{command.replace('_', '-')}"
        raise InputError(f"{name} failed for {checkpoint} on {subset}: {type(error).__name__}: {error}") from error
    return printed.getvalue()


@contextlib.contextmanager
def _whole_paths() -> Iterator[None]:
    """Let fairseq take a path with a colon as one path, not as several: there is one folder of data and one model."""
    from fairseq import utils

    split = utils.split_paths
    utils.split_paths = lambda paths, separator=os.pathsep: [paths]
    try:
        yield
    finally:
        utils.split_paths = split


@contextlib.contextmanager
def _messages_to(stream: io.StringIO) -> Iterator[None]:
    """Redirect fairseq's log to `stream`. It contains the number of sentences, and how many were left out.

    The warnings that fairseq causes at every start say nothing about a setting, so they are suppressed.
    """
    root = logging.getLogger()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s | %(name)s | %(message)s"))
    others, level = root.handlers[:], root.level
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        root.handlers[:] = others
        root.setLevel(level)
