"""A batch that processes share gives what one process gives; one that ends or fails is an error, never a hang."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("fairseq")

from lightconv_plugin.generation import FastGenerator, Translator
from lightconv_plugin.generation.forks import ForkError, Forks, can_fork
from lightconv_plugin.generation.loading import TranslationError
from tests.generation import toys, translation_toys
from tests.models.toys import dictionary

pytestmark = pytest.mark.skipif(not can_fork(), reason="processes are not forked on this system")


def alive(pid: int) -> bool:
    """Also of processes that have ended and were not waited for: these are not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def pids(forks: Forks) -> list[int]:
    return [process.pid for process in forks._processes]


def double(number):
    if number == "error":
        raise ValueError("no number")
    if number == "end":
        os._exit(7)
    return 2 * number, torch.get_num_threads(), torch.is_grad_enabled()


def test_each_answers_for_its_part():
    forks = Forks(3, double)
    assert forks.map([1, 2, 3]) == [(2, 1, False), (4, 1, False), (6, 1, False)]
    assert forks.map([5]) == [(10, 1, False)] and forks.map([]) == []
    processes = pids(forks)
    assert len(set(processes)) == 3 and os.getpid() not in processes
    forks.close()
    assert not any(map(alive, processes))
    forks.close()  # once more is no fault


@pytest.mark.parametrize(
    ("part", "error", "said"),
    [("error", ValueError, "no number"), ("end", ForkError, r"process 2 of 2 that search ended with status 7")],
)
def test_what_goes_wrong_is_told_and_ends_all(part, error, said):
    forks = Forks(2, double)
    processes = pids(forks)
    with pytest.raises(error, match=said):
        forks.map([1, part])
    assert not any(map(alive, processes))


def test_forgotten_they_end():
    forks = Forks(2, double)
    processes = pids(forks)
    del forks
    assert not any(map(alive, processes))


def test_they_end_with_a_parent_that_is_killed():
    program = (
        "import os, signal, sys\nfrom lightconv_plugin.generation.forks import Forks\n"
        "forks = Forks(2, abs)\nprint(*(p.pid for p in forks._processes), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    processes = [int(pid) for pid in done.stdout.split()]
    deadline = time.monotonic() + 20
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(processes) == 2 and not any(map(alive, processes))


def sample(number: int, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (number,), generator=generator)
    tokens = torch.full((number, 9), 1)
    for row, length in zip(tokens, lengths.tolist(), strict=True):
        row[9 - length :] = torch.randint(4, toys.VOCABULARY, (length,), generator=generator)
        row[-1] = 2
    return {"net_input": {"src_tokens": tokens, "src_lengths": lengths}}


def equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert [h["tokens"].tolist() for h in ours] == [h["tokens"].tolist() for h in theirs]
        for first, second in zip(ours, theirs, strict=True):
            assert {name: x.dtype for name, x in first.items()} == {name: x.dtype for name, x in second.items()}
            torch.testing.assert_close(first["score"], second["score"], rtol=0, atol=1e-4)
            torch.testing.assert_close(first["positional_scores"], second["positional_scores"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 12])
def test_shared_or_not_the_translations_are_the_same(number):
    torch.manual_seed(1)
    model, words = toys.ours(), dictionary(toys.VOCABULARY)
    alone, shared = (FastGenerator([model], words, beam_size=3, max_len_b=8, processes=n) for n in (1, 3))
    batch = sample(number)
    equal(shared.generate([model], batch), alone.generate([model], batch))
    assert (shared._search._forks is not None) == (number >= 4) and alone._search._forks is None
    prefix = batch["net_input"]["src_tokens"][:, -2:-1]
    equal(
        shared.generate([model], batch, prefix_tokens=prefix, bos_token=5),
        alone.generate([model], batch, prefix_tokens=prefix, bos_token=5),
    )
    shared.close()


def test_they_see_weights_that_have_changed_after_refresh():
    torch.manual_seed(1)
    model, words = toys.ours(), dictionary(toys.VOCABULARY)
    shared = FastGenerator([model], words, beam_size=2, max_len_b=8, processes=2)
    before = shared.generate([model], sample(6))
    processes = pids(shared._search._forks)
    with torch.no_grad():
        model.decoder.output_projection.weight.neg_()
    shared.refresh()
    assert not any(map(alive, processes))
    after = shared.generate([model], sample(6))
    equal(after, FastGenerator([model], words, beam_size=2, max_len_b=8, processes=1).generate([model], sample(6)))
    assert [h[0]["tokens"].tolist() for h in before] != [h[0]["tokens"].tolist() for h in after]
    shared.close()


def test_the_number_of_processes_is_that_of_threads(monkeypatch):
    torch.manual_seed(1)
    model, words = toys.ours(), dictionary(toys.VOCABULARY)
    generator = FastGenerator([model], words, max_len_b=8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    generator.generate([model], sample(4))
    assert len(pids(generator._search._forks)) == 2
    generator.close()
    with pytest.raises(ValueError, match="processes must be at least 1, got 0"):
        FastGenerator([model], words, processes=0)


def test_a_translator_whose_process_is_killed(tmp_path, monkeypatch):
    data = translation_toys.make_corpus(tmp_path / "corpus")
    path = translation_toys.make_checkpoint(tmp_path / "model.pt", data)
    lines = translation_toys.lines(9, seed=9)
    expected = Translator(path, max_len_b=20).translate(lines)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with Translator(path, max_len_b=20) as translator:
        assert [t.tokens for t in translator.translate(lines)] == [t.tokens for t in expected]
        processes = pids(translator._searcher._search._forks)
        os.kill(processes[1], signal.SIGKILL)
        with pytest.raises(TranslationError, match="process 2 of 2 that search ended by signal 9; if memory ran out"):
            translator.translate(lines)
        assert not any(map(alive, processes))
        assert [t.tokens for t in translator.translate(lines)] == [t.tokens for t in expected]  # by others
        processes = pids(translator._searcher._search._forks)
    assert not any(map(alive, processes))
