"""Errors about bad input, whose one-line message is shown to the user."""


class InputError(Exception):
    """Bad input: a file, a value or a combination. Its message is the one line that the user reads.

    Parameter names are in backquotes, as in "`lang` is missing": the command line replaces them by option names.
    """


class UnsupportedModelError(InputError, ValueError):
    """A model, or a part of it, that cannot be run without fairseq; the message says which."""
