"""What a command was told to write replaces nothing without --force; commands with names of their own resume."""

import os

import pytest

from lightconv_plugin.cli import main
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import DirectoryKind, check_new_directory, check_new_file

# OUT: an existing file. None of the inputs exists: the refusal comes before any work.
FILES = {
    "average": "--inputs none.pt --output OUT",
    "convert": "none.pt OUT --to plugin",
    "report": "none -o OUT",
    "report --figure": "none -o page.html --figure OUT.png",
    "score": "--sys none --ref none --lang de --output OUT",
    "shortlist": "none --output OUT",
    "translate": "none --output OUT",
    "tune": "none none --output OUT",
}
# tests/cli/test_export.py, tests/deployment/test_deploy.py and tests/recipes/distillation try these.
DIRECTORIES = ("export", "deploy", "distill")
# The help of a command whose names are its own says what a second run does.
OWN_NAMES = {
    "prepare": "run the same command again to resume",
    "train": "Rerun the same command to resume",
    "reproduce": "Rerun the same command to resume",
    "demo": "rerun the same command to resume",
    "released": "An interrupted download is resumed by the same command",
    "evaluate": "replace those of an earlier run",
    "perplexity": "replace those of an earlier run",
}
WRITE_NOTHING = ("doctor", "user-dir", "build")  # build: only its cache


def test_every_command_is_of_one_kind():
    kinds = [{name.partition(" ")[0] for name in FILES} | {*DIRECTORIES}, {*OWN_NAMES}, {*WRITE_NOTHING}]
    assert sorted(name for kind in kinds for name in kind) == sorted(
        name for group in main.COMMANDS.values() for name in group
    )
    for name in set().union(*kinds):
        assert ("--force" in main.subparser(name)._option_string_actions) == (name in kinds[0]), name
    for name, said in OWN_NAMES.items():
        assert said in " ".join(main.subparser(name).format_help().split()), name


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_replaced_only_with_force(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [name.partition(" ")[0], *FILES[name].split()]
    (out,) = (tmp_path / word for word in words if word.startswith("OUT"))
    out.write_text("mine")
    refusal = f"{out.name} exists already: give --force to replace it"
    (tmp_path / "none.pt").write_text("no checkpoint")  # average and convert compare it with OUT first
    assert main.main(words) == 2
    assert refusal in capsys.readouterr().err
    assert main.main([*words, "--force"]) == 2  # the input is missing or useless
    assert refusal not in capsys.readouterr().err and out.read_text() == "mine"


def test_an_empty_file_and_a_device_lose_nothing(tmp_path):
    (tmp_path / "empty").touch()
    for path in (tmp_path / "empty", tmp_path / "new", tmp_path.joinpath("/dev/null")):
        check_new_file(path, force=False)
    (tmp_path / "link").symlink_to(tmp_path / "full")
    check_new_file(tmp_path / "link", force=False)
    (tmp_path / "full").write_text("x")
    with pytest.raises(InputError, match="link exists already"):
        check_new_file(tmp_path / "link", force=False)


def test_a_read_only_folder_is_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "old").write_text("x")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    for name in ("new", "old"):
        with pytest.raises(InputError, match=f"cannot write .*{name}: the folder {tmp_path} is read-only"):
            check_new_file(tmp_path / name, force=True)
    check_new_file(tmp_path.joinpath("/dev/null"), force=False)


@pytest.mark.parametrize(
    ("files", "force", "said"),
    [
        ((), False, None),
        (("mark",), False, "d is a kind already: give `force` to replace it"),
        (("mark", "dict.de.txt"), True, None),
        (("mark", "b", "a"), True, "d has files that are not part of a kind: a, b; move them away"),
        (("other",), True, "d is not empty, and not a kind: choose another directory"),
    ],
)
def test_a_directory_is_replaced_by_its_own_kind(files, force, said, tmp_path):
    kind = DirectoryKind("a kind", lambda path: (path / "mark").exists(), ("mark", "dict.*.txt"))
    (tmp_path / "d").mkdir()
    for name in files:
        (tmp_path / "d" / name).touch()
    if said is None:
        check_new_directory(tmp_path / "d", force, kind)
        return
    with pytest.raises(InputError, match=said):
        check_new_directory(tmp_path / "d", force, kind)


def test_a_directory_that_cannot_be_made_is_refused_before_any_work(tmp_path, monkeypatch):
    kind = DirectoryKind("a kind", lambda path: True, ("*",))
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name, missing in (("none/d", "none"), ("file/d", "file"), ("link/d", "gone")):
        with pytest.raises(InputError, match=f"cannot write .*/{name}: there is no folder {tmp_path / missing}"):
            check_new_directory(tmp_path / name, False, kind)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(InputError, match=f"cannot write .*/d: the folder {tmp_path} is read-only"):
        check_new_directory(tmp_path / "d", False, kind)
