"""The published files of a preparation: those of the user, or downloaded, and compared with their checksums."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightconv_plugin.downloads.download import digest, download, wrong
from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.data.options import Request
from lightconv_plugin.recipes.steps import read_toml

BY_HAND = "without a network, put the files into a folder and give `data` DIR"


@dataclass(frozen=True)
class Published:
    """A published file.

    name      on disk
    address   "" if it has no permanent one; then `absent` says what to do
    checksum  KIND:HEX as for `digest`; or "record": the archive is verified, and the SHA-256 of the first download is
              written to SHA256SUMS next to it and enforced from then on, except with `any_size`
    """

    name: str
    address: str
    checksum: str
    absent: str = ""


def sources() -> dict[str, Any]:
    """The content of sources.toml."""
    return read_toml(Path(__file__).with_name("sources.toml"))


def published_files(variant: str) -> list[Published]:
    """The published files of a variant of a task, in download order."""
    files = []
    for group in sources()["files"]:
        if variant in group["tasks"]:
            for name, checksum in group["checksums"].items():
                address = group.get("address", "")
                address += name if address.endswith("/") else ""
                files.append(Published(name, address, checksum, group.get("absent", "")))
    return files


def fetch(published: Published, request: Request) -> None:
    """Make sure that a published file is in `request.data`, complete and correct."""
    mirror, any_size = request.options.mirror, request.options.any_size
    file, sums = request.data / published.name, request.data / "SHA256SUMS"
    checksum, source = "record" if any_size else published.checksum, ""
    recording = checksum == "record" and not any_size
    if recording and sums.is_file():
        lines = (line.partition("  ") for line in sums.read_text(encoding="utf-8").splitlines())
        if recorded := next((value for value, _, name in lines if name == published.name), ""):
            checksum, recording, source = f"sha256:{recorded}", False, f" (recorded in {sums})"
    if request.options.data:
        if not file.is_file():
            raise InputError(f"no file {file}: `data` must be the folder of the published files")
        if reason := wrong(file, checksum, file.name):
            raise InputError(f"{file} is not the expected file: {reason}{source}")
        return
    address = f"{mirror}/{published.name}" if mirror else published.address
    if not address:
        if not file.is_file():
            raise InputError(f"no file {file}: {published.absent}")
        address = str(file)
    download(address, file, checksum, BY_HAND, source)
    if recording:
        with sums.open("a", encoding="utf-8") as record:
            record.write(f"{digest('sha256', file)}  {published.name}\n")


def need_disk(gib: float, folders: Sequence[Path]) -> None:
    """InputError unless every folder's file system has this much free space; what the folders already hold counts."""
    held = sum(path.lstat().st_blocks * 512 for folder in folders for path in folder.rglob("*"))
    for folder in folders:
        existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
        free = shutil.disk_usage(existing).free
        if gib * 2**30 > free + held:
            raise InputError(f"{folder} needs {gib:g} GiB of free disk space, {free / 2**30:.1f} GiB are free")


def no_space(error: OSError) -> bool:
    """Whether an error means that the disk is full or the user's quota is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
