"""What `Searcher` says of a model that translates nothing."""

import pytest
import torch

from lightconv_plugin.generation import SearchOptions
from lightconv_plugin.generation.searcher import Searcher, SearchSettings, TranslationError
from tests.checkpoints.exports import build_model, pair


@pytest.mark.usefixtures("search")
def test_weights_that_are_nan():
    model = build_model(pair())
    with torch.no_grad():
        model.decoder.layers[0].fc1.bias[0] = torch.nan
    searcher = Searcher([model], SearchSettings(SearchOptions(pad=1, unk=3, eos=2, beam_size=2)))
    with pytest.raises(TranslationError, match="the model gives no translation a probability: are its weights NaN"):
        searcher.search([[5, 6, 7, 2], [9, 2]], nbest=1)
