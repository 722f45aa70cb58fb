"""Published files: downloads are resumable and checked, and a file gets its final name only when it is complete."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import re
import shutil
import time
import urllib.error
import urllib.request
import zlib
from pathlib import Path
from typing import NoReturn

from lightconv_plugin.downloads.archives import kind, verify
from lightconv_plugin.errors import CorpusError, InputError
from lightconv_plugin.files import locked
from lightconv_plugin.progress import progress, say

SILENCE = 60  # seconds without a byte after which a connection counts as dead
FAILURES = 3  # consecutive transfers without new data after which the download is given up
_BLOCK = 1 << 16
_TEMPORARY = (408, 429)  # and 5xx: the server may answer later


def digest(kind: str, file: Path) -> str:
    """A checksum of a file, in hex.

    Args:
        kind: sha256 or md5; text: SHA-256 of the text inside a .gz, which does not depend on the compression; blob:
            git's object name of the content, for files in a repository

    Raises:
        OSError, EOFError, zlib.error: the .gz is damaged.
    """
    sums = {"sha256": hashlib.sha256, "md5": hashlib.md5, "text": hashlib.sha256, "blob": hashlib.sha1}[kind]()
    if kind == "blob":
        sums.update(b"blob %d\0" % file.stat().st_size)
    with gzip.open(file) if kind == "text" else file.open("rb") as stream:
        while block := stream.read(1 << 20):
            sums.update(block)
    return sums.hexdigest()


def wrong(file: Path, checksum: str, name: str) -> str:
    """Why a file, whose final name is `name`, is not the expected one; "" if it is."""
    try:
        if checksum == "record":
            verify(file, name)
            return ""
        kind, _, expected = checksum.partition(":")
        actual = digest(kind, file)
    except CorpusError as error:
        return str(error)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        return f"it cannot be decompressed: {error}"
    return "" if actual == expected else f"its checksum is {actual}, expected {expected}"


class _Interrupted(Exception):
    """The transfer ended before the end of the file. Its argument: the reason."""


class _NoFtp(urllib.request.FTPHandler):
    """Refuses ftp, to which urllib would follow a redirect."""

    def ftp_open(self, request: urllib.request.Request) -> NoReturn:
        raise urllib.error.URLError(f"unknown protocol: {request.type}")


def _open(address: str, part: Path, start: int, otherwise: str) -> http.client.HTTPResponse:
    """The response with the file from byte `start` on, where `part` ends; `part` is removed if there is no such byte.

    Raises:
        InputError: it is not available. _Interrupted: try again.
    """
    headers = {"User-Agent": "lightconv-plugin", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        opener = urllib.request.build_opener(_NoFtp)
        return opener.open(urllib.request.Request(address, headers=headers), timeout=SILENCE)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and start:
            raise _started_over(part) from None
        reason = f"HTTP {error.code} {error.reason}"
        temporary = error.code in _TEMPORARY or error.code >= 500
        if temporary:
            raise _Interrupted(reason) from None
        raise InputError(f"cannot download {address} ({reason}): {otherwise}") from None
    except ValueError as error:  # an address that is none, perhaps that of a redirect
        raise InputError(f"cannot download {address} ({error}): {otherwise}") from None
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(str(getattr(error, "reason", error))) from None


def _started_over(part: Path) -> _Interrupted:
    part.unlink(missing_ok=True)
    return _Interrupted("the server does not send the requested part of the file")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(_BLOCK)
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(str(error) or type(error).__name__) from None


def _receive(address: str, part: Path, otherwise: str) -> None:
    """Append the missing rest to `part`, in one request.

    Raises:
        InputError, _Interrupted, and OSError if `part` cannot be written.
    """
    start = part.stat().st_size if part.exists() else 0
    with _open(address, part, start, otherwise) as response:
        if response.status != 206:
            start = 0  # the server does not support ranges and sends the whole file
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise _started_over(part)
        end = None if response.length is None else start + response.length
        bar = progress(total=end, initial=start, desc=f"  {part.stem}", unit="B", unit_scale=True)
        try:
            with part.open("ab" if start else "wb") as file, bar:
                while block := _read(response):
                    file.write(block)
                    file.flush()  # keep what has arrived, however this process ends
                    bar.update(len(block))
        except OSError as error:
            error.filename = error.filename or str(part)  # the error of a full disk names no file
            raise
    size = part.stat().st_size
    if end is not None and size < end:
        raise _Interrupted(f"the connection was closed after {size:,} of {end:,} bytes")


def transfer(address: str, part: Path, otherwise: str) -> None:
    """Download into `part`, resuming at its end for as long as new data arrive. What has arrived is kept.

    otherwise: what the user can do instead, for the error.

    Raises:
        InputError: the server does not have the file, or no new data arrive. OSError: `part` cannot be written.
    """
    before, idle = -1, 0
    while True:
        try:
            return _receive(address, part, otherwise)
        except _Interrupted as error:
            reason = str(error)
        size = part.stat().st_size if part.exists() else 0
        idle = 1 if size > before else idle + 1
        before = size
        if idle > FAILURES:
            raise InputError(f"cannot download {address} ({reason}): {otherwise}")
        time.sleep(idle)


def download(address: str, file: Path, checksum: str, otherwise: str = "try again later", source: str = "") -> None:
    """Fetch a file unless it is already on disk and correct; it gets its final name only after the check.

    Args:
        address: http(s), or a local path
        checksum: KIND:HEX as for `digest`, or "record": the archive is read to its end
        otherwise: what the user can do if it cannot be downloaded, for the error
        source: where the checksum comes from, at the end of the error

    Raises:
        InputError: the file does not exist or is not the expected one, or another process downloads to its folder.
    """
    if file.is_file() and not wrong(file, checksum, file.name):
        return
    local = "://" not in address
    if local and not Path(address).is_file():
        raise InputError(f"no file {address}")
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    with locked(file.parent, f"another process is downloading to {file.parent}"):
        if local:
            shutil.copyfile(address, part)
            reason = wrong(part, checksum, file.name)
        else:
            reason = _download(address, part, checksum, file.name, otherwise)
        if reason:
            part.unlink()
            raise InputError(f"{address} is not the expected file: {reason}{source}")
        os.replace(part, file)


def _download(address: str, part: Path, checksum: str, name: str, otherwise: str) -> str:
    """Download `part`; if a resumed file turns out wrong, download all of it again. Returns why it is wrong, or ""."""
    if not re.match("https?://", address):
        raise InputError(f"cannot download {address}: expected an address that begins with http:// or https://")
    if checksum == "record" and kind(name) == ("", ""):
        part.unlink(missing_ok=True)  # without a checksum, a partial file might be from another version
    resumed = part.exists() and part.stat().st_size > 0
    if resumed and not wrong(part, checksum, name):
        return ""  # complete: only the check was interrupted
    say(f"downloading {address}")
    transfer(address, part, otherwise)
    reason = wrong(part, checksum, name)
    if reason and resumed:
        part.unlink()
        transfer(address, part, otherwise)
        reason = wrong(part, checksum, name)
    return reason
