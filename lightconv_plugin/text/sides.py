"""The text of one side of a model: from raw lines to the pieces of its dictionary, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightconv_plugin.errors import InputError
from lightconv_plugin.text.recipe import Recipe
from lightconv_plugin.text.subwords import Subwords, bpe_encoder, join, sentencepiece_encoder


class TokeniserError(InputError):
    """The tokeniser has no rules for the language, or is not installed."""


@dataclass(frozen=True)
class TextSide:
    """How the text of one language becomes pieces.

    recipe: the steps from raw text to tokens.
    subwords: the kind of pieces.
    file: the merges of "bpe" or the model of "sentencepiece". None for "words", whose tokens are the pieces, and for
        text that is already split.
    """

    recipe: Recipe
    subwords: Subwords
    file: Path | None = None

    @property
    def is_split(self) -> bool:
        """Whether lines are pieces already, because nothing is known that splits them. Only their case is changed."""
        return self.file is None and self.subwords != "words"

    def encode(self, content: bytes | None = None) -> Callable[[str], list[str]]:
        """A function that turns a raw line into pieces. content: of `file`, if it has been read before.

        Raises:
            InputError: the file is damaged. TokeniserError, a subclass: see there.
        """
        tokenise, split = self._tokenise(), self._split(content)
        return lambda line: split(tokenise(line)).split()

    def decode(self) -> Callable[[list[str]], str]:
        """A function that turns pieces into normal text. Raises TokeniserError."""
        try:
            detokenise = self.recipe.detokenise()
        except ValueError as error:
            raise TokeniserError(str(error)) from error
        return lambda pieces: detokenise(join(pieces, self.subwords))

    def _tokenise(self) -> Callable[[str], str]:
        # The recipe's tokeniser, by which translations are detokenised, would tear marks such as @@ off the pieces.
        recipe = Recipe("none", self.recipe.lang, self.recipe.lowercase) if self.is_split else self.recipe
        try:
            return recipe.tokenise()
        except (ValueError, RuntimeError) as error:
            raise TokeniserError(str(error)) from error

    def _split(self, content: bytes | None) -> Callable[[str], str]:
        if self.file is None or self.subwords == "words":
            return lambda line: line
        try:
            return (bpe_encoder if self.subwords == "bpe" else sentencepiece_encoder)(self.file, content)
        except ValueError as error:
            raise InputError(str(error)) from error
