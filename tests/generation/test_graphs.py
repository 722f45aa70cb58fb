"""A search whose steps are recorded finds what the search finds.

There is no GPU here: tests/generation/recordings.py stands in for CUDA graphs, and fails where a step could not be
captured. Against fairseq's generator: test_beam_search.py. On a GPU: tests/gpu/test_generation.py.
"""

import copy
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest
import torch

from benchmarks.launches import Counter
from lightconv_plugin.generation import BatchSearch, SearchOptions, batch_search
from lightconv_plugin.generation.batch_search import TorchSearch
from lightconv_plugin.generation.beam_search import Search
from lightconv_plugin.generation.graphs import CapturedSearch
from lightconv_plugin.generation.steps import StepModel
from lightconv_plugin.mixers import MIXERS
from tests.checkpoints.exports import build_model, pair
from tests.generation import random_models
from tests.generation.random_models import EOS, PAD, Case, model_of, random_batch
from tests.generation.recordings import Recordings, reachable
from tests.waiting import RefuseToWait

OPTIONS = SearchOptions(pad=PAD, unk=3, eos=EOS, beam_size=3)


class Captured:
    """The searches of several batches with one CapturedSearch, as Case.search calls it."""

    def __init__(self, models, options, **more):
        self.recordings = Recordings()
        self.captured = CapturedSearch(models, options, recorder=self.recordings, **more)

    def __call__(self, models, options):
        return self.captured


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_random_models_and_options(first):
    """Each searches twice: the second batch, of like sizes, is searched with the first one's recordings."""
    replayed = 0
    for seed in range(first, first + 10):
        case = random_models.random_case(seed)
        search = Captured(case.models, case.options)
        random_models.assert_same(case.search(TorchSearch), case.search(search), f"seed {seed}:")
        recorded = search.recordings.recorded
        other = Case(case.models, case.options, case.source.flip(0), case.max_len, case.extra)
        random_models.assert_same(other.search(TorchSearch), other.search(search), f"seed {seed}, again:")
        random_models.assert_same(case.search(TorchSearch), case.search(search), f"seed {seed}, at last:")
        assert search.recordings.recorded <= recorded + 8
        replayed += search.recordings.replayed
    assert replayed > 40


@pytest.mark.parametrize("mixer, beam", [*((mixer, 5) for mixer in MIXERS), ("dynamic", 1), ("attention", 1)])
def test_long_searches_of_batches_of_one_size(mixer, beam):
    """Forty steps, longer than every ring and past three powers of two; sentences leave on the way."""
    model = model_of(mixer)
    options = SearchOptions(pad=PAD, unk=3, eos=EOS, beam_size=beam, no_repeat_ngram_size=2, min_len=2)
    search = Captured([model], options)
    rng = random.Random(beam)
    for batch, (sentences, longest) in enumerate([(7, 9), (5, 16), (8, 3), (6, 11)]):
        case = Case([model], options, random_batch(rng, sentences, longest, 50), 28)
        recorded = search.recordings.recorded
        random_models.assert_same(case.search(TorchSearch), case.search(search), f"batch {batch}:")
        if batch > 2:
            assert search.recordings.recorded - recorded <= 3
    assert len(search.captured._searches) == 1
    assert search.recordings.replayed > search.recordings.recorded > 1


def test_a_recording_uses_what_stays():
    """Weights and the tables of the search: nothing that is freed, or taken by something else, before a replay."""
    for mixer in MIXERS:
        models = [model_of(mixer), model_of("dynamic")]
        options = SearchOptions(pad=PAD, unk=3, eos=EOS, beam_size=3, no_repeat_ngram_size=2, suppress=(5, 6))
        search = Captured(models, options)
        Case(models, options, random_batch(random.Random(1), 3, 9, 50), 9).search(search)
        assert search.recordings.recorded > 0
        stay = reachable(search.captured) | reachable(models)
        assert {tensor.untyped_storage().data_ptr() for tensor in search.recordings.outside} <= stay


