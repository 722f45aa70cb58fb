"""Bad input: errors whose text is the one line that the user reads."""


class InputError(Exception):
    """Bad input: a file, a value, a combination. Its text is the one line that the user reads."""


class ArgumentError(InputError):
    """A bad value of the argument `name`, whose text is the name and `problem`.

    The command line shows its own name for the argument instead, such as --raw-ref for raw_ref.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name, self.problem = name, problem
