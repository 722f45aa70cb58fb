"""Files that are hostile or in the way: archives, YAML, locks of the dead, full and read-only disks."""

import contextlib
import errno
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import pytest
import yaml

from lightconv_plugin.cli import main
from lightconv_plugin.downloads.archives import read_members, unpack, verify
from lightconv_plugin.errors import CorpusError, InputError
from lightconv_plugin.files import atomic_directory, atomic_write, check_folder, locked
from lightconv_plugin.recipes.steps import Steps
from tests import ROOT
from tests.checkpoints.fairseq_files import EPOCHS, make

# ------------------------------------------------------------------------------------------------ archives


def write_tar(path, members):
    """(name, bytes) pairs into a .tar.gz, without holding them."""
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def peak(function):
    """Bytes allocated by Python at once while a function runs."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "use",
    [
        verify,
        lambda path: unpack(path, path.parent / "out", ["x/0"], 100),
        lambda path: sum(1 for _ in read_members(path)),
    ],
    ids=["verify", "unpack", "read"],
)
def test_the_memory_does_not_grow_with_the_number_of_files(use, tmp_path):
    """An archive of a million empty files has some megabytes; the names of all of them would take a gigabyte."""
    few, many = (write_tar(tmp_path / f"{n}.tgz", ((f"x/{i}", b"") for i in range(n))) for n in (100, 4000))
    assert peak(lambda: use(many)) < peak(lambda: use(few)) + 200_000


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_no_member_that_is_not_a_file_is_made(kind, tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        info = tarfile.TarInfo("a/b")
        info.type, info.linkname = kind, "../../etc/passwd"
        tar.addfile(info)
    with pytest.raises(CorpusError, match="a/b is a link or a device, which is not unpacked"):
        unpack(tmp_path / "x.tar", tmp_path / "out", ["*"], 100)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a/../../evil", "/evil", "a\n/../../evil", "..", "."])
def test_names_in_archives(name, tmp_path):
    write_tar(tmp_path / "x.tgz", [(name, b"x")])
    with pytest.raises(CorpusError, match="leads out of the folder"):
        unpack(tmp_path / "x.tgz", tmp_path / "deep/out", ["*"], 100)
    assert not list(tmp_path.rglob("*evil*"))


# ------------------------------------------------------------------------------------------------ YAML


TAGS = {
    "apply": "!!python/object/apply:os.system ['touch {marker}']",
    "new": "!!python/object/new:os.system ['touch {marker}']",
    "name": "!!python/name:os.system",
    "module": "!!python/module:os",
}


@pytest.mark.parametrize("tag", TAGS.values(), ids=TAGS)
@pytest.mark.parametrize("place", ["train", "reproduce", "protocol.yaml", "report"])
def test_a_tag_of_python_in_yaml_is_refused(place, tag, tmp_path, monkeypatch, refusal):
    marker = tmp_path / "executed"
    text = tag.format(marker=marker)
    (tmp_path / "task").mkdir()
    config, protocol = tmp_path / "task/dynamicconv.yaml", tmp_path / "task/protocol.yaml"
    config.write_text((ROOT / "configs/smoke/dynamicconv.yaml").read_text())
    protocol.write_text((ROOT / "configs/smoke/protocol.yaml").read_text())
    bad = {"train": config, "reproduce": config, "protocol.yaml": protocol}.get(place)
    arguments = [str(config), "--seeds", "1", "--runs", str(tmp_path / "runs")]
    if bad is not None:
        bad.write_text(f"{bad.read_text()}\nmore: {text}\n")
    if place == "report":
        pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: report)")
        (tmp_path / "run/hydra/.hydra").mkdir(parents=True)
        (tmp_path / "run/hydra/.hydra/config.yaml").write_text(f"model: {text}\n")
        (tmp_path / "run/train.log").write_text("")
        main.main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")])
        said = (tmp_path / "page.html").read_text()
        assert "config.yaml cannot be read: ConstructorError" in said
    elif place == "train":
        assert "could not determine a constructor for the tag" in refusal("train", config)
    else:
        assert f"lightconv reproduce: error: cannot read {bad}: could not determine" in refusal("reproduce", *arguments)
    assert not marker.exists()
    with pytest.raises(Exception):  # noqa: B017  (the text does what the test says: `apply` and `new` run a command)
        yaml.safe_load(f"more: {text}")
    if "apply" in tag:
        yaml.unsafe_load(f"more: {text}")
        assert marker.exists()


# ------------------------------------------------------------------------------------------------ binarised data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """train.de-en.{de,en} of a few sentences, by fairseq's own writer; and a text of none."""
    import torch

    builders = pytest.importorskip("fairseq.data.indexed_dataset")
    folder = tmp_path_factory.mktemp("data-bin")
    for name, sizes in (("train.de-en.de", (3, 1, 7)), ("train.de-en.en", (2, 2, 200)), ("valid.de-en.de", ())):
        builder = builders.make_builder(str(folder / f"{name}.bin"), impl="mmap", vocab_size=1000)
        for size in sizes:
            builder.add_item(torch.arange(size))
        builder.finalize(str(folder / f"{name}.idx"))
    return folder


