"""Exported directories that are damaged, or were made to do harm: one line each, and nothing in them is executed."""

import ctypes
import io
import os
import pickle
import random
import shutil
import time

import pytest
import torch

pytest.importorskip("safetensors")

from lightconv_plugin.checkpoints.exported import load_model, open_exported
from lightconv_plugin.errors import InputError
from lightconv_plugin.text.shortlist import read_lists
from tests.checkpoints import exports
from tests.checkpoints.export_damage import DAMAGE, FC1, LISTED, SMALL, RunsACommand, drop, set_tensor
from tests.memory import reset_peak, status


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A directory of float32, and one of 8 bits with a shortlist; to be read only."""
    folder = tmp_path_factory.mktemp("originals")
    model = exports.build_model(exports.pair())
    lists = {"float32": None, "int8": exports.shortlist(folder)}
    return {
        weights: exports.export(folder / weights, model, weights=weights, shortlist=file)
        for weights, file in lists.items()
    }


@pytest.fixture
def made(originals, tmp_path):
    """A copy of the first, to be damaged."""
    return shutil.copytree(originals["float32"], tmp_path / "model")


@pytest.fixture
def small(originals, tmp_path):
    """A copy of the second."""
    return shutil.copytree(originals["int8"], tmp_path / "model")


def use(directory):
    """All that somebody does who translates."""
    exported = open_exported(directory)
    load_model(exported)
    exported.source_text.encode()("The dog.")
    exported.target_text.decode()(["dog"])
    if exported.shortlist is not None:
        read_lists(exported.shortlist, exported.source, exported.target)


def refused(directory) -> str:
    """The message with which a directory is refused: one line of a readable length, quickly and without much memory."""
    begin, measured = time.process_time(), reset_peak()
    before = status("VmRSS") if measured else 0.0
    with pytest.raises(InputError) as caught:
        use(directory)
    assert time.process_time() - begin < 10 and (not measured or status("VmHWM") - before < 200)
    text = str(caught.value)
    assert "\n" not in text and text.isprintable() and len(text) < 700
    assert str(directory) in text or "tokeniser" in text or "Moses" in text
    return text


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged(name, made):
    damage, said = DAMAGE[name]
    damage(made)
    assert said in refused(made)


def test_the_originals_are_accepted(originals):
    for directory in originals.values():
        use(directory)


@pytest.mark.parametrize("name", SMALL)
def test_damaged_8_bits(name, small):
    damage, said = SMALL[name]
    damage(small)
    assert said in refused(small)


@pytest.mark.parametrize("name", LISTED)
def test_damaged_shortlists(name, small):
    damage, said = LISTED[name]
    damage(small)
    assert said in refused(small)


def test_a_shortlist_of_any_size_is_not_read(small, monkeypatch):
    monkeypatch.setattr("lightconv_plugin.checkpoints.exported._TEXT_FILE", 10_000)
    use(small)
    with (small / "shortlist.txt").open("ab") as file:
        file.truncate(10_001)
    assert "shortlist.txt has 10,001 bytes: at most 10,000 are read" in refused(small)


def test_a_scale_that_is_not_json(made):
    content = (made / "config.json").read_text().replace('"embed_scale": 1.0', '"embed_scale": 1e999')
    (made / "config.json").write_text(content)
    assert "embed_scale must be a number, got inf" in refused(made)


@pytest.mark.parametrize("form", ["torch.save", "legacy", "pickle"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "dict.de.txt", "source.bpe", "text.json"])
def test_nothing_is_unpickled(form, name, made, tmp_path):
    marker = tmp_path / "executed"
    content = io.BytesIO()
    if form == "pickle":
        pickle.dump(RunsACommand(marker), content)
    else:
        torch.save({FC1: RunsACommand(marker)}, content, _use_new_zipfile_serialization=form == "torch.save")
    (made / name).write_bytes(content.getvalue())
    for other in ("pytorch_model.bin", "training_args.bin", "model.pt"):  # which nobody reads
        (made / other).write_bytes(content.getvalue())
    refused(made)
    assert not marker.exists()


def test_no_code_of_the_directory_is_imported(made, monkeypatch):
    """As transformers does where it is told to trust it; not even where Python would find it."""
    names = {"AutoModel": "modeling_lightconv.Model", "AutoTokenizer": "tokenization.Tokenizer"}
    for name in names.values():
        (made / name).with_suffix(".py").write_text("raise SystemExit('imported')")
    exports.change(made / "config.json", auto_map=names)
    monkeypatch.syspath_prepend(made)
    use(made)


def test_a_directory_that_is_none(tmp_path):
    assert "cannot be read: No such file or directory" in refused(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    assert "not a directory of an exported model but a file" in refused(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "incomplete: there is no config.json" in refused(tmp_path / "empty")
    (tmp_path / "empty/checkpoint_best.pt").touch()
    assert "empty is a folder of checkpoints: name one of them" in refused(tmp_path / "empty")
    with pytest.raises(InputError, match="cannot be read"):
        open_exported("a\0b")


@pytest.fixture
def bound_by_modes():
    """Takes the two capabilities from this thread by which root may read every file of its own."""
    if os.geteuid() != 0:
        yield
        return
    libc, header, capabilities = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if not hasattr(libc, "capset"):
        pytest.skip("root may read everything")
    assert libc.capget(header, capabilities) == 0
    before = capabilities[0]  # those in effect; the permitted ones, which stay, allow to take them back
    capabilities[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, capabilities) == 0
    yield
    capabilities[0] = before
    assert libc.capset(header, capabilities) == 0


@pytest.mark.usefixtures("bound_by_modes")
def test_what_may_not_be_read(made):
    (made / "model.safetensors").chmod(0)
    assert "model.safetensors" in refused(made)
    made.chmod(0)
    try:
        assert "cannot be read: Permission denied" in refused(made)
    finally:
        made.chmod(0o700)


def test_links_inside(made):
    (made / "dict.de.txt").rename(made / "words.txt")
    (made / "dict.de.txt").symlink_to("words.txt")
    use(made)


def link(path, target):
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


@pytest.mark.parametrize("folder", ["", "float32", "a/snapshots/b/c"])
def test_links_to_the_cache_of_the_hub(folder, made, tmp_path):
    """A repository's snapshot has links to its blobs, or through them to those of the cache; no others may leave it."""
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots/123" / folder, repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(made.iterdir())):
        shutil.copy(path, blobs / str(number))
        link(snapshot / path.name, blobs / str(number))
    use(snapshot)
    digest = "ab" * 32
    shared = tmp_path / "blobs" / "ab" / digest
    shared.parent.mkdir(parents=True)
    shutil.copy(made / "model.safetensors", shared)
    link(blobs / "weights", shared)
    link(snapshot / "model.safetensors", blobs / "weights")
    use(snapshot)
    content = (made / "text.json").read_bytes()
    for elsewhere in (
        tmp_path / "secret",
        tmp_path / "blobs" / digest,
        tmp_path / "blobs" / "ab" / "secret",
        tmp_path / "blobs" / "cd" / digest,
        tmp_path / "models--a--c" / "blobs" / "0",
        blobs / "folder" / "0",
        repository / "snapshots" / "124" / "text.json",
        repository / "snapshots" / "blobs" / "0",
        tmp_path / "b" / "blobs" / "0",
    ):
        elsewhere.parent.mkdir(parents=True, exist_ok=True)
        elsewhere.write_bytes(content)
        for through in (elsewhere, blobs / "through"):
            if through != elsewhere:
                link(through, elsewhere)
            link(snapshot / "text.json", through)
            assert "a link to a file outside its directory" in refused(snapshot), elsewhere
    use(made)


