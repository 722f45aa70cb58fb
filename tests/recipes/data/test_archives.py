"""Archives: read through, unpacked where they belong, refused where they would write elsewhere or too much."""

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
import zipfile

import pytest

from lightconv_plugin.downloads.archives import read_members, unpack, verify
from lightconv_plugin.errors import CorpusError
from tests.recipes.data.archive_server import tar_of

FILES = {"a/one.txt": "eins\n" * 5000, "a/two.txt": os.urandom(5000), "b/three.txt": ""}
TAR = gzip.decompress(tar_of(FILES))


def zipped(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in files.items():
            file.writestr(name, data)
    return buffer.getvalue()


ARCHIVES = {
    "x.tar": TAR,
    "x.tar.gz": gzip.compress(TAR),
    "x.tgz": gzip.compress(TAR),
    "x.tar.bz2": bz2.compress(TAR),
    "x.txz": lzma.compress(TAR),
    "x.zip": zipped(FILES),
    "x.txt.gz": gzip.compress(FILES["a/two.txt"]),
    "x.txt.xz": lzma.compress(FILES["a/two.txt"]),
}


@pytest.fixture
def archive(tmp_path):
    """Write an archive by its name."""

    def write(name, data=None):
        path = tmp_path / name
        path.write_bytes(ARCHIVES[name] if data is None else data)
        return path

    return write


@pytest.mark.parametrize("name", ARCHIVES)
def test_whole_archives_are_unpacked(archive, tmp_path, name):
    path = archive(name)
    verify(path)
    files = {"x.txt": FILES["a/two.txt"]} if name.startswith("x.txt") else FILES
    written = unpack(path, tmp_path / "out", ["*"], 1 << 20)
    assert [str(p.relative_to(tmp_path / "out")) for p in written] == list(files)
    content = {name: data.encode() if isinstance(data, str) else data for name, data in files.items()}
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == content
    assert {name: read((name, opened)) for name, opened in read_members(path)} == content


@pytest.mark.parametrize("part", [0.2, 0.6, 0.99], ids=["early", "middle", "end"])
@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_that_are_cut_short_are_named(archive, tmp_path, name, part):
    path = archive(name, ARCHIVES[name][: int(len(ARCHIVES[name]) * part)])
    if name == "x.tar" and part == 0.99:  # only the zeros at the end are shorter; nothing of the files is missing
        path = archive(name, TAR[: TAR.rstrip(b"\0").__len__() // 512 * 512 + 512])
    for use in (
        verify,
        lambda p: unpack(p, tmp_path / "out", ["*"], 1 << 20),
        lambda p: list(map(read, read_members(p))),
    ):
        with pytest.raises(CorpusError, match=rf"{name} .*(cut short|damaged)"):
            use(path)


def read(member):
    with member[1]() as stream:
        return stream.read()


@pytest.mark.parametrize("name", [name for name in ARCHIVES if name != "x.tar"])
def test_a_changed_byte_is_noticed(archive, name):
    data = bytearray(ARCHIVES[name])
    data[len(data) // 2] ^= 0x55
    with pytest.raises(CorpusError, match="damaged"):
        verify(archive(name, bytes(data)))


@pytest.mark.parametrize("name", ["x.tar", "x.tgz"])
def test_a_damaged_header_is_not_the_end_of_the_archive(archive, tmp_path, name):
    data = bytearray(TAR)
    data[data.index(b"a/two.txt")] ^= 0x55
    path = archive(name, bytes(data) if name == "x.tar" else gzip.compress(data))
    for use in (verify, lambda p: unpack(p, tmp_path / "out", ["*"], 1 << 20), lambda p: list(read_members(p))):
        with pytest.raises(CorpusError, match=rf"{name} is cut short or damaged: bad checksum"):
            use(path)


def test_names_that_are_none_are_damage(archive, tmp_path):
    """A byte that is not UTF-8 in a zip that says it is, and a NUL in a name of pax."""
    data = zipped({"ü.txt": "x"}).replace("ü".encode(), b"\xff\xfe")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("x")
        info.pax_headers = {"path": "a\0b"}
        tar.addfile(info)
    for path in (archive("x.zip", data), archive("x.tar", buffer.getvalue())):
        with pytest.raises(CorpusError, match=rf"{path.name} is cut short or damaged"):
            unpack(path, tmp_path / "out", ["*"], 100)


def test_a_zip_with_an_empty_name_or_a_wrong_place_is_damaged(archive):
    """By the place of its directory, a file would begin before the archive."""
    name, place = bytearray(zipped({"x": "y"})), bytearray(ARCHIVES["x.zip"])
    at = name.index(b"PK\x01\x02")
    name[at + 28], name[at + 30] = 0, 1  # the lengths of the name, and of what follows it
    at = place.index(b"PK\x05\x06") + 16
    place[at : at + 4] = (int.from_bytes(place[at : at + 4], "little") + 10**6).to_bytes(4, "little")
    for data in (name, place):
        with pytest.raises(CorpusError, match=r"x\.zip is cut short or damaged"):
            verify(archive("x.zip", bytes(data)))


@pytest.mark.parametrize("name", ["page.tgz", "page.zip", "page.gz", "page.tar", "page.txz"])
def test_a_web_page_is_no_archive(archive, name):
    with pytest.raises(CorpusError, match="cut short or damaged"):
        verify(archive(name, b"<!doctype html><title>Sorry</title>" * 100))


def test_a_zip_that_python_cannot_unpack_is_named(archive):
    """Encrypted, or compressed in another way: bits of each file's header, in front of it and in the directory."""
    data = bytearray(ARCHIVES["x.zip"])
    for at, flags in ((data.index(b"PK\x03\x04"), 6), (data.index(b"PK\x01\x02"), 8)):
        data[at + flags] |= 1
    with pytest.raises(CorpusError, match=r"x\.zip is encrypted: unpack it yourself"):
        verify(archive("x.zip", bytes(data)))
    data = bytearray(ARCHIVES["x.zip"])
    for at, method in ((data.index(b"PK\x03\x04"), 8), (data.index(b"PK\x01\x02"), 10)):
        data[at + method] = 97
    with pytest.raises(CorpusError, match=r"x\.zip cannot be unpacked"):
        verify(archive("x.zip", bytes(data)))


def test_an_empty_file_is_no_archive(archive):
    for name in ("x.tgz", "x.gz", "x.txt"):
        with pytest.raises(CorpusError, match="is empty"):
            verify(archive(name, b""))
    with pytest.raises(CorpusError, match=r"holds no files|seeking backwards"):  # the latter by Python 3.10's tarfile
        verify(archive("x.tgz", tar_of({})))


def test_only_what_is_wanted(archive, tmp_path):
    written = unpack(archive("x.tgz"), tmp_path / "out", ["a/t*.txt", "b/*"], 1 << 20)
    assert [path.name for path in written] == ["two.txt", "three.txt"]
    assert not (tmp_path / "out/a/one.txt").exists()
    with pytest.raises(CorpusError, match=r"x.tgz has no file \*\.de, c/x"):
        unpack(archive("x.tgz"), tmp_path / "out", ["a/*", "c/x", "*.de"], 1 << 20)


def test_names_with_a_point_before_them(archive, tmp_path):
    path = archive("y.tgz", tar_of({"./a/x": "x"}))
    assert unpack(path, tmp_path / "out", ["a/x"], 1) == [tmp_path / "out/a/x"]


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/tmp/evil", "..\\evil"])
@pytest.mark.parametrize("form", ["tar", "zip"])
def test_names_that_lead_out_are_refused(archive, tmp_path, name, form):
    path = archive("x.tgz", tar_of({name: "x"})) if form == "tar" else archive("x.zip", zipped({name: "x"}))
    with pytest.raises(CorpusError, match="leads out of the folder"):
        unpack(path, tmp_path / "deep/out", ["*"], 100)
    assert not list(tmp_path.rglob("*evil*"))


def test_links_and_devices_are_refused(archive, tmp_path):
    with pytest.raises(CorpusError, match="a/link is a link or a device"):
        unpack(archive("x.tgz", tar_of({}, links=[("a/link", "/etc")])), tmp_path / "out", ["*"], 100)
    with pytest.raises(CorpusError, match="a/link is a link or a device"):
        list(read_members(tmp_path / "x.tgz"))
    device = tarfile.TarInfo("null")
    device.type = tarfile.CHRTYPE
    with tarfile.open(tmp_path / "y.tar", "w") as tar:
        tar.addfile(device)
    with pytest.raises(CorpusError, match="null is a link or a device"):
        unpack(tmp_path / "y.tar", tmp_path / "out", ["*"], 100)
    info = zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as file:
        file.writestr(info, "/etc/passwd")
    with pytest.raises(CorpusError, match="link is a link or a device"):
        unpack(tmp_path / "z.zip", tmp_path / "out", ["*"], 100)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_link_that_is_there_already_is_not_followed(archive, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorpusError, match="would be written outside"):
        unpack(archive("x.tgz"), tmp_path / "out", ["*"], 1 << 20)
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / "out/a").unlink()
    (tmp_path / "out/a").mkdir()
    (tmp_path / "out/a/one.txt").symlink_to(tmp_path / "elsewhere/one.txt")
    assert not unpack(archive("x.tgz"), tmp_path / "out", ["*"], 1 << 20)[0].is_symlink()
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("name", ["bomb.tgz", "bomb.zip", "bomb.gz", "bomb.txt.bz2"])
def test_a_bomb_stops_at_the_limit(archive, tmp_path, name):
    zeros = bytes(30 << 20)
    data = {
        "bomb.tgz": lambda: tar_of({"x": zeros}),
        "bomb.zip": lambda: zipped({"x": zeros}),
        "bomb.gz": lambda: gzip.compress(zeros),
        "bomb.txt.bz2": lambda: bz2.compress(zeros),
    }[name]()
    with pytest.raises(CorpusError, match=r"holds more than the 3,000,000 bytes"):
        unpack(archive(name, data), tmp_path / "out", ["*"], 3_000_000)
    assert sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()) <= 3_000_000


def test_the_kind_is_told_by_another_name(archive):
    part = archive("x.tgz.part", ARCHIVES["x.tgz"][:-3])
    verify(part)  # by its own name it is no archive
    with pytest.raises(CorpusError, match=r"x.tgz.part is cut short or damaged"):
        verify(part, "x.tgz")
