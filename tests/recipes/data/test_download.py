"""Downloads: resumed, checked, never half there, also on a full disk."""

import gzip
import hashlib
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lightconv_plugin.downloads import download
from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.data import download as published_files
from lightconv_plugin.recipes.data.download import Published
from lightconv_plugin.recipes.data.options import Options, Request
from tests import programs
from tests.recipes.conftest import script_environment
from tests.recipes.data.archive_server import LOCAL, serve, tar_of
from tests.recipes.data.preparations import prepare

TEXT = "".join(f"line {i * i}\n" for i in range(5000)).encode()
PACKED = gzip.compress(TEXT, mtime=0)
SHA256 = hashlib.sha256(PACKED).hexdigest()
RIGHT = {
    "text": "text:" + hashlib.sha256(TEXT).hexdigest(),
    "sha256": "sha256:" + SHA256,
    "md5": "md5:" + hashlib.md5(PACKED).hexdigest(),
    "blob": "blob:" + hashlib.sha1(b"blob %d\0" % len(PACKED) + PACKED).hexdigest(),
    "record": "record",
}
WRONG = "sha256:" + "0" * 64


@pytest.fixture
def server(monkeypatch):
    """A server of file.gz and plain.txt; between attempts nobody waits."""
    for name, value in LOCAL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(download, "time", SimpleNamespace(sleep=lambda seconds: None))
    with serve({"file.gz": PACKED, "plain.txt": TEXT}) as running:
        yield running


def fetch(address, checksum, cwd, **options):
    """`fetch` into cwd/down, or the folder `data` of the options."""
    request = Request("x", options.get("data", cwd / "down"), cwd / "out", Options(**options))
    published_files.fetch(Published(address.rpartition("/")[2], address, checksum), request)


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("kind", RIGHT)
def test_once(server, tmp_path, kind):
    fetch(f"{server.address}/file.gz", RIGHT[kind], tmp_path)
    assert (tmp_path / "down/file.gz").read_bytes() == PACKED
    assert server.requests == [("file.gz", 0)]
    fetch(f"{server.address}/file.gz", RIGHT[kind], tmp_path)
    assert len(server.requests) == 1
    assert names(tmp_path / "down") == (["SHA256SUMS"] if kind == "record" else []) + ["file.gz"]


def test_the_first_download_is_recorded_and_then_enforced(server, tmp_path):
    fetch(f"{server.address}/file.gz", "record", tmp_path)
    sums = tmp_path / "down/SHA256SUMS"
    assert sums.read_text() == f"{SHA256}  file.gz\n"
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "down", check=False).returncode == 0
    server.files["file.gz"] = gzip.compress(b"another text")
    (tmp_path / "down/file.gz").unlink()
    found = hashlib.sha256(server.files["file.gz"]).hexdigest()
    with pytest.raises(InputError, match=f"its checksum is {found}, expected {SHA256} .recorded in {sums}.$"):
        fetch(f"{server.address}/file.gz", "record", tmp_path)
    assert names(tmp_path / "down") == ["SHA256SUMS"]


@pytest.mark.parametrize("bad", [PACKED[:-30], b"<html>Sorry</html>", b""], ids=["short", "page", "empty"])
@pytest.mark.parametrize("kind", ["record", "text"])
def test_what_is_no_whole_archive_is_never_kept(server, tmp_path, bad, kind):
    server.files["file.gz"] = bad
    with pytest.raises(InputError, match="is not the expected file: "):
        fetch(f"{server.address}/file.gz", RIGHT[kind], tmp_path)
    assert names(tmp_path / "down") == []


@pytest.mark.parametrize("kind", ["text", "record"])
def test_resumes_where_it_stopped(server, tmp_path, kind):
    (tmp_path / "down").mkdir()
    (tmp_path / "down/file.gz.part").write_bytes(PACKED[:1000])
    fetch(f"{server.address}/file.gz", RIGHT[kind], tmp_path)
    assert server.requests == [("file.gz", 1000)]
    assert (tmp_path / "down/file.gz").read_bytes() == PACKED


