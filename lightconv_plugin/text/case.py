"""Lower case, as Moses' script makes it."""


def lower(line: str) -> str:
    """lowercase.perl: like str.lower, but Σ becomes σ even at the end of a word."""
    return line.replace("Σ", "σ").lower()
