"""Dictionaries that do not match are named (by command: robustness/test_untrusted_checkpoints.py); others load."""

import pytest

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.data.legacy.masked_lm_dictionary import MaskedLMDictionary
from fairseq.models import BaseFairseqModel

from tests.compat.fairseq_runs import unpatched
from tests.models.toys import build, dictionary, task


def models():
    """Two models whose dictionaries differ by two words."""
    return [build("dynamicconv", task(dictionary(words))) for words in (10, 12)]


def test_dictionary_sizes_are_named():
    ours, theirs = models()
    said = "the checkpoint has 12 embeddings in its encoder, but its dictionary here has 10 entries"
    with pytest.raises(RuntimeError, match=said):
        ours.load_state_dict(theirs.state_dict())


def test_an_error_of_other_causes_stays_fairseqs():
    ours = models()[0]
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict({})


def test_without_dictionary_sizes_the_error_is_about_shapes():
    ours, theirs = models()
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        unpatched(BaseFairseqModel.load_state_dict)(ours, theirs.state_dict())
    assert "dictionary" not in str(caught.value)


def test_masked_lm_dictionaries_are_loaded(tmp_path):
    """As fairseq's main branch loads them for translation_from_pretrained_xlm: with <mask> after its own symbols."""
    words = dictionary(3)
    words.save(str(path := tmp_path / "dict.txt"))
    loaded = MaskedLMDictionary.load(str(path))
    assert loaded.symbols == [*words.symbols[: words.nspecial], "<mask>", *words.symbols[words.nspecial :]]
