"""Errors about bad input, whose one-line message is shown to the user."""

import importlib.util


def how_to_get(extra: str) -> str:
    """How to install an extra. The package is on no index, so its name alone cannot be installed."""
    return f"pip install '.[{extra}]' in a checkout of lightconv-plugin"


def need_modules(*names: str) -> None:
    """Raise ModuleNotFoundError, like an import, for the first module that is missing; nothing is imported."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class InputError(Exception):
    """Bad input: a file, a value or a combination. Its message is the one line that the user reads.

    Parameter names are in backquotes, as in "`lang` is missing": the command line replaces them by option names.
    """


class VariableError(InputError, ValueError):
    """A variable of the environment has a value that is not allowed; the message names both."""


class BackendError(VariableError, RuntimeError):
    """LIGHTCONV_BACKEND asks for a backend that is not available, or not for this device; the message says why."""


class UnsupportedModelError(InputError, ValueError):
    """A model, or a part of it, that cannot be run without fairseq; the message says which."""


class TranslationError(InputError, ValueError):
    """Bad input of a `Translator`; the message says what to change."""


class EnsembleError(TranslationError):
    """Models that cannot form an ensemble."""


class CorpusError(InputError):
    """The files on disk are not the corpus that was asked for, or it cannot be prepared."""
