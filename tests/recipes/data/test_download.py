"""prepare_lib.sh: options, room on the disk, and downloads that are resumed, checked, never half there."""

import gzip
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.recipes.conftest import ROOT, script_environment
from tests.recipes.data.archive_server import LOCAL, serve

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

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture
def server():
    with serve({"file.gz": PACKED, "plain.txt": TEXT}) as running:
        yield running


def command(code, *arguments):
    prelude = f'source "{ROOT}/scripts/prepare_lib.sh"; ROOT=$PWD; '
    return ["bash", "-c", prelude + code, "prepare_x.sh", *map(str, arguments)]


def run(code, *arguments, cwd, **environment):
    return subprocess.run(
        command(code, *arguments),
        cwd=cwd,
        env=script_environment(**LOCAL, **environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


FETCH = 'prepare_options down out "${@:3}"; fetch "$1" "$2"'


def fetch(address, checksum, *options, cwd, **environment):
    """`fetch` into cwd/down."""
    return run(FETCH, address, checksum, *options, cwd=cwd, **environment)


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("kind", RIGHT)
def test_once(server, tmp_path, kind):
    done = fetch(f"{server.address}/file.gz", RIGHT[kind], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "down/file.gz").read_bytes() == PACKED
    assert server.requests == [("file.gz", 0)]
    assert fetch(f"{server.address}/file.gz", RIGHT[kind], cwd=tmp_path).returncode == 0
    assert len(server.requests) == 1
    assert names(tmp_path / "down") == (["SHA256SUMS"] if kind == "record" else []) + ["file.gz"]


def test_the_first_download_is_recorded_and_then_enforced(server, tmp_path):
    assert fetch(f"{server.address}/file.gz", "record", cwd=tmp_path).returncode == 0
    sums = tmp_path / "down/SHA256SUMS"
    assert sums.read_text() == f"{SHA256}  file.gz\n"
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "down", check=False).returncode == 0
    server.files["file.gz"] = gzip.compress(b"another text")
    (tmp_path / "down/file.gz").unlink()
    done = fetch(f"{server.address}/file.gz", "record", cwd=tmp_path)
    assert done.returncode == 1
    found = hashlib.sha256(server.files["file.gz"]).hexdigest()
    assert done.stderr.splitlines()[-1].endswith(f"its checksum is {found}, expected {SHA256}")
    assert names(tmp_path / "down") == ["SHA256SUMS"]


@pytest.mark.parametrize("bad", [PACKED[:-30], b"<html>Sorry</html>", b""], ids=["short", "page", "empty"])
def test_what_is_no_whole_archive_is_never_recorded(server, tmp_path, bad):
    server.files["file.gz"] = bad
    done = fetch(f"{server.address}/file.gz", "record", cwd=tmp_path)
    assert done.returncode == 1
    assert "is not the expected file: " in done.stderr.splitlines()[-1]
    assert names(tmp_path / "down") == []


@pytest.mark.parametrize("kind", ["text", "record"])
def test_goes_on_where_it_stopped(server, tmp_path, kind):
    (tmp_path / "down").mkdir()
    (tmp_path / "down/file.gz.part").write_bytes(PACKED[:1000])
    assert fetch(f"{server.address}/file.gz", RIGHT[kind], cwd=tmp_path).returncode == 0
    assert server.requests == [("file.gz", 1000)]
    assert (tmp_path / "down/file.gz").read_bytes() == PACKED


@pytest.mark.parametrize("part", [b"x" * 500, b"x" * (len(PACKED) + 5)], ids=["another-file", "too-long"])
@pytest.mark.parametrize("kind", ["text", "record"])
def test_a_part_that_cannot_be_resumed_is_started_over(server, tmp_path, part, kind):
    (tmp_path / "down").mkdir()
    (tmp_path / "down/file.gz.part").write_bytes(part)
    done = fetch(f"{server.address}/file.gz", RIGHT[kind], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert server.requests == [("file.gz", len(part)), ("file.gz", 0)]
    assert (tmp_path / "down/file.gz").read_bytes() == PACKED


def test_a_server_without_ranges(server, tmp_path):
    server.ranges = False
    (tmp_path / "down").mkdir()
    (tmp_path / "down/file.gz.part").write_bytes(PACKED[:1000])
    done = fetch(f"{server.address}/file.gz", RIGHT["text"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "down/file.gz").read_bytes() == PACKED


def test_a_part_of_a_text_without_checksum_is_not_trusted(server, tmp_path):
    (tmp_path / "down").mkdir()
    (tmp_path / "down/plain.txt.part").write_bytes(b"y" * 100)
    assert fetch(f"{server.address}/plain.txt", "record", cwd=tmp_path).returncode == 0
    assert (tmp_path / "down/plain.txt").read_bytes() == TEXT


def test_a_connection_that_ends_early_is_taken_up_again(server, tmp_path):
    server.cuts["file.gz"] = [400, 300]
    done = fetch(f"{server.address}/file.gz", "record", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert server.requests == [("file.gz", 0), ("file.gz", 400), ("file.gz", 700)]
    assert (tmp_path / "down/file.gz").read_bytes() == PACKED


def test_a_kill_in_the_middle_of_a_download(server, tmp_path):
    server.slow["file.gz"] = len(PACKED) // 2
    call = command(FETCH, f"{server.address}/file.gz", "record")
    environment = script_environment(**LOCAL)
    with subprocess.Popen(
        call, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    ) as one:
        part = tmp_path / "down/file.gz.part"
        deadline = time.monotonic() + 30
        while not (part.exists() and part.stat().st_size > 500) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(one.pid, signal.SIGKILL)
    assert names(tmp_path / "down") == ["file.gz.part"]
    size = part.stat().st_size
    assert 0 < size < len(PACKED)
    server.slow.clear()
    assert fetch(f"{server.address}/file.gz", "record", cwd=tmp_path).returncode == 0
    assert server.requests[-1] == ("file.gz", size)
    assert (tmp_path / "down/file.gz").read_bytes() == PACKED


@pytest.mark.parametrize("place", ["web", "mirror-address", "mirror-folder"])
def test_a_wrong_file_is_refused(server, tmp_path, place):
    options, address = (), f"{server.address}/file.gz"
    if place == "mirror-address":
        options, address = ("--mirror", server.address + "/"), "http://127.0.0.1:1/nowhere/file.gz"
    elif place == "mirror-folder":
        (tmp_path / "mirror").mkdir()
        (tmp_path / "mirror/file.gz").write_bytes(PACKED)
        options = ("--mirror", "mirror")
    done = fetch(address, WRONG, *options, cwd=tmp_path)
    assert done.returncode == 1
    assert f"its checksum is {SHA256}, expected {'0' * 64}" in done.stderr.splitlines()[-1]
    assert names(tmp_path / "down") == []
    assert fetch(address, RIGHT["md5"], *options, cwd=tmp_path).returncode == 0
    assert names(tmp_path / "down") == ["file.gz"]


def test_a_file_in_place_that_is_wrong_is_replaced(server, tmp_path):
    (tmp_path / "down").mkdir()
    (tmp_path / "down/file.gz").write_bytes(PACKED[:-20])
    assert fetch(f"{server.address}/file.gz", RIGHT["text"], cwd=tmp_path).returncode == 0
    assert (tmp_path / "down/file.gz").read_bytes() == PACKED


def test_a_missing_page_says_what_else_can_be_done(server, tmp_path):
    done = fetch(f"{server.address}/none.gz", WRONG, cwd=tmp_path)
    assert done.returncode == 1
    assert "cannot download" in done.stderr.splitlines()[-1] and "--data" in done.stderr.splitlines()[-1]
    assert server.requests == [("none.gz", 0)]
    assert names(tmp_path / "down") == []


def test_data_that_is_there_is_checked_and_left_as_it_is(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file.gz").write_bytes(PACKED)
    for kind in RIGHT:
        done = fetch("http://127.0.0.1:1/file.gz", RIGHT[kind], "--data", "mine", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = fetch("http://127.0.0.1:1/file.gz", WRONG, "--data", "mine", cwd=tmp_path)
    assert done.returncode == 1 and f"mine/file.gz is not the expected file: its checksum is {SHA256}" in done.stderr
    done = fetch("http://127.0.0.1:1/other.gz", WRONG, "--data", "mine", cwd=tmp_path)
    assert done.returncode == 1 and "mine/other.gz: --data is a folder with the files" in done.stderr
    (tmp_path / "mine/file.gz").write_bytes(PACKED[:-3])
    done = fetch("http://127.0.0.1:1/file.gz", "record", "--data", "mine", cwd=tmp_path)
    assert done.returncode == 1 and "is cut short or damaged" in done.stderr
    assert names(tmp_path) == ["mine"] and names(tmp_path / "mine") == ["file.gz"]


def test_any_size_records_instead_of_comparing(server, tmp_path):
    done = fetch(f"{server.address}/file.gz", WRONG, "--any-size", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / "down") == ["SHA256SUMS", "file.gz"]


def test_two_downloads_into_one_folder_do_not_mix(server, tmp_path):
    (tmp_path / "down").mkdir()
    done = run(
        'exec 8<down; flock 8; prepare_options down out; fetch "$1" record',
        f"{server.address}/file.gz",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f"another process is downloading to {tmp_path}/down")


SHOW = 'prepare_options "$@"; printf "%s\\n" "$DATA" "$OUT" "$MIRROR" "$WORKERS" "$GIVEN_DATA" "${OPTIONS[*]}"'


@pytest.mark.parametrize(
    "options, expected",
    [
        ([], ["{}/data/x/down", "{}/data/x", "", None, "0", ""]),
        (["--out", "o", "--workers", "3"], ["{}/o/down", "{}/o", "", "3", "0", ""]),
        (["--data", ".", "--bpe", "5"], ["{}", "{}/data/x", "", None, "1", "--bpe 5"]),
        (["--mirror", "m/", "-x", "--any-size"], ["{}/data/x/down", "{}/data/x", "{}/m", None, "0", "-x --any-size"]),
        (["--mirror", "http://a/b/"], ["{}/data/x/down", "{}/data/x", "http://a/b", None, "0", ""]),
    ],
)
def test_options(tmp_path, options, expected):
    done = run(SHOW, "data/x/down", "data/x", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected[3] = expected[3] or str(len(os.sched_getaffinity(0)))
    assert done.stdout.split("\n")[:-1] == [line.format(tmp_path) for line in expected]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--data"], "--data needs a value"),
        (["--out", ""], "--out needs a value"),
        (["--data", "nowhere"], "--data: no folder {}/nowhere"),
        (["--data", ".", "--mirror", "m"], "--data and --mirror exclude one another"),
        (["--workers", "0"], "--workers must be a positive number, got 0"),
        (["--workers", "two"], "--workers must be a positive number, got two"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, options, message):
    done = run(SHOW, "data/x/down", "data/x", *options, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"prepare_x.sh: error: {message.format(tmp_path)}\n"


def test_room_on_the_disk_is_asked_for_before(tmp_path):
    (tmp_path / "bin").mkdir()
    df = tmp_path / "bin/df"
    df.write_text("#!/bin/sh\necho Filesystem blocks used free\necho disk 9999999 9 2097152 9% /\n")
    df.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    code = 'ANY_SIZE=$1; PATH=$2; need_disk "${@:3}"; echo enough'
    assert run(code, 0, path, 1.9, "a/b", "c", cwd=tmp_path).stdout == "enough\n"
    done = run(code, 0, path, 2.5, "a/b", "c", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "prepare_x.sh: error: needs 2.5 GiB in a/b, 2.0 are free\n")
    assert run(code, 1, path, 2.5, "a/b", "c", cwd=tmp_path).stdout == "enough\n"
    (tmp_path / "a/b").mkdir(parents=True)  # what is there already counts
    (tmp_path / "a/b/archive").write_bytes(os.urandom(8 << 20))
    assert run(code, 0, path, 2.005, "a/b", "c", cwd=tmp_path).stdout == "enough\n"
    assert run(code, 0, path, 2.01, "a/b", "c", cwd=tmp_path).returncode == 1


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 300 kB."""
    place = tmp_path / "small disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_is_said_and_the_download_goes_on_later(tmp_path, small_disk):
    data = gzip.compress(os.urandom(200_000))
    with serve({"file.gz": data}) as server:
        (small_disk / "other").write_bytes(bytes(200_000))
        done = fetch(f"{server.address}/file.gz", "record", "--out", small_disk, cwd=tmp_path)
        assert done.returncode == 0  # DATA is not below OUT here
        code = 'prepare_options out/down out "${@:2}"; fetch "$1" record'
        call = (code, f"{server.address}/file.gz", "--out", small_disk)
        done = run(*call, cwd=tmp_path)
        assert done.returncode == 1
        assert "file.gz.part: is the disk full?" in done.stderr.splitlines()[-1]
        assert names(small_disk / "down") == ["file.gz.part"]
        (small_disk / "other").unlink()
        done = run(*call, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert server.requests[-1][1] > 0
    assert (small_disk / "down/file.gz").read_bytes() == data


def test_a_full_disk_while_text_is_written_is_one_line(tmp_path, small_disk):
    (tmp_path / "raw").mkdir()
    for name in ("train", "valid", "test"):
        for lang in ("en", "de"):
            (tmp_path / f"raw/{name}.{lang}").write_text("A sentence of some length to fill the disk .\n" * 5000)
    program = "lightconv_plugin.recipes.data.parallel_text"
    call = [sys.executable, "-m", program, "--raw", tmp_path / "raw", "--out", small_disk / "out"]
    done = subprocess.run(call, env=script_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("no space left: make room, the same command continues")
    assert not list((small_disk / "out").rglob("*.en*"))
