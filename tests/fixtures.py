"""Fixtures that tests of several folders share."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import fairseq_cli
from tests.ops.toy_libraries import broken, plain  # noqa: F401  (fixtures)


def made_once(tmp_path_factory, name: str, make) -> Path:
    """The folder that `make(folder)` fills: once for all processes of pytest-xdist. Tests must not write to it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = base / name, base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def _corpus(folder: Path) -> None:
    data, english = fairseq_cli.binarise(folder), folder / "english"
    english.mkdir()
    shutil.copy(data / "dict.en.txt", english / "dict.txt")
    for path in data.glob("*.de-en.en.*"):
        shutil.copy(path, english / path.name.replace(".de-en.en", ""))


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory):
    """A folder of binarised data, German to English, of a dozen words.

    Beside it: the text, and "english", its English side as the data of language models.
    """
    pytest.importorskip("fairseq")
    return made_once(tmp_path_factory, "a corpus", _corpus) / "data-bin"


@pytest.fixture(scope="session")
def toy_training(toy_data, tmp_path_factory):
    """The folder of four epochs of a small DynamicConv on them, with the checkpoints of every second update."""
    return made_once(
        tmp_path_factory,
        "check points",
        lambda folder: fairseq_cli.run(
            *("train", toy_data, "--user-dir", fairseq_cli.USER_DIR, "--arch", "dynamicconv_iwslt_de_en"),
            *(*fairseq_cli.SIZE, *fairseq_cli.RECIPE, "--lr", "0.02", "--share-decoder-input-output-embed"),
            *("--save-dir", folder, "--max-epoch", 4, "--save-interval-updates", 2, "--keep-best-checkpoints", 3),
        ),
    )


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


@pytest.fixture
def refusal(capsys):
    """What `lightconv` says to these words, which it refuses."""
    from lightconv_plugin.cli.main import main

    def said(*words):
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    return said


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 300 kB."""
    place = tmp_path / "small disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)
