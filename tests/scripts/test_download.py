"""lib.sh's download: resumed, checked against its SHA-256, never half there."""

import gzip
import hashlib
import http.server
import shutil
import subprocess
import threading

import pytest

from tests.scripts.conftest import ROOT, script_environment

TEXT = "".join(f"line {i * i}\n" for i in range(5000)).encode()
PACKED = gzip.compress(TEXT, mtime=0)
SHA256 = hashlib.sha256(TEXT).hexdigest()

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture
def server():
    """A web server for PACKED that knows ranges, as GitHub does; `requests` lists the first byte of each request."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").split("-")[0])
            requests.append(start)
            if self.path != "/file.gz":
                self.send_error(404)
            elif start >= len(PACKED):
                self.send_error(416)
            else:
                self.send_response(206 if start else 200)
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(PACKED) - 1}/{len(PACKED)}")
                self.send_header("Content-Length", str(len(PACKED) - start))
                self.end_headers()
                self.wfile.write(PACKED[start:])

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        httpd.address = f"http://127.0.0.1:{httpd.server_port}/file.gz"
        httpd.requests = requests
        yield httpd
        httpd.shutdown()


def download(address, file, sha256=SHA256):
    code = f'source "{ROOT}/scripts/lib.sh"; download "$@"'
    environment = script_environment(no_proxy="127.0.0.1", NO_PROXY="127.0.0.1")
    command = ["bash", "-c", code, "download.sh", str(address), str(file), sha256]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_once(server, tmp_path):
    file = tmp_path / "a folder/file.gz"
    assert download(server.address, file).returncode == 0
    assert gzip.decompress(file.read_bytes()) == TEXT
    server.requests.clear()
    assert download(server.address, file).returncode == 0
    assert server.requests == []
    assert [path.name for path in file.parent.iterdir()] == ["file.gz"]


def test_a_plain_file_by_the_name_that_git_gives_it(server, tmp_path):
    blob = hashlib.sha1(b"blob %d\0" % len(PACKED) + PACKED).hexdigest()
    done = download(server.address, tmp_path / "plain file", blob)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plain file").read_bytes() == PACKED
    done = download(server.address, tmp_path / "another", SHA256)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f"its checksum is {blob}, expected {SHA256}")
    assert [path.name for path in tmp_path.iterdir()] == ["plain file"]


def test_goes_on_where_it_stopped(server, tmp_path):
    (tmp_path / "file.gz.part").write_bytes(PACKED[:1000])
    assert download(server.address, tmp_path / "file.gz").returncode == 0
    assert server.requests == [1000]
    assert gzip.decompress((tmp_path / "file.gz").read_bytes()) == TEXT


def test_a_part_that_cannot_be_resumed_is_started_over(server, tmp_path):
    (tmp_path / "file.gz.part").write_bytes(b"x" * (len(PACKED) + 5))
    done = download(server.address, tmp_path / "file.gz")
    assert done.returncode == 0, done.stderr
    assert server.requests == [len(PACKED) + 5, 0]
    assert gzip.decompress((tmp_path / "file.gz").read_bytes()) == TEXT


@pytest.mark.parametrize("local", [False, True], ids=["web", "mirror-folder"])
def test_a_wrong_file_is_refused(server, tmp_path, local):
    address = server.address
    if local:
        address = tmp_path / "mirror.gz"
        address.write_bytes(PACKED)
    done = download(address, tmp_path / "file.gz", sha256="0" * 64)
    assert done.returncode == 1
    assert f"{SHA256}, expected {'0' * 64}" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "file.gz").exists() and not (tmp_path / "file.gz.part").exists()


def test_a_file_in_place_that_is_wrong_is_replaced(server, tmp_path):
    (tmp_path / "file.gz").write_bytes(PACKED[:-20])
    assert download(server.address, tmp_path / "file.gz").returncode == 0
    assert gzip.decompress((tmp_path / "file.gz").read_bytes()) == TEXT


def test_a_missing_page_says_what_else_can_be_done(server, tmp_path):
    done = download(server.address + "x", tmp_path / "file.gz")
    assert done.returncode == 1
    assert "cannot download" in done.stderr.splitlines()[-1] and "--data" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