@pytest.mark.parametrize("part", [b"x" * 500, b"x" * (len(PACKED) + 5)], ids=["another-file", "too-long"])
@pytest.mark.parametrize("kind", ["text", "record"])
def test_a_part_that_cannot_be_resumed_is_started_over(server, tmp_path, part, kind):
    (tmp_path / "down").mkdir()
    (tmp_path / "down/file.gz.part").write_bytes(part)
    fetch(f"{server.address}/file.gz", RIGHT[kind], tmp_path)
    assert server.requests == [("file.gz", len(part)), ("file.gz", 0)]
    assert (tmp_path / "down/file.gz").read_bytes() == PACKED


def test_a_part_that_is_complete_is_only_checked(server, tmp_path):
    (tmp_path / "file.gz.part").write_bytes(PACKED)
    download.download(f"{server.address}/file.gz", tmp_path / "file.gz", RIGHT["sha256"])
    assert (tmp_path / "file.gz").read_bytes() == PACKED and server.requests == []


@pytest.mark.parametrize("status", [401, 403, 404, 451])
def test_a_refusal_leaves_what_has_arrived(server, tmp_path, status):
    """A wrong --mirror, or an expired login."""
    part = tmp_path / "file.gz.part"
    part.write_bytes(PACKED[:500])
    server.errors["file.gz"] = [status]
    with pytest.raises(InputError, match=f"HTTP {status}"):
        download.download(f"{server.address}/file.gz", tmp_path / "file.gz", RIGHT["sha256"])
    assert part.read_bytes() == PACKED[:500]


def test_a_server_without_ranges(server, tmp_path):
    server.ranges = False
    (tmp_path / "down").mkdir()
    (tmp_path / "down/file.gz.part").write_bytes(PACKED[:1000])
    fetch(f"{server.address}/file.gz", RIGHT["text"], tmp_path)
    assert (tmp_path / "down/file.gz").read_bytes() == PACKED


def test_a_part_of_a_text_without_checksum_is_not_trusted(server, tmp_path):
    (tmp_path / "down").mkdir()
    (tmp_path / "down/plain.txt.part").write_bytes(b"y" * 100)
    fetch(f"{server.address}/plain.txt", "record", tmp_path)
    assert (tmp_path / "down/plain.txt").read_bytes() == TEXT


def test_a_connection_that_ends_early_is_resumed(server, tmp_path):
    server.cuts["file.gz"] = [400, 300]
    fetch(f"{server.address}/file.gz", "record", tmp_path)
    assert server.requests == [("file.gz", 0), ("file.gz", 400), ("file.gz", 700)]
    assert (tmp_path / "down/file.gz").read_bytes() == PACKED


def test_another_part_than_the_one_asked_for_is_not_appended(server, tmp_path, monkeypatch):
    opened = download._open

    def elsewhere(*given):
        response = opened(*given)
        if "Content-Range" in response.headers:
            response.headers.replace_header("Content-Range", "bytes 100-200/300")
        return response

    monkeypatch.setattr(download, "_open", elsewhere)
    server.cuts["plain.txt"] = [400]
    fetch(f"{server.address}/plain.txt", "record", tmp_path)
    assert server.requests == [("plain.txt", 0), ("plain.txt", 400), ("plain.txt", 0)]
    assert (tmp_path / "down/plain.txt").read_bytes() == TEXT


def test_a_connection_without_a_byte_is_dead_and_the_download_resumed(server, tmp_path, monkeypatch):
    assert download.SILENCE == 60
    monkeypatch.setattr(download, "SILENCE", 0.3)
    server.stalls["file.gz"] = [400]
    fetch(f"{server.address}/file.gz", "record", tmp_path)
    assert server.requests == [("file.gz", 0), ("file.gz", 400)]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(server, tmp_path, status):
    server.cuts["file.gz"], server.errors["file.gz"] = [700], [status, status]
    (tmp_path / "down").mkdir()
    (tmp_path / "down/file.gz.part").write_bytes(PACKED[:300])
    fetch(f"{server.address}/file.gz", "record", tmp_path)
    assert [start for _, start in server.requests] == [300, 300, 300, 1000]
    server.errors["none.gz"] = [status] * 9
    with pytest.raises(InputError, match=rf"cannot download .*/none.gz \(HTTP {status} .*`data` DIR"):
        fetch(f"{server.address}/none.gz", "record", tmp_path)
    assert [path for path, _ in server.requests].count("none.gz") == 4


