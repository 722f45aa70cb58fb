"""The scripts folder on the import path, and a way to start a script: those of tests/scripts."""

from tests.recipes.conftest import run_script  # noqa: F401  (a fixture; the import puts the folder on the path)