@pytest.mark.parametrize("mixer", MIXERS)
def test_nothing_goes_between_host_and_device(mixer):
    """Steps on "meta", where a number on the host can be told from one on the device."""
    options = SearchOptions(pad=PAD, unk=3, eos=EOS, beam_size=3, no_repeat_ngram_size=2, suppress=(5, 6), min_len=3)
    model = model_of(mixer).to("meta")
    steps = StepModel(model)
    encoded = torch.zeros(9, 3, model.config.encoder.embed_dim, device="meta")
    steps.encoder = lambda source: (encoded, source.eq(PAD))
    source = torch.ones(3, 9, dtype=torch.int64, device="meta")
    state = steps.start(source, 3, 32)
    search = Search([steps], [state], source[:, 0], options, 12, columns=32)
    for time in range(13):
        steps.advance(state, 4 if time == 0 else 12)
        with RefuseToWait("meta") as mode, torch.no_grad():
            search._step(search._kind(time))
        assert mode.seen > 50


def step_on_meta(model, dtype):
    """The launches of a step on "meta", and the type of the logits."""
    steps = StepModel(model, dtype)
    encoded = torch.zeros(9, 3, model.config.encoder.embed_dim, device="meta", dtype=steps.embedding.dtype)
    steps.encoder = lambda source: (encoded, source.eq(PAD))
    state = steps.start(torch.ones(3, 9, dtype=torch.int64, device="meta"), 3, 32)
    with Counter() as counter, torch.no_grad():
        logits = steps.step(state, torch.ones(12, dtype=torch.int64, device="meta"))
    return counter.counts.launches, logits.dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_on_a_gpu_half_precision_is_the_type_of_the_whole_model(mixer, dtype):
    """As if the model had been converted: nothing is converted around each linear layer. The model itself is kept.

    TaLK's offsets stay in float32, which their inputs are converted to in either case.
    """
    model = model_of(mixer).to("meta")
    kind = getattr(torch, dtype)
    launches, found = step_on_meta(model, dtype)
    converted, same = step_on_meta(copy.deepcopy(model).to(kind), "float32")
    assert found == same and (launches == converted or (mixer == "talk" and launches.total() < converted.total()))
    assert found == kind and model.decoder.embed_tokens.weight.dtype == torch.float32


def test_what_overflowed_in_one_batch_does_not_reach_the_next():
    """Infinities and NaN that are left in tables would be multiplied by 0."""
    models = [model_of("dynamic"), model_of("attention")]
    case = Case(models, OPTIONS, random_batch(random.Random(4), 5, 9, 50), 20)
    search = Captured(models, OPTIONS)
    expected = case.search(search)
    (kept,) = search.captured._searches.values()
    for state in kept.search._states:
        for memory in state.memories():
            for tensor in vars(memory).values():
                if isinstance(tensor, torch.Tensor) and tensor is not state.source_mask:
                    tensor.fill_(torch.nan)
    random_models.assert_same(expected, case.search(search))


def test_sizes_used_last_are_kept():
    model = build_model(pair("dynamic"))
    search = Captured([model], OPTIONS, sizes=2)
    words = model.config.encoder.vocab_size
    for sentences in 1, 4, 1, 2, 8, 1:
        case = Case([model], OPTIONS, random_batch(random.Random(sentences), sentences, 5, words), 10)
        random_models.assert_same(case.search(TorchSearch), case.search(search))
        assert len(search.captured._searches) <= 2
    assert [size[0] for size in search.captured._searches] == [8, 1]


def test_searches_of_one_size_at_the_same_time():
    """Threads of Python that share the tensors of a size take turns. A copy of the search has its own."""
    model = build_model(pair("dynamic"))
    words = model.config.encoder.vocab_size
    cases = [Case([model], OPTIONS, random_batch(random.Random(seed), 4, 7, words), 12) for seed in range(8)]
    expected = [case.search(TorchSearch) for case in cases]
    search = Captured([model], OPTIONS)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda case: case.search(search), cases))
    copied = copy.deepcopy(search)
    for case, one, other in zip(cases, expected, found, strict=True):
        random_models.assert_same(one, other)
        random_models.assert_same(one, case.search(copied), "copied,")
    assert copied.captured._searches.keys() == search.captured._searches.keys()