def test_other_protocols_are_refused(tmp_path):
    for address in ("ftp://a/b.gz", "file:///etc/passwd"):
        with pytest.raises(InputError, match=f"cannot download {address}: expected an address that begins with http"):
            fetch(address, "record", tmp_path)
    assert names(tmp_path / "down") == []


def test_a_redirect_to_another_protocol_is_refused(server, tmp_path):
    server.redirects = {"away.gz": "ftp://127.0.0.1:1/file.gz", "moved.gz": f"{server.address}/file.gz"}
    with pytest.raises(InputError, match=r"cannot download .*/away.gz \(.*: ftp"):
        fetch(f"{server.address}/away.gz", "record", tmp_path)
    fetch(f"{server.address}/moved.gz", "record", tmp_path)
    assert names(tmp_path / "down") == ["SHA256SUMS", "moved.gz"]


@pytest.mark.parametrize("place", ["http://[::1", "http://127.0.0.1:1/\u00fc", "http://a..b", "moved"])
def test_an_address_that_is_none_is_one_line(server, tmp_path, place):
    """Given or, last, that of a redirect."""
    server.redirects["moved/x.gz"] = "http://[::1"
    address = f"{place if '://' in place else f'{server.address}/{place}'}/x.gz"
    with pytest.raises(InputError, match=r"cannot download http.*/x.gz .*`data` DIR"):
        fetch(address, "record", tmp_path)


@pytest.mark.parametrize("length", ["{0}, {0}", "many"])
def test_a_length_that_is_no_number_is_none(server, tmp_path, length):
    """The first, of a proxy that joins equal headers."""
    server.lengths["file.gz"] = length.format(len(PACKED))
    fetch(f"{server.address}/file.gz", "record", tmp_path)
    assert (tmp_path / "down/file.gz").read_bytes() == PACKED


KILLED = """
import argparse, pathlib, sys
from lightconv_plugin.downloads import download
download.download(sys.argv[1], pathlib.Path("down/file.gz"), "record")
"""


def test_a_kill_in_the_middle_of_a_download(server, tmp_path):
    server.slow["file.gz"] = len(PACKED) // 2
    call = [sys.executable, "-c", KILLED, f"{server.address}/file.gz"]
    environment = script_environment(sys.executable, **LOCAL)
    with subprocess.Popen(
        call, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    ) as one:
        part = tmp_path / "down/file.gz.part"
        programs.wait_until(lambda: part.exists() and part.stat().st_size > 500)
        os.killpg(one.pid, signal.SIGKILL)
    assert names(tmp_path / "down") == ["file.gz.part"]
    size = part.stat().st_size
    assert 0 < size < len(PACKED)
    server.slow.clear()
    fetch(f"{server.address}/file.gz", "record", tmp_path)
    assert server.requests[-1] == ("file.gz", size)
    assert (tmp_path / "down/file.gz").read_bytes() == PACKED


@pytest.mark.parametrize("place", ["web", "mirror-address", "mirror-folder"])
def test_a_wrong_file_is_refused(server, tmp_path, place):
    mirror, address = None, f"{server.address}/file.gz"
    if place == "mirror-address":
        mirror, address = server.address, "http://127.0.0.1:1/nowhere/file.gz"
    elif place == "mirror-folder":
        (tmp_path / "mirror").mkdir()
        (tmp_path / "mirror/file.gz").write_bytes(PACKED)
        mirror = str(tmp_path / "mirror")
    with pytest.raises(InputError, match=f"its checksum is {SHA256}, expected {'0' * 64}"):
        fetch(address, WRONG, tmp_path, mirror=mirror)
    assert names(tmp_path / "down") == []
    fetch(address, RIGHT["md5"], tmp_path, mirror=mirror)
    assert names(tmp_path / "down") == ["file.gz"]


def test_a_file_in_place_that_is_wrong_is_replaced(server, tmp_path):
    (tmp_path / "down").mkdir()
    (tmp_path / "down/file.gz").write_bytes(PACKED[:-20])
    fetch(f"{server.address}/file.gz", RIGHT["text"], tmp_path)
    assert (tmp_path / "down/file.gz").read_bytes() == PACKED


