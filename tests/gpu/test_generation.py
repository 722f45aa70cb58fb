"""Generation on a GPU: the search in torch, with and without CUDA graphs, finds what it finds on the CPU."""

import random
from dataclasses import replace

import pytest
import torch

from lightconv_plugin.generation import BatchSearch, SearchOptions
from lightconv_plugin.generation.batch_search import TorchSearch
from lightconv_plugin.generation.dtypes import fastest_on_gpu
from lightconv_plugin.generation.shortlist import Shortlist
from lightconv_plugin.mixers import MIXERS
from tests.generation.random_models import EOS, PAD, UNK, assert_same, model_of, random_batch

LONGEST = 28


@pytest.mark.parametrize("beam", [1, 5])
@pytest.mark.parametrize("mixer", MIXERS)
def test_search_with_a_shortlist(mixer, beam, cuda):
    """The words of a batch differ in number, so no steps are captured."""
    model = model_of(mixer)
    options = SearchOptions(
        pad=PAD, unk=UNK, eos=EOS, beam_size=beam, no_repeat_ngram_size=2, suppress=(7, 8), max_len_b=LONGEST
    )
    shortlist = Shortlist({(): range(16), **{(word,): [word, word + 1] for word in range(16, 50)}})
    rng = random.Random(beam)
    sources = [random_batch(rng, sentences, longest, 50) for sentences, longest in [(7, 9), (5, 16)]]
    prefix = torch.tensor([[20], [PAD], [30], [PAD], [40]])
    given = [(sources[0], {}), (sources[1], {"prefix": prefix})]
    search = BatchSearch([model], options, shortlist=shortlist)
    expected = [search.search(source, **extra) for source, extra in given]
    search = BatchSearch([model.to(cuda)], options, shortlist=shortlist)
    for (source, extra), theirs in zip(given, expected, strict=True):
        found = search.search(source.to(cuda), **{name: tensor.to(cuda) for name, tensor in extra.items()})
        assert_same(
            theirs, [[{name: tensor.cpu() for name, tensor in one.items()} for one in ranked] for ranked in found]
        )


@pytest.mark.parametrize("graphs", [False, True, None], ids=["eager", "graphs", "default"])
@pytest.mark.parametrize("beam", [1, 5])
@pytest.mark.parametrize("mixer", MIXERS)
def test_search(mixer, beam, graphs, cuda):
    """Several batches, so that graphs are replayed for others than they were captured with."""
    model = model_of(mixer)
    options = SearchOptions(
        pad=PAD, unk=UNK, eos=EOS, beam_size=beam, no_repeat_ngram_size=2, min_len=2, max_len_b=LONGEST
    )
    rng = random.Random(beam)
    sources = [random_batch(rng, sentences, longest, 50) for sentences, longest in [(7, 9), (5, 16), (8, 3), (6, 11)]]
    batches = [(source, source.ne(PAD).sum(dim=1)) for source in sources]
    search = TorchSearch([model], options)
    expected = [search.search(*batch, LONGEST) for batch in batches]
    search = BatchSearch([model.to(cuda)], replace(options, cuda_graphs=graphs))
    for number, (batch, theirs) in enumerate(zip(batches, expected, strict=True)):
        found = search.search(*(tensor.to(cuda) for tensor in batch))
        ours = [[{name: tensor.cpu() for name, tensor in one.items()} for one in ranked] for ranked in found]
        assert_same(theirs, ours, f"batch {number}:")
    if graphs is not False:
        (recorded,) = search._search._searches.values()
        assert any(recorded._replays.values())


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_half_precision(mixer, dtype, cuda):
    """Scores of forced translations come near those in float32."""
    model = model_of(mixer)
    options = SearchOptions(pad=PAD, unk=UNK, eos=EOS, beam_size=1, min_len=LONGEST, max_len_b=LONGEST)
    source = random_batch(random.Random(3), 7, 9, 50)
    expected = TorchSearch([model], options).search(source, source.ne(PAD).sum(dim=1), LONGEST)
    search = BatchSearch([model.to(cuda)], replace(options, dtype=dtype))
    assert search.options.dtype == (fastest_on_gpu([model], cuda)[0] if dtype == "auto" else dtype)
    prefix = torch.stack([ranked[0]["tokens"][:-1] for ranked in expected])
    found = search.search(source.to(cuda), prefix=prefix.to(cuda))
    for theirs, ours in zip(expected, found, strict=True):
        assert torch.equal(theirs[0]["tokens"], ours[0]["tokens"])
        assert abs(float(theirs[0]["score"] - ours[0]["score"])) < 0.1
