"""Gets released models: downloads, unpacks, checks and exports them, each step completely or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightconv_plugin.downloads.archives import unpack
from lightconv_plugin.downloads.download import digest, download, wrong
from lightconv_plugin.errors import CorpusError, InputError
from lightconv_plugin.files import atomic_directory, locked
from lightconv_plugin.progress import say
from lightconv_plugin.quiet import quietly
from lightconv_plugin.released import cache
from lightconv_plugin.released.models import Model

LARGEST = 8 << 30  # bytes that an archive may unpack to
_CODES = ("bpecodes", "code", "codes", "bpe.codes")  # the names of merges that `lightconv export` finds


@dataclass(frozen=True)
class _Source:
    """Where the archive of a folder of the cache comes from.

    address: upstream's, "" if there is none. option: the parameter for a file at hand. place, file: see `get`.
    """

    model: Model
    folder: str
    address: str
    option: str
    place: str | None
    file: Path | None

    def archive(self) -> tuple[Path, bool]:
        """(the archive, complete and equal to the recorded one, whether one is recorded)."""
        file = self.file or cache.downloads(self.folder) / self._name
        recorded = cache.known().get(self.recorded_as(file))
        checksum = f"sha256:{recorded['sha256']}" if recorded else "record"
        if self.file is None:
            self._download(file, checksum)
        elif not file.is_file():
            raise InputError(f"`{self.option}`: no such file: {file}")
        elif reason := wrong(file, checksum, file.name):
            raise InputError(f"{file} is not the expected file: {reason}")
        return file, bool(recorded)

    @property
    def _name(self) -> str:
        """Upstream's name of the archive, which no other model has."""
        return self.address.rpartition("/")[2]

    def recorded_as(self, file: Path) -> str:
        """The archive's name in the table. A file at hand, such as model.pt, may be called like another model's."""
        return file.name if file.name == self._name else f"{self.folder}/{file.name}"

    def _download(self, file: Path, checksum: str) -> None:
        # A whole command: the error may be one of `lightconv reproduce`, which has no such option.
        option = "--" + self.option.replace("_", "-")
        by_hand = f"fetch it by hand, then: lightconv released {self.model.name} {option} FILE"
        if not self.address:
            raise InputError(f"{self.model.name}: its files are linked from {self.model.page}: {by_hand}")
        address = f"{self.place.rstrip('/')}/{file.name}" if self.place else self.address
        download(address, file, checksum, by_hand)


def get(model: Model, *, place: str | None = None, file: Path | None = None, dtype: str | None = None) -> Path:
    """The folder of a model, with its checkpoint and its exported directory; what is missing is made.

    Args:
        place: an address or a folder with upstream's files, instead of upstream's own address
        file: the archive at hand, or just a checkpoint (.pt); it replaces what the cache has
        dtype: of the exported weights: "float32" or "int8"; None for what there is, else float32

    Raises:
        InputError: the file cannot be downloaded, is not the recorded one, or is not a model.
        OSError: the cache cannot be written, such as on a full disk.
    """
    folder = cache.home() / model.folder
    if file is None and dtype is None and cache.exported(model).is_dir():  # without a lock: the cache may be read-only
        return folder
    with _turn(model.folder):
        if file is not None or not folder.is_dir():
            source = _Source(model, model.folder, model.archive, "file", place, file)
            _install(source, partial(_model, model, dtype or "float32"))
        elif dtype is not None or not cache.exported(model).is_dir():
            _export(model, folder, dtype or "float32")
    return folder


def get_test_set(model: Model, *, place: str | None = None, file: Path | None = None) -> Path:
    """The folder of a model's binarised test set; arguments and errors as for `get`."""
    folder = cache.test_set(model)
    if file is None and folder.is_dir():
        return folder
    with _turn(model.test_folder):
        if file is not None or not folder.is_dir():
            source = _Source(model, model.test_folder, model.test_archive, "test_file", place, file)
            _install(source, partial(_flat, "test.*.idx"))
    return folder


@contextmanager
def _turn(name: str) -> Iterator[None]:
    """Hold the lock of a folder of the cache; another process waits, and then finds the work done."""
    folder = cache.downloads(name)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        yield


def _install(source: _Source, fill: Callable[[Path, Path], None]) -> None:
    """Make a folder of the cache from an archive, by `fill(archive, new folder)`.

    The archive is recorded if it is the first that was usable, and then deleted unless it is the user's. A full disk
    leaves what was downloaded.
    """
    archive, recorded = source.archive()
    say(f"unpacking {archive.name}")
    new = archive  # an error names it rather than the temporary folder
    try:
        with atomic_directory(cache.home() / source.folder, replace=True) as new:
            fill(archive, new)
            if not recorded:  # takes seconds, after which the folder is there and is recorded at once
                facts = {"bytes": archive.stat().st_size, "sha256": digest("sha256", archive)}
    except InputError as error:
        if source.file is None:
            archive.unlink()
        raise InputError(str(error).replace(str(new), str(archive))) from error
    if not recorded:
        cache.record(source.recorded_as(archive), **facts)
    if source.file is None:
        archive.unlink()


def _flat(marker: str, archive: Path, new: Path) -> None:
    """Unpack the folder of an archive that has files of this name, without the folders around it."""
    unpacked = new / ".unpacked"
    unpack(archive, unpacked, ["*"], LARGEST)
    folders = {path.parent for path in unpacked.rglob(marker)}
    if len(folders) != 1:
        raise CorpusError(f"{archive} has {len(folders)} folders with {marker}, expected one")
    for path in folders.pop().iterdir():
        if path.is_file():
            os.rename(path, new / path.name)
    shutil.rmtree(unpacked)


def _model(model: Model, dtype: str, archive: Path, new: Path) -> None:
    """Fill the folder of a model."""
    if archive.suffix == ".pt":
        shutil.copyfile(archive, new / "model.pt")
        dictionaries = list(cache.test_set(model).glob("dict.*.txt"))
        if not dictionaries:
            raise InputError(
                f"{archive} has no dictionaries, but the archive of the test set has them: lightconv released "
                f"{model.name} --file {archive.name} --test-file FILE"
            )
        for dictionary in dictionaries:
            shutil.copyfile(dictionary, new / dictionary.name)
    else:
        _flat("*.pt", archive, new)
    checkpoints = sorted(new.glob("*.pt"))
    if len(checkpoints) > 1:
        raise CorpusError(f"{archive} has several checkpoints: {', '.join(path.name for path in checkpoints)}")
    checkpoints[0].rename(new / "model.pt")
    _export(model, new, dtype)


def _export(model: Model, folder: Path, dtype: str) -> None:
    """Write the exported directory in the folder of a model, and record the number of its parameters."""
    with quietly():
        from lightconv_plugin.checkpoints.exporting import Export, export_checkpoint
        from lightconv_plugin.checkpoints.loading import count_parameters

        source, target = model.task.pair
        merges = any((folder / name).is_file() for name in _CODES)
        wanted = Export(
            dtype=dtype,
            source_lang=source,
            target_lang=target,
            bpe_codes=None if merges else "none",
            tokenizer=model.task.tokenizer,
            lowercase=model.task.lowercase,
            beam=model.beam,
            lenpen=model.lenpen,
        )
        export_checkpoint(folder / "model.pt", folder / cache.EXPORTED, folder, wanted, force=True)
        parameters = count_parameters(folder / "model.pt")
    cache.record(model.folder, parameters=parameters)
    if not merges:
        say(f"{model.name} came without merges: its input must be split into subwords")
