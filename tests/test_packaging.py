"""The package as it is installed: alone, beside a checkout, and in an environment without fairseq."""

import os
import subprocess
import sys

import pytest

REGISTERED = """
import sys, argparse
from fairseq import utils
from fairseq.models import ARCH_MODEL_REGISTRY as registry
utils.import_user_module(argparse.Namespace(user_dir=sys.argv[1]))
import lightconv_plugin
print(lightconv_plugin.__path__[0])
assert registry["dynamicconv_wmt_en_de_big"].__module__ == "lightconv_plugin.models.architectures"
"""

LOOKS_FIRST = "import importlib.util, lightconv_plugin; importlib.util.find_spec('fairseq')"

FIRST_IMPORTS = [
    "import lightconv_plugin.ops",
    "import lightconv_plugin.modules.convolutions",
    "import lightconv_plugin.models.config",
    "import fairseq",
    LOOKS_FIRST,
]


def python(*arguments, path, cwd):
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package as `pip install .` lays it down."""
    folder = tmp_path_factory.mktemp("site")
    repository = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    # A copy, because setuptools writes its build folder beside setup.py.
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "README.md", "lightconv_plugin"):
        subprocess.run(["cp", "-r", os.path.join(repository, name), source], check=True)
    subprocess.run([*command, str(folder), str(source)], check=True)
    return folder


@pytest.fixture
def elsewhere(tmp_path):
    return tmp_path


def test_user_dir_of_an_installed_copy(installed, elsewhere):
    user_dir = python("-m", "lightconv_plugin.tools", "user-dir", path=installed, cwd=elsewhere)
    assert user_dir == str(installed / "lightconv_plugin")
    assert python("-c", REGISTERED, user_dir, path=installed, cwd=elsewhere) == user_dir


def test_a_checkout_given_by_user_dir_beside_an_installed_copy(installed, elsewhere, repository):
    checkout = str(repository / "lightconv_plugin")
    assert python("-c", REGISTERED, checkout, path=installed, cwd=elsewhere) == checkout


@pytest.mark.parametrize("first", FIRST_IMPORTS)
def test_either_import_may_come_first(first, repository, elsewhere):
    """A program that has used the operators must still get the models when fairseq imports the user directory."""
    script = first + "\n" + REGISTERED
    user_dir = str(repository / "lightconv_plugin")
    assert python("-c", script, user_dir, path=repository, cwd=elsewhere) == user_dir


def test_the_operators_alone(installed, elsewhere):
    """With torch and nothing else: no fairseq, not even when it is installed."""
    script = """
import sys
import torch
from lightconv_plugin.ops import dynamicconv
dynamicconv(torch.randn(5, 2, 8), torch.randn(5, 2, 4, 3), 2)
foreign = {m.split(".")[0] for m in sys.modules} & {"fairseq", "omegaconf", "hydra", "sacrebleu", "sentencepiece"}
assert not foreign, foreign
"""
    python("-c", script, path=installed, cwd=elsewhere)
