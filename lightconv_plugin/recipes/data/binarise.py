"""Runs fairseq-preprocess: its messages go to preprocess.log in the prepared folder, its counts to the terminal."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightconv_plugin.errors import CorpusError
from lightconv_plugin.paths import package_dir
from lightconv_plugin.processes import module_command
from lightconv_plugin.progress import say
from lightconv_plugin.recipes.data.text_pool import iter_lines
from lightconv_plugin.text.dictionary import BOS, EOS, PAD

SYMBOLS = frozenset({BOS, PAD, EOS})  # as words, they would end a sentence in fairseq, or pad it


def check_words(texts: Iterable[Path]) -> None:
    """CorpusError if a symbol of fairseq is a word of the texts."""
    for path in texts:
        for number, line in enumerate(iter_lines(path), 1):
            if "<" in line and (found := SYMBOLS.intersection(words := line.split())):
                place = words.index(min(found))
                around = " ".join(words[max(place - 4, 0) : place + 5])  # the line may have another number elsewhere
                raise CorpusError(
                    f"{path}, line {number}: {min(found)} in {around!r} is fairseq's symbol, not a word: take it out "
                    "of the text, or write it in another way"
                )


def binarise(
    root: Path, splits: Sequence[str], prefix: str, options: Sequence[str], workers: int, output: Path
) -> None:
    """Binarise the texts of `splits` into `output`, a folder below `root`.

    Args:
        splits: train, valid, test, test1, …
        prefix: the text of a split, relative to `root`, such as raw/{}.txt; without the suffix of the language if there
            are two
        options: more options for fairseq-preprocess
    """
    # The plugin's patches of fairseq make this several times as fast.
    command = [*module_command("fairseq_cli.preprocess"), "--user-dir", str(package_dir())]
    command += [*_texts(splits, prefix), *options]
    command += ["--destdir", str(output.relative_to(root)), "--workers", str(workers)]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ  # the work is divided among processes
    # Run in the folder with relative names: fairseq splits --testpref at commas, and the folder's path may have one.
    with (root / "preprocess.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            close_fds=False,  # it inherits the steps' lock: if this process is killed, the next one waits for it
        )
        last = ""
        assert process.stdout is not None  # a pipe
        with process:
            try:
                for line in process.stdout:
                    log.write(line)
                    last = line.strip() or last
                    if "Dictionary:" in line or " sents, " in line:
                        say("  " + re.sub(r".*(?=\[)", "", line.rstrip()))
            except BaseException:
                process.kill()  # it would keep writing into a folder that is being removed
                raise
    if process.returncode != 0:
        raise CorpusError(f"fairseq-preprocess failed with status {process.returncode}: {last} (see {log.name})")


def _texts(splits: Sequence[str], prefix: str) -> list[str]:
    """--trainpref, --validpref and --testpref; splits named test… are joined by commas, in order."""
    tests = [prefix.format(split) for split in splits if split.startswith("test")]
    options = []
    for part, names in (("train", [prefix.format("train")]), ("valid", [prefix.format("valid")]), ("test", tests)):
        if names and (part == "test" or part in splits):
            options += [f"--{part}pref", ",".join(names)]
    return options