def test_a_missing_page_says_what_else_can_be_done(server, tmp_path):
    with pytest.raises(InputError, match=r"cannot download .* \(HTTP 404 .*`data` DIR"):
        fetch(f"{server.address}/none.gz", WRONG, tmp_path)
    assert server.requests == [("none.gz", 0)]
    assert names(tmp_path / "down") == []


def test_data_given_are_checked_and_left_as_they_are(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file.gz").write_bytes(PACKED)
    mine = {"cwd": tmp_path, "data": tmp_path / "mine"}
    for kind in RIGHT:
        fetch("http://127.0.0.1:1/file.gz", RIGHT[kind], **mine)
    with pytest.raises(InputError, match=f"mine/file.gz is not the expected file: its checksum is {SHA256}"):
        fetch("http://127.0.0.1:1/file.gz", WRONG, **mine)
    with pytest.raises(InputError, match=r"no file .*mine/other.gz: `data` must be the folder of the published files"):
        fetch("http://127.0.0.1:1/other.gz", WRONG, **mine)
    (tmp_path / "mine/file.gz").write_bytes(PACKED[:-3])
    with pytest.raises(InputError, match="is cut short or damaged"):
        fetch("http://127.0.0.1:1/file.gz", "record", **mine)
    assert names(tmp_path) == ["mine"] and names(tmp_path / "mine") == ["file.gz"]


@pytest.mark.parametrize("checksum", [WRONG, "record"])
def test_any_size_neither_compares_nor_records(server, tmp_path, checksum):
    down = tmp_path / "down"
    fetch(f"{server.address}/file.gz", checksum, tmp_path, any_size=True)
    assert names(down) == ["file.gz"]
    (down / "SHA256SUMS").write_text(f"{'0' * 64}  file.gz\n")
    fetch(f"{server.address}/nowhere/file.gz", checksum, tmp_path, any_size=True)
    fetch(f"{server.address}/nowhere/file.gz", checksum, tmp_path, any_size=True, data=down)
    assert (down / "file.gz").read_bytes() == PACKED and len(server.requests) == 1
    with pytest.raises(InputError, match=rf"expected 0{{64}}( \(recorded in {down}/SHA256SUMS\))?$") as raised:
        fetch(f"{server.address}/file.gz", checksum, tmp_path)
    assert ("SHA256SUMS" in str(raised.value)) == (checksum == "record")


def test_two_downloads_into_one_folder_do_not_mix(server, tmp_path):
    import fcntl

    (tmp_path / "down").mkdir()
    other = os.open(tmp_path / "down", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        with pytest.raises(InputError, match=f"^another process is downloading to {tmp_path}/down$"):
            fetch(f"{server.address}/file.gz", "record", tmp_path)
    finally:
        os.close(other)


def test_a_full_disk_is_said_and_the_download_resumed_later(tmp_path, small_disk):
    data = tar_of({"x": os.urandom(200_000)})
    with serve({"de-en.tgz": data}) as server:
        (small_disk / "other").write_bytes(bytes(200_000))
        call = ("iwslt14_de_en", "--mirror", server.address, "--out", small_disk, "--any-size")
        said = prepare(tmp_path, *call, status=2)
        last = said.splitlines()[-1]
        assert f"no space left on the disk for {small_disk}/download/de-en.tgz.part: free some" in last
        assert "run the same command again to resume" in last
        assert names(small_disk / "download") == ["de-en.tgz.part"]
        (small_disk / "other").unlink()
        said = prepare(tmp_path, *call, status=2)
        assert "de-en.tgz has no file de-en/" in said.splitlines()[-1]
        assert server.requests[-1][1] > 0
    assert (small_disk / "download/de-en.tgz").read_bytes() == data


def test_a_full_disk_while_text_is_written_is_one_line(tmp_path, small_disk):
    (tmp_path / "raw").mkdir()
    for name in ("train", "val", "test_2016_flickr"):
        for lang in ("en", "de"):
            (tmp_path / f"raw/{name}.{lang}").write_text("A sentence of some length to fill the disk .\n" * 5000)
    said = prepare(tmp_path, "multi30k_en_de", "--data", tmp_path / "raw", "--out", small_disk / "out", status=2)
    assert "no space left on the disk" in said.splitlines()[-1]
    assert said.splitlines()[-1].endswith("free some and run the same command again to resume")
    assert not list((small_disk / "out").rglob("*.en*"))
