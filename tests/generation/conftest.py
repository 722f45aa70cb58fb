"""The kinds of search, and checkpoints to translate with."""

import pytest

from tests.generation.recordings import NO_KERNELS, SEARCHES, searching


@pytest.fixture
def no_kernels():
    """Searches find no CPU kernels; the reason that they are given."""
    with searching("torch"):
        yield NO_KERNELS.reason


@pytest.fixture(params=SEARCHES)
def search(request):
    """The searches in turn."""
    with searching(request.param):
        yield request.param


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The data-bin of a corpus; to be read only."""
    pytest.importorskip("fairseq")
    from tests.generation import translation_toys as toys

    return toys.make_corpus(tmp_path_factory.mktemp("a corpus"))


@pytest.fixture(scope="session")
def checkpoints(data, tmp_path_factory):
    """Of models for it, by the architecture; to be read only."""
    from tests.generation import translation_toys as toys

    folder = tmp_path_factory.mktemp("check points")
    names = ("dynamicconv", "lightweightconv", "talkconv", "transformer")
    return {name: toys.make_checkpoint(folder / f"{name}.pt", data, name, seed) for seed, name in enumerate(names)}
