"""Texts of any size, line by line: reading with checks, writing, and a pool of processes that maps them.

Nothing here holds a whole text in memory: each process holds a few blocks of a megabyte.
"""

from __future__ import annotations

import gzip
import io
import multiprocessing
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from tqdm import tqdm

from lightconv_plugin.errors import CorpusError
from lightconv_plugin.processes import begin_process, forking
from lightconv_plugin.progress import progress

BLOCK = 1 << 20  # bytes of text sent to a process at a time, enough to make the cost of sending small
BOM = b"\xef\xbb\xbf"

_work: Callable[[str], str] | Exception  # what a process of the pool applies to a line; set when it starts


class _NotUtf8(Exception):
    """Its arguments (exceptions are pickled): the number of preceding lines in the block, and what is wrong."""


def open_text(path: Path) -> io.BufferedIOBase:
    """The bytes of a text, decompressed if its name ends with .gz."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _unreadable(path: Path, error: Exception) -> Exception:
    return CorpusError(f"cannot read {path}: {error}")


def iter_lines(path: Path) -> Iterator[str]:
    """Iterate over the lines of a UTF-8 text, plain or .gz, without line ends.

    Only a line feed ends a line (U+2028 and the like do not). A carriage return before it is removed, and so is a byte
    order mark at the beginning.
    """
    number = 0
    try:
        with open_text(path) as file:
            for number, line in enumerate(file, 1):
                text = (line.removeprefix(BOM) if number == 1 else line).decode()
                yield text.removesuffix("\n").rstrip("\r")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8: line {number}: {error.reason}") from None
    except (EOFError, OSError, zlib.error) as error:
        raise _unreadable(path, error) from None


def _blocks(file: io.BufferedIOBase, size: int) -> Iterator[bytes]:
    """Blocks of whole lines, about `size` bytes each."""
    rest = b""
    while data := file.read(size):
        cut = data.rfind(b"\n") + 1
        if cut:
            yield rest + data[:cut]
            rest = data[cut:]
        else:
            rest += data
    if rest:
        yield rest


def count_lines(path: Path) -> int:
    """The number of lines that `iter_lines` yields."""
    lines, last = 0, b"\n"
    try:
        with open_text(path) as file:
            while data := file.read(BLOCK):
                lines += data.count(b"\n")
                last = data[-1:]
    except (EOFError, OSError, zlib.error) as error:
        raise _unreadable(path, error) from None
    return lines + (last != b"\n")


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Write lines, each followed by a line feed; returns their number."""
    count = 0
    with path.open("w", encoding="utf-8", newline="\n", buffering=BLOCK) as file:
        for line in lines:
            file.write(line + "\n")
            count += 1
    return count


def _start(factory: Callable[..., Callable[[str], str]], arguments: tuple) -> None:
    global _work
    begin_process()
    try:
        _work = factory(*arguments)
    except Exception as error:  # if raised here, the caller would only see a broken pool
        _work = error


def _map_block(block: bytes, first: bool, work: Callable[[str], str] | None = None) -> tuple[bytes, int]:
    """(the mapped block, its number of lines)."""
    if first:
        block = block.removeprefix(BOM)
    try:
        text = block.decode()
    except UnicodeDecodeError as error:
        raise _NotUtf8(block.count(b"\n", 0, error.start), error.reason) from None
    lines = text.removesuffix("\n").replace("\r\n", "\n").split("\n")
    mapping = work or _work
    if isinstance(mapping, Exception):
        raise mapping
    mapped = [mapping(line.rstrip("\r")) for line in lines]
    result = "\n".join(mapped)
    if result.count("\n") != len(lines) - 1:
        raise ValueError("one line became several")
    return (result + "\n").encode(), len(lines)


def map_file(
    factory: Callable[..., Callable[[str], str]],
    arguments: tuple,
    source: Path,
    output: Path,
    title: str,
    workers: int,
) -> int:
    """Map `source` to `output` line by line, in order, by `factory(*arguments)`, called once in each process.

    Args:
        factory: an importable function, so that only its arguments are sent; what it returns maps a line to a line
        source: UTF-8 text, plain or .gz, read as by `iter_lines`
        title: title of the progress bar
        workers: number of processes; a text of a single block is mapped in this process

    Returns:
        the number of lines
    """
    done = 0
    tqdm.monitor_interval = 0  # no monitor thread: it would still run when the next pool forks
    size = source.stat().st_size
    if source.suffix != ".gz":
        workers = min(workers, size // BLOCK + 1)
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start, (factory, arguments))
    waiting: deque[Future[tuple[bytes, int]]] = deque()
    bar = progress(total=size, desc=f"  {title}", unit="B", unit_scale=True)

    with source.open("rb") as raw, output.open("wb", buffering=BLOCK) as out, bar:

        def write(block: tuple[bytes, int]) -> None:
            nonlocal done
            out.write(block[0])
            done += block[1]
            bar.set_postfix_str(f"{done} lines", refresh=False)
            bar.update(raw.tell() - bar.n)

        try:
            file = gzip.GzipFile(fileobj=raw) if source.suffix == ".gz" else raw
            if workers <= 1:
                work = factory(*arguments)
                for number, block in enumerate(_blocks(file, BLOCK)):
                    write(_map_block(block, number == 0, work))
            else:
                for number, block in enumerate(_blocks(file, BLOCK)):
                    with forking():  # at the first blocks
                        waiting.append(pool.submit(_map_block, block, number == 0))
                    if len(waiting) > 2 * workers:  # just enough text in memory to keep every process busy
                        write(waiting.popleft().result())
                while waiting:
                    write(waiting.popleft().result())
        except _NotUtf8 as error:
            raise CorpusError(f"{source} is not UTF-8: line {done + error.args[0] + 1}: {error.args[1]}") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise _unreadable(source, error) from None
        except BrokenProcessPool:
            raise CorpusError(
                f"a process that worked on {source} was killed, perhaps for lack of memory: try fewer `workers`"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return done