@pytest.mark.parametrize(
    "name, left, said",
    [
        ("train.de-en.en.bin", 0.5, "train.de-en.en.bin is cut short: 204 bytes of 408"),
        ("train.de-en.en.bin", 0, "train.de-en.en.bin is cut short: 0 bytes of 408"),
        ("train.de-en.de.idx", 0.9, "train.de-en.de.idx is cut short"),
        ("train.de-en.de.idx", 0.2, "train.de-en.de.idx is cut short"),
        ("train.de-en.de.idx", 0, "train.de-en.de.idx is cut short"),
        ("valid.de-en.de.bin", None, "valid.de-en.de.bin is missing"),
    ],
)
def test_cut_data_are_named_before_a_training(name, left, said, data, tmp_path, monkeypatch, refusal):
    from lightconv_plugin.recipes.training.plan import make_plan

    damaged = shutil.copytree(data, tmp_path / "data-bin")
    arguments = [str(ROOT / "configs/smoke/dynamicconv.yaml"), f"task.data={damaged}", "common.cpu=true"]
    make_plan(Path(arguments[0]), arguments[1:], 0, 1, None, fitting=None)
    if left is None:
        (damaged / name).unlink()
    else:
        content = (data / name).read_bytes()
        (damaged / name).write_bytes(content[: int(len(content) * left)])
    monkeypatch.chdir(tmp_path)
    error = refusal("train", *arguments).splitlines()[-1]
    assert error.startswith("lightconv train: error: ") and said in error and "run the preparation again" in error
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------------------------------------------------ locks


