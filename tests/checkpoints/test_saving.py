"""Writing an exported model: whole or not at all, nothing of the user's replaced, and what cannot be written is named.

More kills, and full disks, are in tests/robustness/test_torture.py.
"""

import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")

from lightconv_plugin import files
from lightconv_plugin.checkpoints.exported import SearchDefaults, load_model, open_exported
from lightconv_plugin.checkpoints.saving import Side
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import atomic_directory
from lightconv_plugin.text.recipe import Recipe
from lightconv_plugin.text.sides import TextSide
from tests.checkpoints import exports


def refused(said, directory, *arguments, **options):
    """The export ends with this error, and changes nothing."""

    def there():
        return {path: path.read_bytes() if path.is_file() else None for path in directory.parent.rglob("*")}

    (directory.parent / "codes").write_text(exports.MERGES)
    before = there()
    with pytest.raises(InputError, match=said):
        exports.export(directory, *arguments, **options)
    assert there() == before


def test_what_is_there_is_not_replaced(tmp_path):
    (tmp_path / "file").write_text("mine")
    refused("file exists and is not a directory", tmp_path / "file", force=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/mine.txt").write_text("mine")
    for force in (False, True):
        refused("folder is not empty, and not an exported model", tmp_path / "folder", force=force)
    (tmp_path / "folder/config.json").write_text('{"model_type": "bert"}')
    refused("folder is not empty, and not an exported model", tmp_path / "folder", force=True)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    refused("link exists and is not a directory", tmp_path / "link")


def test_an_empty_directory_may_be_there(tmp_path):
    (tmp_path / "m").mkdir()
    open_exported(exports.export(tmp_path / "m"))


def test_an_exported_model_is_replaced_by_force_alone(tmp_path):
    model = exports.build_model(exports.pair())
    exports.export(tmp_path / "m", model)
    refused("m is an exported model already: give `force` to replace it", tmp_path / "m", model)
    exports.export(tmp_path / "m", model, weights="int8", force=True)
    assert open_exported(tmp_path / "m").settings.weights == "int8"
    (tmp_path / "m/notes.txt").write_text("mine")
    refused(
        r"m has files that are not part of an exported model: notes\.txt; move them away",
        tmp_path / "m",
        model,
        force=True,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"m", "codes"}


def test_a_link_to_a_directory_stays_one(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    exports.export(tmp_path / "link")
    exports.export(tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    open_exported(tmp_path / "real")


def test_what_cannot_be_replaced_is_said(tmp_path, monkeypatch):
    """The shell would stay in a directory that is no more; and a file system stays where it is mounted."""
    (tmp_path / "m/in").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "m/in")
    for directory in (Path("."), tmp_path / "m/in", tmp_path / "m"):
        refused(f"{directory} is or contains the working directory", directory)
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(tmp_path / "disk"))
    refused("disk is a mount point, which cannot be replaced: name a new directory in it", tmp_path / "disk")
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"/ is a mount point"), atomic_directory(Path("/"), replace=True):
        pass


def test_a_length_penalty_that_transformers_refuses(tmp_path):
    """Kept or refused: the card must not claim what is lost."""
    exports.export(tmp_path / "m", search=SearchDefaults(num_beams=1))
    refused(
        "length penalty 0.3 needs a beam of at least 2", tmp_path / "n", search=SearchDefaults(1, length_penalty=0.3)
    )


def test_there_is_no_folder_for_it(tmp_path):
    with pytest.raises(InputError, match="there is no folder"), atomic_directory(tmp_path / "a/b"):
        pass


def test_parameters_that_a_type_cannot_hold(tmp_path):
    model = exports.build_model(exports.pair())
    with torch.no_grad():
        model.encoder.layers[0].fc1.weight[3, 4] = 70000.0
    said = r"`dtype` float16: encoder.layers.0.fc1.weight has values up to 70000, beyond 65504"
    refused(said, tmp_path / "m", model, weights="float16")
    exports.export(tmp_path / "m", model, weights="bfloat16")
    wide = exports.build_model(exports.pair()).double()
    with torch.no_grad():
        wide.encoder.layers[0].fc1.weight[3, 4] = 1e39
    for weights in ("float32", "int8"):
        refused(
            f"`dtype` {weights}: encoder.layers.0.fc1.weight has values up to 1e.39",
            tmp_path / "n",
            wide,
            weights=weights,
        )
    for value in (float("nan"), float("inf")):
        with torch.no_grad():
            model.encoder.layers[0].fc1.weight[3, 4] = value
        for weights in ("float32", "int8"):
            refused("fc1.weight has NaN or infinite values", tmp_path / "n", model, weights=weights)


def test_what_does_not_belong_together(tmp_path):
    side = Side("en", exports.dictionary(150), TextSide(Recipe("none", ""), "words"))
    refused(
        "dictionary of the target has 150 entries with fairseq's own, but the model's 160", tmp_path / "m", target=side
    )
    refused("`source` is required for a model with an encoder", tmp_path / "m", source=None, max_source_positions=None)
    side = Side("de", exports.dictionary(), TextSide(Recipe("none", ""), "words"))
    refused("must be two different names", tmp_path / "m", target=side)
    side = Side("../en", exports.dictionary(), TextSide(Recipe("none", ""), "words"))
    refused("must be the name of a language", tmp_path / "m", target=side)
    refused("`dtype` must be one of float32, bfloat16, float16, int8, got 'int4'", tmp_path / "m", weights="int4")
    config = exports.ModelConfig(exports.stack(encoder_dim=exports.DIM, causal=False), exports.stack(causal=False))
    refused("mixers of a decoder must be causal", tmp_path / "m", exports.build_model(config))


