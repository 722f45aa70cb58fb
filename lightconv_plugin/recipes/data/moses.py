"""Moses' tokeniser for `text_pool.map_file`: lightconv_plugin/text/moses.py has the rules."""

from __future__ import annotations

from collections.abc import Callable

from lightconv_plugin.recipes.data.parallel_folder import CorpusError
from lightconv_plugin.text import moses
from lightconv_plugin.text.moses import lower, versions

__all__ = ["lower", "tokeniser", "versions"]


def tokeniser(lang: str, **steps: bool) -> Callable[[str], str]:
    """As in lightconv_plugin/text/moses.py, but CorpusError for a language without rules."""
    try:
        return moses.tokeniser(lang, **steps)
    except ValueError as error:
        raise CorpusError(str(error)) from None
