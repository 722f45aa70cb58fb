"""For tests of the preparations: archives in miniature, and a web server that gives them out well and badly."""

import bz2
import contextlib
import functools
import gzip
import http.server
import io
import tarfile
import threading
import time

LOCAL = {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}  # for a script that is to reach the server


class ArchiveServer(http.server.ThreadingHTTPServer):
    """Serves `files` (path → bytes) at `address`; knows ranges.

    requests   (path, first byte) of every request so far
    cuts       path → numbers of bytes after which the connection is closed, one number for each request, then none:
               the length that was announced is the whole one
    stalls     path → numbers of bytes after which nothing more comes, though the connection stays; used up as `cuts`
    errors     path → statuses to answer with first
    redirects  path → the address to which it has moved
    slow       path → bytes a second
    lengths    path → what the header Content-Length says
    ranges     False: a server that does not know ranges
    """

    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(files)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.requests, self.cuts, self.stalls, self.errors, self.slow, self.ranges = [], {}, {}, {}, {}, True
        self.redirects, self.lengths = {}, {}

    def handle_error(self, request, client_address):
        pass  # a client that was killed


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, path = self.server, self.path.lstrip("/")
        start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").split("-")[0]) if server.ranges else 0
        server.requests.append((path, start))
        if server.errors.get(path):
            return self.send_error(server.errors[path].pop(0))
        if path in server.redirects:
            self.send_response(302)
            self.send_header("Location", server.redirects[path])
            return self.end_headers()
        data = server.files.get(path)
        if data is None:
            return self.send_error(404)
        if start and start >= len(data):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", server.lengths.get(path, str(len(data) - start)))
        self.end_headers()
        body = data[start:]
        if server.cuts.get(path):
            body = body[: server.cuts[path].pop(0)]
        stalls = bool(server.stalls.get(path))
        if stalls:
            body = body[: server.stalls[path].pop(0)]
        step = max(server.slow.get(path, 0) // 20, 1) if path in server.slow else max(len(body), 1)
        for at in range(0, len(body), step):
            self.wfile.write(body[at : at + step])
            if path in server.slow:
                time.sleep(0.05)
        if stalls:
            self.wfile.flush()
            time.sleep(3)
        self.close_connection = True

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def serve(files):
    """An `ArchiveServer` for the time of a with statement."""
    with ArchiveServer(files) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def tar_of(files, packing="gz", links=()):
    """A tar as bytes: files is name → bytes or str, in that order, links are (name, target) of symbolic links.

    packing: "gz", "bz2" or "" for none; the same bytes each time.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name, target in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    pack = {"gz": functools.partial(gzip.compress, mtime=0), "bz2": bz2.compress, "": bytes}[packing]
    return pack(buffer.getvalue())


def write_tar(path, files, packing="gz"):
    """Write a `tar_of`, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_of(files, packing))
    return path


IWSLT_TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")


def iwslt_archive(pairs, each_test=4, per_talk=20):
    """de-en.tgz in miniature, with all that the real one has: talks with their tags, XML test sets, a README.

    Args:
        pairs: (English, German) sentences; the first 5 * each_test are the test sets'
    """
    pairs = list(pairs)
    tests, pairs = pairs[: 5 * each_test], pairs[5 * each_test :]
    files = {"de-en/README": "not used\n"}
    for lang, side in (("de", 1), ("en", 0)):
        lines = []
        for talk in range(0, len(pairs), per_talk):
            lines += [f"<url>http://www.ted.com/talks/{talk}.html</url>", f"<keywords>talks, {talk}</keywords>"]
            lines += [f"<talkid>{talk}</talkid>", f"<title>Talk {talk}</title>"]
            lines += [f"<description>TED Talk Subtitles: {talk}.</description>"]
            lines += [f" {pair[side]} " for pair in pairs[talk : talk + per_talk]]
        files[f"de-en/train.tags.de-en.{lang}"] = "\n".join([*lines, ""])
        for number, name in enumerate(IWSLT_TESTS):
            rows = tests[number * each_test : (number + 1) * each_test]
            xml = ['<?xml version="1.0" encoding="UTF-8"?>', f'<refset setid="x" srclang="any" trglang="{lang}">']
            xml += ['<doc docid="1" genre="lectures">', "<title>A title that is no segment</title>"]
            xml += [f'<seg id="{i}"> {row[side]} </seg>' for i, row in enumerate(rows, 1)]
            files[f"de-en/IWSLT14.{name}.de-en.{lang}.xml"] = "\n".join([*xml, "</doc>", "</refset>", ""])
    return tar_of(files)
