"""Where configurations are found, and what is said of a name that is none."""

import re

import pytest

from lightconv_plugin import paths
from lightconv_plugin.errors import InputError
from lightconv_plugin.paths import find_config
from tests import ROOT

DYNAMIC = ROOT / "configs/multi30k_en_de/dynamicconv.yaml"


@pytest.mark.parametrize(
    "name",
    [
        "multi30k_en_de/dynamicconv",
        "multi30k_en_de/dynamicconv.yaml",
        "configs/multi30k_en_de/dynamicconv",
        "configs/multi30k_en_de/dynamicconv.yaml",
        DYNAMIC,
    ],
)
def test_a_name_or_a_path(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTCONV_HOME", raising=False)
    assert find_config(name) == DYNAMIC


def test_the_working_directory_comes_first_then_the_workspace(tmp_path, monkeypatch):
    here, home = tmp_path / "here", tmp_path / "home"
    for folder in (here, home):
        (folder / "demo").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("LIGHTCONV_HOME", str(home))
    (home / "demo/dynamicconv.yaml").touch()
    assert find_config("demo/dynamicconv") == home / "demo/dynamicconv.yaml"
    (here / "demo/dynamicconv.yaml").touch()
    assert find_config("demo/dynamicconv") == here / "demo/dynamicconv.yaml"


def test_those_of_an_installation_are_found_too(tmp_path, monkeypatch):
    package = tmp_path / "site-packages/lightconv_plugin"
    (package / "configs/demo").mkdir(parents=True)
    (package / "configs/demo/dynamicconv.yaml").touch()
    monkeypatch.setattr(paths, "package_dir", lambda: package)
    monkeypatch.chdir(tmp_path)
    for name in ("demo/dynamicconv", "configs/demo/dynamicconv.yaml"):
        assert find_config(name) == package / "configs/demo/dynamicconv.yaml"


def test_a_package_imported_by_a_link_has_its_own_configurations(tmp_path, monkeypatch):
    """`reproduce` tells a published configuration by its path."""
    real, link = tmp_path / "real", tmp_path / "link"
    (real / "lightconv_plugin").mkdir(parents=True)
    (real / "configs/demo").mkdir(parents=True)
    (real / "configs/demo/dynamicconv.yaml").touch()
    link.symlink_to(real)
    monkeypatch.setattr(paths, "package_dir", lambda: link / "lightconv_plugin")
    monkeypatch.chdir(tmp_path)
    for name in ("demo/dynamicconv", "real/configs/demo/dynamicconv.yaml", link / "configs/demo/dynamicconv.yaml"):
        assert find_config(name) == paths.configs_dir() / "demo/dynamicconv.yaml"
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "also_mine.yaml").symlink_to("mine.yaml")
    assert find_config("also_mine") == tmp_path / "mine.yaml"


@pytest.mark.parametrize(
    "name, said",
    [
        ("multi30k_en_de/dynamiconv", "multi30k_en_de/dynamicconv"),
        ("configs/multi30k_en_de/dynamiconv.yaml", "multi30k_en_de/dynamicconv"),
        ("iwslt_de_en/talkconv", "iwslt14_de_en/talkconv"),
        ("multi30k_en_de", "multi30k_en_de/"),
        ("transformer", "/transformer"),
    ],
)
def test_a_wrong_name_gets_the_nearest_ones(name, said):
    with pytest.raises(InputError) as refused:
        find_config(name)
    text = str(refused.value)
    found = re.fullmatch(rf"there is no configuration {re.escape(name)}: did you mean (.*)\?", text)
    alike = found[1].split(" or ")
    assert said in alike[0] and len(alike) <= 3
    assert all((ROOT / f"configs/{known}.yaml").is_file() for known in alike)


def test_a_name_like_no_other():
    with pytest.raises(InputError, match="there is no configuration zzz: give a path, or a name such as cnndm/"):
        find_config("zzz")


def test_other_suffixes():
    assert find_config("cnndm/generate.args") == find_config("cnndm/generate", ".args")
    assert find_config("cnndm/generate", ".args") == ROOT / "configs/cnndm/generate.args"
    with pytest.raises(InputError, match=r"did you mean cnndm/generate\.args\?"):
        find_config("cnndm/generat.args", ".args")