@pytest.mark.parametrize("owner, what", [(Recordings, "warm_up"), (Recordings, "record"), (StepModel, "start")])
def test_without_memory_for_recordings_a_batch_is_searched_normally(owner, what, monkeypatch, caplog):
    """Batches of its size are, from then on; those of others are recorded anew."""
    model = build_model(pair("dynamic"))
    words = model.config.encoder.vocab_size
    small, large = (Case([model], OPTIONS, random_batch(random.Random(n), n, 9, words), 20) for n in (2, 8))
    search, original, expected = Captured([model], OPTIONS), getattr(owner, what), large.search(TorchSearch)
    small.search(search)

    def full(*given, **more):
        if search.captured._searches:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, what, full)
        random_models.assert_same(expected, large.search(search))
    assert not search.captured._searches and caplog.text.count("too little memory") == 1
    recorded = search.recordings.recorded
    random_models.assert_same(expected, large.search(search))
    assert search.recordings.recorded == recorded
    random_models.assert_same(small.search(TorchSearch), small.search(search))
    assert search.recordings.recorded > recorded


def test_without_memory_for_a_normal_search_there_is_none(monkeypatch):
    model = build_model(pair("dynamic"))
    search = Captured([model], OPTIONS, from_batch=2)
    monkeypatch.setattr(StepModel, "start", mock.Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        Case([model], OPTIONS, torch.tensor([[5, EOS]]), 9).search(search)
    assert StepModel.start.call_count == 1


def test_bfloat16():
    model = build_model(pair("dynamic"))
    options = replace(OPTIONS, dtype="bfloat16")
    case = Case([model], options, random_batch(random.Random(2), 5, 9, model.config.encoder.vocab_size), 20)
    search = Captured([model], options)
    expected = case.search(TorchSearch)
    random_models.assert_same(expected, case.search(search), tolerance=0.05)


def test_a_gpu_is_needed():
    with pytest.raises(ValueError, match=r"^`cuda_graphs` needs a GPU, got a model on cpu"):
        BatchSearch([build_model(pair("dynamic"))], replace(OPTIONS, cuda_graphs=True))


def test_recordings_begin_with_the_second_batch_of_a_size():
    model = build_model(pair("dynamic"))
    words = model.config.encoder.vocab_size
    search = Captured([model], OPTIONS, from_batch=2)
    counts = []
    for sentences, longest in (5, 9), (3, 17), (8, 12), (4, 20), (7, 9):  # the first and the third are of one size
        case = Case([model], OPTIONS, random_batch(random.Random(longest), sentences, longest, words), 10)
        random_models.assert_same(case.search(TorchSearch), case.search(search))
        counts.append((search.recordings.recorded, len(search.captured._searches)))
    assert counts[0] == counts[1] == (0, 0)
    assert 0 < counts[2][0] < counts[3][0]
    assert [number for _, number in counts] == [0, 0, 1, 2, 2]


@pytest.mark.parametrize(("asked", "first"), [(None, 2), (True, 1), (False, None)])
def test_which_batches_are_captured_on_a_gpu(asked, first, monkeypatch):
    """The device exists by name only."""
    monkeypatch.setattr(batch_search, "CudaGraphs", lambda device: Recordings())
    made = []
    monkeypatch.setattr(batch_search, "CapturedSearch", lambda *given, from_batch, **more: made.append(from_batch))
    model = build_model(pair("dynamic"))
    options, gpu = replace(OPTIONS, cuda_graphs=asked), torch.device("cuda")
    search = batch_search._choose([model], ValueError("a model is float32 on cuda"), options, gpu)
    assert (made, search is None) == (([first], True) if first else ([], False))
    assert first or isinstance(search, TorchSearch)


class _Reads:
    """Steps that cannot be captured."""

    def __init__(self):
        self.table, self.time, self.kept = torch.zeros(8), 0, []

    def value(self):
        if self.table.sum() > 1:
            self.table += 1

    def leaves(self):
        self.kept.append(self.table + 1)


@pytest.mark.parametrize(("step", "message"), [("value", "the host would wait"), ("leaves", "tensors of a step")])
def test_what_cannot_be_captured_is_refused(step, message):
    with pytest.raises(AssertionError, match=message):
        Recordings().record(getattr(_Reads(), step))


def test_a_recording_does_not_see_python():
    """So a step that depends on the time otherwise gives wrong results."""
    table, now, time = torch.zeros(4), torch.zeros(1, dtype=torch.int64), 0

    def step():
        table.index_copy_(0, now, torch.full((1,), time + 1.0))
        table[time] += 10

    replay = Recordings().record(step)
    for time in 1, 2:
        now.fill_(time)
        replay()
    assert table.tolist() == [31.0, 1.0, 1.0, 0.0]