def test_merges_of_both_sides(tmp_path):
    """One file where they are the same, two where they are not; and so for models of sentencepiece."""
    exports.export(tmp_path / "m")
    assert open_exported(tmp_path / "m").target_text.file.name == "source.bpe"
    (tmp_path / "others").write_text("#version: 0.2\nd o\n")
    side = Side("en", exports.dictionary(), TextSide(Recipe("moses", "en"), "bpe", tmp_path / "others"))
    found = open_exported(exports.export(tmp_path / "n", target=side))
    assert (found.source_text.file.name, found.target_text.file.name) == ("source.bpe", "target.bpe")
    assert found.target_text.encode()("dog") == ["do@@", "g"]
    models = {}
    for which, lang in (("source", "de"), ("target", "en")):
        (tmp_path / which).write_text(which)
        text = TextSide(Recipe("none", lang), "sentencepiece", tmp_path / which)
        models[which] = Side(lang, exports.dictionary(), text)
    found = open_exported(exports.export(tmp_path / "s", **models))
    assert [side.file.read_text() for side in (found.source_text, found.target_text)] == ["source", "target"]


def test_shortlists(tmp_path):
    """One is replaced like the rest. Refused: of other dictionaries, and for a model that does not translate."""
    file, model = exports.shortlist(tmp_path), exports.build_model(exports.pair())
    content = file.read_bytes()
    exports.export(tmp_path / "m", model, shortlist=file)
    exports.export(tmp_path / "m", model, shortlist=tmp_path / "m/shortlist.txt", force=True)
    assert open_exported(tmp_path / "m").shortlist.read_bytes() == content
    exports.export(tmp_path / "m", model, force=True)
    assert not (tmp_path / "m/shortlist.txt").exists()
    language_model = exports.build_model(exports.language_model())
    refused("`shortlist` is not valid for a language model", tmp_path / "n", language_model, shortlist=file)
    refused("no such file: .*nowhere", tmp_path / "n", model, shortlist=tmp_path / "nowhere")
    file.write_text("v1 w1 1\nw1 v1 1\n")
    refused(r"lists\.txt has 2 words .* line 2: source word 'v1'", tmp_path / "n", model, shortlist=file)


def fork(work) -> int:
    """A child that does this work; its number."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


@pytest.mark.parametrize("before", ["nothing", "an exported model"])
def test_a_killed_export_leaves_all_or_what_was_there(before, tmp_path):
    old, new = (exports.build_model(exports.pair(ffn_dim=512), seed) for seed in (1, 2))
    begin = time.monotonic()
    exports.export(tmp_path / "trial", new)
    seconds = time.monotonic() - begin
    draw, outcomes = random.Random(before), set()
    for number in range(8):
        place = tmp_path / f"m{number}"
        if before != "nothing":
            exports.export(place, old)
        child = fork(lambda place=place: exports.export(place, new, force=True))
        time.sleep(draw.uniform(0, 1.2 * seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = load_model(open_exported(place)) if place.exists() else None
        if found is not None:
            value = found.encoder.layers[0].fc1.weight
            found = next(m for m in (old, new) if torch.equal(value, m.encoder.layers[0].fc1.weight))
        outcomes.add({None: "nothing", old: "old", new: "new"}[found])
        exports.export(place, new, force=True)
        assert not list(tmp_path.glob(".*")), "what a killed process left is removed"
    assert outcomes <= ({"nothing", "new"} if before == "nothing" else {"old", "new"})
    assert outcomes & {"nothing", "old"}, "no kill came in time"


def test_without_an_exchange_of_names(tmp_path, monkeypatch):
    """As on file systems that do not know it."""
    import ctypes

    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())
    exports.export(tmp_path / "m")
    exports.export(tmp_path / "m", weights="int8", force=True)
    assert open_exported(tmp_path / "m").settings.weights == "int8"
    assert {path.name for path in tmp_path.iterdir()} == {"m", "codes"}

    rename = os.rename

    def fail(one, other):
        if Path(one).suffix == ".tmp":
            raise OSError(5, "I/O error", str(other))
        rename(one, other)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="I/O error"):
        exports.export(tmp_path / "m", force=True)
    assert open_exported(tmp_path / "m").settings.weights == "int8"
    assert {path.name for path in tmp_path.iterdir()} == {"m", "codes"}


def test_an_error_leaves_nothing(tmp_path, monkeypatch):
    exports.export(tmp_path / "m")
    inode = (tmp_path / "m").stat().st_ino
    for force in (True, False):
        place = tmp_path / ("m" if force else "n")
        with monkeypatch.context() as patch:
            patch.setattr(files, "sync", lambda path: (_ for _ in ()).throw(OSError(5, "I/O error", str(path))))
            with pytest.raises(OSError, match="I/O error"):
                exports.export(place, force=force)
    assert {path.name for path in tmp_path.iterdir()} == {"m", "codes"}
    assert (tmp_path / "m").stat().st_ino == inode


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    """With a limit on the size of files, as a full disk is not always to be had."""
    model = exports.build_model(exports.pair())
    (tmp_path / "codes").write_text(exports.MERGES)

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(OSError, match=r"File too large: '.*model\.safetensors'"):
            exports.export(tmp_path / "m", model)

    assert os.waitpid(fork(work), 0)[1] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"codes"}
