"""Fixtures of a model that is exported and deployed once for all tests, which takes seconds."""

import pytest

pytest.importorskip("safetensors")

from lightconv_plugin.checkpoints.exported import load_model, open_exported
from lightconv_plugin.cli import main
from lightconv_plugin.deployment import export_start, export_step, package
from tests.checkpoints import exports
from tests.deployment import toys


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """An exported encoder-decoder with several mixers."""
    model = toys.sharp(toys.pair(["dynamic", "attention"]))
    return exports.export(tmp_path_factory.mktemp("exported") / "model", model)


@pytest.fixture(scope="session")
def deployed_model(exported):
    return load_model(open_exported(exported))


@pytest.fixture(scope="session")
def graphs(deployed_model):
    """Its graphs."""
    return export_start(deployed_model), export_step(deployed_model)


@pytest.fixture(scope="session")
def deployed(exported, graphs, tmp_path_factory):
    """What `lightconv deploy --format torch.export` writes of it; the graphs are not made twice."""
    output = tmp_path_factory.mktemp("deployed") / "out"
    with pytest.MonkeyPatch.context() as patch:
        for name, graph in zip(("export_start", "export_step"), graphs, strict=True):
            patch.setattr(package, name, lambda model, graph=graph: graph)
        assert main.main(["deploy", str(exported), str(output), "--format", "torch.export"]) == 0
    return output
