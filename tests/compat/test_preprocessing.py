"""fairseq-preprocess: the same numbers, counts and files in less time, and all workers at work."""

import importlib.util
import multiprocessing
import os
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("fairseq", reason="fairseq is not installed")

import torch
from fairseq.binarizer import FileBinarizer, VocabularyDatasetBinarizer
from fairseq.data import Dictionary, indexed_dataset
from fairseq.tokenizer import tokenize_line

from lightconv_plugin import compat
from lightconv_plugin.errors import InputError
from tests import process_work as work
from tests import programs
from tests.fastest import fastest
from tests.warm_python import warm_python


@pytest.fixture
def dictionary():
    words = Dictionary()
    for number in range(50):
        words.add_symbol(f"w{number}")
    return words


@pytest.fixture
def text(tmp_path):
    """37 lines: words that the dictionary has and has not, several spaces, an empty line."""
    path = tmp_path / "text"
    lines = [" ".join(f"w{(line * 7 + word) % 60}" for word in range(line % 9)) for line in range(36)]
    path.write_text("\n".join([*lines, "  w1   w2 "]) + "\n", encoding="utf-8")
    return path


def fairseqs(patch, owner, name):
    """fairseq's own attribute `name` of a class, and the one in force: its module is loaded afresh for it."""
    module = sys.modules[owner.__module__]
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_as_it_is", module.__file__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert patch in {applied.name for applied in compat.applied()}
    return getattr(getattr(fresh, owner.__name__), name), getattr(owner, name)


@pytest.mark.parametrize("options", [{}, {"append_eos": False}, {"reverse_order": True}])
@pytest.mark.parametrize("add", [False, True])
def test_line_encoding_gives_the_same_numbers(text, options, add):
    theirs, ours = fairseqs("line_encoding", Dictionary, "encode_line")
    seen, results = [], []
    for encode in (theirs, ours):
        words, consumed = Dictionary(), []
        words.add_symbol("w3")
        encoded = [
            encode(words, line, add_if_not_exist=add, consumer=lambda *pair, to=consumed: to.append(pair), **options)
            for line in text.read_text(encoding="utf-8").splitlines()
        ]
        results.append(encoded)
        seen.append((consumed, words.symbols))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*results, strict=True))
    assert seen[0] == seen[1]


def test_line_encoding_is_faster(dictionary):
    theirs, ours = fairseqs("line_encoding", Dictionary, "encode_line")
    line = " ".join(f"w{number % 60}" for number in range(5000))
    calls = (lambda e=encode: e(dictionary, line, add_if_not_exist=False) for encode in (theirs, ours))
    slow, fast = fastest(7, *calls)
    assert fast < 0.7 * slow


def test_word_counts_are_the_same_and_faster(tmp_path, text):
    theirs, ours = fairseqs("word_counts", Dictionary, "add_file_to_dictionary")
    built = []
    for add, workers in ((theirs, 1), (ours, 1), (ours, 2), (ours, 7)):
        built.append(Dictionary())
        add(str(text), built[-1], tokenize_line, workers)
    assert built[0].symbols == built[1].symbols
    counts = [dict(zip(each.symbols, each.count, strict=True)) for each in built]
    assert all(each == counts[0] for each in counts) and counts[0]["</s>"] == 38
    long = tmp_path / "long"
    long.write_text(" ".join(f"w{number % 60}" for number in range(100_000)) + "\n", encoding="utf-8")
    slow, fast = fastest(7, *(lambda a=add: a(str(long), Dictionary(), tokenize_line, 1) for add in (theirs, ours)))
    assert fast < 0.7 * slow


def split_here(process, line):
    """The words of a line in this process; another one is killed."""
    if os.getpid() != process:
        work.kill_this_process()
    return tokenize_line(line)


def test_a_process_that_is_killed_as_it_counts_words_is_an_error(text):
    """fairseq's pool waits for it for ever."""
    with pytest.raises(InputError, match=r"ended with status -9 .*: try fewer --workers"):
        Dictionary.add_file_to_dictionary(str(text), Dictionary(), partial(split_here, os.getpid()), 2)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("impl", ["mmap", "lazy"])