def test_links_to_blobs_that_are_not_the_hubs(made, tmp_path):
    snapshot = tmp_path / "mine" / "snapshots" / "123"
    shutil.copytree(made, snapshot)
    (tmp_path / "mine" / "blobs").mkdir()
    (snapshot / "text.json").rename(tmp_path / "mine" / "blobs" / "0")
    link(snapshot / "text.json", tmp_path / "mine" / "blobs" / "0")
    assert "a link to a file outside its directory" in refused(snapshot)


def test_a_file_that_is_changed_after_it_was_opened(made):
    exported = open_exported(made)
    set_tensor(FC1, lambda t: t.t().contiguous())(made)
    with pytest.raises(InputError, match="was changed while it was read"):
        load_model(exported)
    drop(FC1)(made)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        load_model(exported)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "text.json", "dict.de.txt", "source.bpe", "shortlist.txt"]
)
def test_random_damage_is_an_input_error_or_nothing(name, small):
    """Bytes changed, left out and repeated anywhere: no other exception, no crash."""
    path = small / name
    whole, draw = path.read_bytes(), random.Random(name)
    for _ in range(25):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(min(len(content), 6000))  # of the weights: the header, and a little more
            action = draw.randrange(4)
            if action == 0:
                content[at] = draw.randrange(256)
            elif action == 1:
                del content[at : at + draw.randint(1, 50)]
            elif action == 2:
                content[at:at] = content[max(0, at - draw.randint(1, 50)) : at]
            else:
                content[at : at + 1] = draw.choice([b"-", b"9" * 12, b"null", b'"', b"[", b"}", b"\0", b"1e99"])
        path.write_bytes(content)
        try:
            use(small)
        except InputError as error:
            assert "\n" not in str(error) and len(str(error)) < 900
