"""The patch `nan_report`: gradients that become infinite end a training with the name of a module."""

import pytest

pytest.importorskip("fairseq", reason="fairseq is not installed")

from tests.fairseq_cli import RECIPE, SIZE, USER_DIR, run


@pytest.mark.parametrize("arch, sizes", [("dynamicconv", SIZE), ("transformer", SIZE[:-4])])
def test_the_module_is_named(arch, sizes, data, tmp_path):
    """After an update with a rate of 10³⁰."""

    def train(folder, **more):
        options = [*sizes, *RECIPE, "--max-update=4", "--lr=1e30", "--save-dir", tmp_path / folder]
        return run("train", data, "--user-dir", USER_DIR, "--arch", arch, *options, fails=True, **more)

    said = train("patched")
    assert "FloatingPointError: gradients are Nan/Inf" in said and "StopIteration" not in said
    assert any("detected in output of" in line and line.endswith("backward") for line in said.splitlines())
    assert "StopIteration" in train("plain", LIGHTCONV_SKIP_PATCHES="nan_report")
