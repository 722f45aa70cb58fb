"""Bad input: errors whose text is the one line that the user reads."""


class InputError(Exception):
    """Bad input: a file, a value, a combination. Its text is the one line that the user reads.

    A parameter that it is about stands in backquotes, as in "`lang` is missing": the command shows its option instead.
    """
