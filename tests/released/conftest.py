"""A server of the miniatures, and an empty cache."""

import pytest

from lightconv_plugin.cli import main
from lightconv_plugin.downloads import download
from tests.recipes.data.archive_server import LOCAL, serve


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    from tests.released.archives import World

    return World(tmp_path_factory.mktemp("released"))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("LIGHTCONV_HOME", str(tmp_path / "home"))
    return tmp_path / "home/released"


@pytest.fixture
def server(world, monkeypatch):
    """A server of the miniatures; between attempts nobody waits."""
    for name, value in LOCAL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    with serve(world.files) as running:
        yield running


@pytest.fixture
def lightconv(capsys):
    """Runs the command in this process: (standard output, standard error); `status`: the one expected."""

    def run(*arguments, status=0):
        found = main.main([*map(str, arguments)])
        out, err = capsys.readouterr()
        assert found == status, err
        return out, err

    return run
