"""The list of patches: names, reasons and tests; applying them twice, leaving some out."""

import re

import pytest

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.distributed import utils

import lightconv_plugin.models  # noqa: F401 (the patches)
from lightconv_plugin import compat
from lightconv_plugin.compat.registry import patch
from lightconv_plugin.errors import InputError
from tests import programs
from tests.fairseq_cli import REPOSITORY
from tests.warm_python import warm_python


def test_a_patch_is_named_after_its_function_and_explained_by_its_docstring():
    @patch(versions="fairseq 0.12.2")
    def an_example():
        """fairseq does this.

        And more of it.
        """

    assert (an_example.name, an_example.reason) == ("an_example", "fairseq does this.")
    assert an_example.versions == "fairseq 0.12.2" and an_example.needed()


def test_every_patch_is_explained_and_tested():
    """The file of tests in its row on the page names it, by itself or in the name of a test."""
    page = (REPOSITORY / "docs/fairseq_bugs.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^\| `(\w+)` \|.*\| `(tests/compat/test_\w+\.py)`[^|]*\|$", page, re.MULTILINE))
    assert files.keys() == set(compat.PATCHES)
    for name, declared in compat.PATCHES.items():
        assert declared.reason.endswith(".") and len(declared.reason) > 40 and declared.versions, name
        text = (REPOSITORY / files[name]).read_text(encoding="utf-8")
        assert re.search(rf"\b{name}\b|\bdef test_(without_)?{name}_", text), f"{files[name]} does not name {name}"


def test_patches_are_applied_once_and_listed():
    before = utils.call_main, utils._broadcast_object_slow, compat.applied()
    compat.apply()
    assert (utils.call_main, utils._broadcast_object_slow, compat.applied()) == before
    names = [applied.name for applied in compat.applied()]
    assert {"checkpoint_broadcast", "processes_without_gpu", "validate_without_task"} <= set(names)
    assert names == [name for name in compat.PATCHES if name in names]
    assert names[-1] == "settings_without_eval"  # it acts on the modules that the others have loaded


RANDOM_NUMBERS = """
import torch
torch.manual_seed(0)
expected = torch.rand(3)
torch.manual_seed(0)
import lightconv_plugin
assert lightconv_plugin.compat.applied() and torch.equal(torch.rand(3), expected)
"""


def test_what_is_drawn_after_the_seed_is_the_same_with_patches():
    programs.run(warm_python(), "-c", RANDOM_NUMBERS)


def test_an_unknown_patch_cannot_be_left_out(monkeypatch):
    monkeypatch.setenv("LIGHTCONV_SKIP_PATCHES", "bf16_without_xla, surprise")
    with pytest.raises(InputError, match="there is no patch surprise; allowed: numpy_compat, batch_buckets"):
        compat.apply()
