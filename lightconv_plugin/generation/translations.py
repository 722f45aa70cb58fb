"""Lines of text and their translations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hypothesis:
    """text: detokenised. tokens: the pieces of the target dictionary.

    score: the sum of the tokens' log-probabilities to base 2, including that of the end, divided by their number to the
        power of the length penalty (what fairseq prints on its H- lines).
    """

    text: str
    score: float
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Translation:
    """A line and its translations, best first.

    source: the line as it was given; if it is not valid text, what could be decoded of it.
    hypotheses: none for an empty line, or if `problem` says why the line was not translated.
    cut: only the beginning was read, because the line is too long and the model was trained on truncated sentences.
    """

    source: str
    hypotheses: tuple[Hypothesis, ...] = ()
    problem: str | None = None
    cut: bool = False

    @property
    def text(self) -> str:
        return self.hypotheses[0].text if self.hypotheses else ""

    @property
    def score(self) -> float | None:
        return self.hypotheses[0].score if self.hypotheses else None

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.hypotheses[0].tokens if self.hypotheses else ()


def read_line(line: str | bytes) -> tuple[str, str | None]:
    """The text of a line, and what is wrong with it, if anything."""
    if not isinstance(line, (str, bytes)):
        raise TypeError(f"lines must be str or bytes, got {type(line).__name__}")
    problem = None
    if isinstance(line, bytes):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            text = line.decode(errors="replace")
            problem = f"not UTF-8: byte {line[error.start]:#04x} at {error.start + 1}"
    else:
        text = line
        if any("\ud800" <= character <= "\udfff" for character in line):
            problem = "not text: it has a half of a surrogate pair"
    text = text.removesuffix("\n").removesuffix("\r")
    if problem is None and "\0" in text:
        problem = "not text: it has a NUL"
    return text, problem
