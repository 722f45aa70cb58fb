"""Fixtures that tests of several folders share."""

import pytest

from tests import fairseq_cli
from tests.ops.toy_libraries import broken, plain  # noqa: F401  (fixtures)


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory):
    """A folder of binarised data, German to English, of a dozen words."""
    pytest.importorskip("fairseq")
    return fairseq_cli.binarise(tmp_path_factory.mktemp("a corpus"))


@pytest.fixture(scope="session")
def toy_training(toy_data, tmp_path_factory):
    """The folder of four epochs of a small DynamicConv on them; not to be written to."""
    folder = tmp_path_factory.mktemp("check points")
    fairseq_cli.run(
        *("train", toy_data, "--user-dir", fairseq_cli.USER_DIR, "--arch", "dynamicconv_iwslt_de_en"),
        *(*fairseq_cli.SIZE, *fairseq_cli.RECIPE, "--lr", "0.02", "--share-decoder-input-output-embed"),
        *("--save-dir", folder, "--max-epoch", 4),
    )
    return folder


@pytest.fixture
def their_task():
    """A translation task with one dictionary of 30 words for both sides."""
    pytest.importorskip("fairseq")
    from tests.models.toys import dictionary, task

    return task(dictionary(30))


@pytest.fixture
def output(tmp_path):
    """A file to write, alone in its folder."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "average.pt"


@pytest.fixture
def files(tmp_path):
    """Writes two sides and returns the options for them."""
    from tests.scoring.corpora import write

    def make(hypotheses, references):
        return (
            "--sys", write(tmp_path / "sys", hypotheses), "--ref", write(tmp_path / "ref", references),
        )  # fmt: skip

    return make
