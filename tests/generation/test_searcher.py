"""What `Searcher` says of a model that translates nothing, and how many threads it takes."""

from types import SimpleNamespace

import pytest
import torch

from lightconv_plugin.errors import TranslationError
from lightconv_plugin.generation import SearchOptions
from lightconv_plugin.generation.searcher import Searcher, SearchSettings
from lightconv_plugin.generation.steps import StepModel
from tests.checkpoints.exports import build_model, pair


@pytest.mark.parametrize("search", ["native", "torch"], indirect=True)
def test_the_number_of_threads_is_that_of_one_searcher(search, monkeypatch):
    """Torch's own number is as before: other searchers and models of the process keep theirs."""
    seen, before = [], torch.get_num_threads()
    options = SearchOptions(pad=1, unk=3, eos=2, beam_size=2)
    model = build_model(pair())
    searchers = [Searcher([model], SearchSettings(options, 0, 9, threads=threads)) for threads in (2, 3, None)]
    if search == "native":
        for native in (searcher._search._search for searcher in searchers):
            wrapped = native._search
            native._search = SimpleNamespace(search=lambda *a, to=wrapped: seen.append(a[-1]) or to.search(*a))
    else:
        start = StepModel.start
        monkeypatch.setattr(StepModel, "start", lambda *a: seen.append(torch.get_num_threads()) or start(*a))
    for searcher in searchers:
        searcher.search([[5, 6, 7, 2], [9, 2]], nbest=1)
        assert torch.get_num_threads() == before
    assert seen == [2, 3, before]


@pytest.mark.usefixtures("search")
def test_weights_that_are_nan():
    model = build_model(pair())
    with torch.no_grad():
        model.decoder.layers[0].fc1.bias[0] = torch.nan
    searcher = Searcher([model], SearchSettings(SearchOptions(pad=1, unk=3, eos=2, beam_size=2)))
    with pytest.raises(TranslationError, match="the model gives no translation a probability: are its weights NaN"):
        searcher.search([[5, 6, 7, 2], [9, 2]], nbest=1)