def test_the_lock_of_a_killed_process_is_none(tmp_path, capsys):
    """Its files stay, and stop nobody; while it lives, another one waits for it."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        held = Steps(tmp_path)
        os.write(writing, b"!")
        signal.pause()
        os._exit(len(str(held)))
    os.read(reading, 1)
    files = [path for path in tmp_path.rglob("*lock*") if path.is_file()]
    assert files
    for path in files:
        with path.open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with Steps(tmp_path):
        assert "waiting" not in capsys.readouterr().err


def test_what_killed_writers_left_is_removed_whatever_their_number(tmp_path):
    """In a container each command has the same number; what a living writer has is locked, or new."""
    path, own = tmp_path / "model.pt", os.getpid()
    names = {what: f".model.pt.{own}.{i:08x}.tmp" for i, what in enumerate(("left", "left folder", "new"))}
    for what, name in names.items():
        (tmp_path / name / "in").mkdir(parents=True) if "folder" in what else (tmp_path / name).write_text("half")
        if what != "new":
            os.utime(tmp_path / name, (0, 0))
    with atomic_write(path) as living:
        os.utime(living.name, (0, 0))
        with atomic_write(path) as written:
            written.write("whole")
        assert {entry.name for entry in tmp_path.iterdir()} == {"model.pt", names["new"], Path(living.name).name}
    with atomic_directory(tmp_path / "folder") as living:
        os.utime(living, (0, 0))
        with atomic_directory(tmp_path / "folder"):
            pass
        assert living.is_dir()


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(error, tmp_path, monkeypatch, capsys):
    """Such as Lustre mounted without -o flock: as without another process, with a warning."""

    def refuse(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "lock", "taken") as waited:
        assert not waited
    assert capsys.readouterr().err.startswith(f"warning: no locks on {tmp_path / 'lock'} ({os.strerror(error)}): do")
    with Steps(tmp_path / "data"):
        assert "warning: no locks on" in capsys.readouterr().err
    with pytest.raises(OSError, match=os.strerror(error)), locked(tmp_path / "lock", needed=True):
        pass
    error = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), locked(tmp_path / "lock"):
        pass


def test_a_process_that_is_forked_meanwhile_does_not_keep_a_lock(tmp_path):
    """Such as a worker that another thread starts: its own first call of an operator would wait for itself."""
    with locked(tmp_path / "lock", "taken"):
        if (child := os.fork()) == 0:
            signal.pause()
    try:
        with locked(tmp_path / "lock", "taken"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# ------------------------------------------------------------------------------------------------ disks


def read_only(place: Path):
    """Root may write where permissions say no, and not to a file system that is mounted so."""
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)


def test_an_average_on_a_full_disk(small_disk, tmp_path, refusal):
    make(tmp_path, *EPOCHS)
    output = small_disk / "average.pt"
    output.write_bytes(b"the one before")
    with contextlib.suppress(OSError), (small_disk / "other").open("wb", buffering=0) as other:
        while True:
            other.write(bytes(512))
    command = ["average", "--inputs", str(tmp_path), "--num-last-checkpoints", "2", "--output", str(output), "--force"]
    said = [line for line in refusal(*command).splitlines() if "error" in line]
    assert len(said) == 1 and "No space left on device" in said[0], said
    assert sorted(path.name for path in small_disk.iterdir()) == ["average.pt", "other"]
    assert output.read_bytes() == b"the one before"
    (small_disk / "other").unlink()
    assert main.main(command) == 0


def test_a_full_disk_is_an_error_with_the_name_of_the_file(small_disk):
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"), atomic_write(Path("/dev/full")) as file:
        file.write("x")
    path = small_disk / "text"
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"), atomic_write(path, binary=True) as file:
        file.write(bytes(400_000))
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("smoke", "--data", "{raw}/pairs", "--out", "{disk}/out"),
        ("smoke", "--out", "{disk}/out"),
        ("wikitext2", "--data", "{raw}/text", "--out", "{disk}/out", "--any-size"),
    ],
    ids=["parallel-text", "grammar", "language-model"],
)
def test_a_read_only_folder_is_one_line(arguments, small_disk, tmp_path, refusal):
    for folder, endings in (("pairs", ("en", "de")), ("text", ("txt",))):
        (tmp_path / folder).mkdir()
        for name in (f"{part}.{ending}" for part in ("train", "valid", "test") for ending in endings):
            (tmp_path / folder / name).write_text("a b\n")
    read_only(small_disk)
    said = refusal("prepare", *(argument.format(raw=tmp_path, disk=small_disk) for argument in arguments))
    assert "Read-only file system" in said.splitlines()[-1]
    assert list(small_disk.iterdir()) == []


def test_tools_on_a_read_only_folder(small_disk, tmp_path, refusal):
    make(tmp_path, *EPOCHS)
    read_only(small_disk)
    for command in (
        ["average", "--inputs", str(tmp_path), "--num-last-checkpoints", "2", "--output", str(small_disk / "a.pt")],
        ["score", "--sys", __file__, "--ref", __file__, "--lang", "en", "--output", str(small_disk / "score")],
        ["demo", "--work", str(small_disk / "demo")],
    ):
        assert "read-only" in refusal(*command).splitlines()[-1].lower()


@pytest.mark.parametrize(
    "command",
    [
        ("prepare", "smoke", "--out", "{file}"),
        ("train", "smoke/dynamicconv", "task.data={data}", "checkpoint.save_dir={file}"),
        ("demo", "--work", "{file}/demo"),
        ("reproduce", "smoke/dynamicconv", "--seeds", "1", "--runs", "{file}"),
        ("reproduce", "smoke/dynamicconv", "--seeds", "1", "--runs", "{data}", "--results", "{file}"),
    ],
    ids=lambda command: command[0] + command[-2],
)
def test_a_file_where_a_folder_is_to_be_is_named_at_once(command, tmp_path, refusal):
    (tmp_path / "data").mkdir()
    (tmp_path / "file").write_text("mine")
    said = refusal(*(word.format(file=tmp_path / "file", data=tmp_path / "data") for word in command))
    assert said.splitlines()[-1].endswith(f"error: {tmp_path / 'file'} is a file: name a folder")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["data", "file"]


def test_a_link_to_a_disk_that_is_not_there_is_no_file(tmp_path):
    link = tmp_path / "runs"
    link.symlink_to("/no/disk")
    with pytest.raises(InputError, match=rf"^{link} is a link to /no/disk, which does not exist: name a folder$"):
        check_folder(link / "mine")
    (tmp_path / "disk").mkdir()
    link.unlink()
    link.symlink_to("disk")
    check_folder(link / "mine")


@pytest.mark.parametrize(
    "command",
    [
        ("prepare", "smoke", "--out", "{link}"),
        ("prepare", "smoke", "--data", "{link}/text"),
        ("distill", "teacher", "data", "--out", "{link}/new"),
        ("released", "--url", "{link}"),
    ],
    ids=lambda command: f"{command[0]}-{command[-2]}",
)
def test_a_link_to_a_disk_that_is_not_there_is_not_followed(command, tmp_path, refusal):
    """Nothing is made where the disk would be."""
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    said = refusal(*(word.format(link=tmp_path / "link") for word in command))
    assert f"error: {tmp_path}/link is a link to {tmp_path}/disk, which does not exist: name a folder" in said
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_text_with_names_that_are_not_utf8_is_written_as_json_reads_it(tmp_path):
    name = os.fsdecode(b"gr\xfcn")
    with atomic_write(tmp_path / "file") as file:
        file.write(json.dumps({"path": name, "ü": 1}, ensure_ascii=False))
    assert (tmp_path / "file").read_bytes() == b'{"path": "gr\\udcfcn", "\xc3\xbc": 1}'
    assert json.loads((tmp_path / "file").read_text(encoding="utf-8"))["path"] == name
