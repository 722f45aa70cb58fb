"""Bad input: errors whose text is the one line that the user reads."""


class InputError(Exception):
    """Bad input: a file, a value, a combination. Its text is the one line that the user reads.

    A parameter that it is about stands in backquotes, as in "`lang` is missing": the command shows its option instead.
    """


class UnsupportedModelError(InputError, ValueError):
    """A model, or a part of it, that cannot be run without fairseq; the text says which."""
