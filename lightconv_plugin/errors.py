"""The error that ends a command: bad input, said in one line."""


class InputError(Exception):
    """Bad input: a file, a value, a combination. Its text is the one line that the user reads."""
