"""Where the package and its files are."""

import os
from pathlib import Path

import lightconv_plugin


def package_dir() -> Path:
    """The folder this package was imported from.

    Links in it are not resolved: fairseq compares its --user-dir with the package's own `__path__`, as text.
    """
    return Path(lightconv_plugin.__path__[0]).absolute()


def configs_dir() -> Path:
    """The folder of configurations: inside an installed package, beside the package in a checkout."""
    installed = package_dir() / "configs"
    return installed if installed.is_dir() else package_dir().parent / "configs"


def workspace() -> Path:
    """What relative paths of configurations, and the folders data/ and runs/, are relative to.

    LIGHTCONV_HOME names it (the scripts of a checkout set it); without that it is the working directory.
    """
    return Path(os.environ.get("LIGHTCONV_HOME") or os.getcwd()).absolute()