def test_idle_workers_writes_the_same_files(dictionary, text, tmp_path, workers, impl):
    binarizer, written = VocabularyDatasetBinarizer(dictionary), []
    both = fairseqs("idle_workers", FileBinarizer, "multiprocess_dataset")
    for name, run in zip(("theirs", "ours"), both, strict=True):
        (tmp_path / name).mkdir()
        prefix = str(tmp_path / name / "part")
        summary = run.__func__(FileBinarizer, str(text), impl, binarizer, prefix, len(dictionary), workers)
        data, index = (f(prefix) for f in (indexed_dataset.data_file_path, indexed_dataset.index_file_path))
        content = [Path(path).read_bytes() for path in (data, index)]
        written.append((content, summary.num_seq, summary.num_tok, summary.replaced))
        assert len(list((tmp_path / name).iterdir())) == 2  # no parts are left
    assert written[0] == written[1]
    assert written[1][1] == 37 and sum(written[1][3].values()) > 0


# What processes of a pool inherit: a barrier, and the seconds that one waits at it.
BOTH, PATIENCE = None, 20


class Meeting(VocabularyDatasetBinarizer):
    """Every process waits at its first line until the other one has come to its own."""

    waited = None  # the process that has: this may be set before a copy is sent to another

    def binarize_line(self, line, summary):
        if self.waited != os.getpid():
            self.waited = os.getpid()
            BOTH.wait(PATIENCE)
        return super().binarize_line(line, summary)


def test_no_idle_workers(dictionary, text, tmp_path, monkeypatch):
    """Two parts are computed at the same time; without the patch the first waits for the second."""
    if multiprocessing.get_start_method() != "fork":
        pytest.skip("processes inherit nothing here")
    theirs, ours = (found.__func__ for found in fairseqs("idle_workers", FileBinarizer, "multiprocess_dataset"))
    monkeypatch.setitem(globals(), "BOTH", multiprocessing.Barrier(2))
    summary = ours(FileBinarizer, str(text), "mmap", Meeting(dictionary), str(tmp_path / "ours"), len(dictionary), 2)
    assert summary.num_seq == 37
    monkeypatch.setitem(globals(), "BOTH", multiprocessing.Barrier(2))
    monkeypatch.setitem(globals(), "PATIENCE", 1)
    with pytest.raises(threading.BrokenBarrierError):
        theirs(FileBinarizer, str(text), "mmap", Meeting(dictionary), str(tmp_path / "a"), len(dictionary), 2)


class Failing(VocabularyDatasetBinarizer):
    """Calls `fail` in the process of the second part."""

    def __init__(self, dictionary, fail):
        super().__init__(dictionary)
        self.first, self.fail = os.getpid(), fail

    def binarize_line(self, line, summary):
        if os.getpid() != self.first:
            self.fail()
        return super().binarize_line(line, summary)


def raise_usual():
    raise LookupError("no such word")


@pytest.mark.parametrize(
    ("fail", "kind", "message"),
    [
        (raise_usual, LookupError, "no such word"),
        (work.raise_unusual, RuntimeError, "line 3, column 4"),
        (work.kill_this_process, InputError, r"ended with status -9 .*: try fewer --workers"),
    ],
)
def test_what_goes_wrong_in_another_process_is_said(fail, kind, message, dictionary, text, tmp_path):
    """fairseq's pool waits for ever for the part of a process that was killed, or raised what cannot be unpickled."""
    binarizer = Failing(dictionary, fail)
    with pytest.raises(kind, match=message) as raised:
        FileBinarizer.multiprocess_dataset(str(text), "mmap", binarizer, str(tmp_path / "a"), len(dictionary), 2)
    if fail is not work.kill_this_process:
        assert "binarize_line" in str(raised.value.__cause__)  # its traceback
    assert not multiprocessing.active_children()


FAILING = """
import os, signal, sys, time
import lightconv_plugin.models
from fairseq.binarizer import FileBinarizer, VocabularyDatasetBinarizer
from fairseq.data import Dictionary

signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as the command lightconv does it
os.register_at_fork(after_in_child=lambda: time.sleep(float(sys.argv[2])))
binarizer = VocabularyDatasetBinarizer(Dictionary(), already_numberized=True)
FileBinarizer.multiprocess_dataset(sys.argv[1], "mmap", binarizer, sys.argv[1] + ".out", 4, 2)
"""


@pytest.mark.parametrize("seconds", [0, 2], ids=["after-the-fork", "during-the-fork"])
def test_an_error_in_a_part_is_raised(seconds, tmp_path):
    """Also while the other process still starts, in a hook of the fork, where it forgets what a handler raises."""
    path = tmp_path / "text"
    path.write_text("1 2\n" * 50 + "not a number\n" * 50, encoding="utf-8")
    done = programs.run(warm_python(), "-c", FAILING, path, seconds, status=1, timeout=60)
    # Not the last line in any case: a worker that is ended meanwhile may still say something.
    raised = [line for line in done.stderr.splitlines() if line.startswith("ValueError: invalid literal for int")]
    assert raised, done.stderr
