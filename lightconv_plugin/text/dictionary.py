"""fairseq's dictionaries without fairseq: a file of `symbol count` lines, after four symbols that are in no file."""

from __future__ import annotations

import io
from pathlib import Path

from lightconv_plugin.errors import InputError

BOS, PAD, EOS, UNK = "<s>", "<pad>", "</s>", "<unk>"
SPECIAL = (BOS, PAD, EOS, UNK)
_OVERWRITE = "#fairseq:overwrite"


class Dictionary:
    """Symbols and their indices, under the names that fairseq's Dictionary has.

    symbols, count: by index. indices: of each symbol. nspecial: how many symbols are in no file.
    """

    nspecial = len(SPECIAL)

    def __init__(self) -> None:
        self.symbols = [*SPECIAL]
        self.count = [1] * len(SPECIAL)
        self.indices = {symbol: index for index, symbol in enumerate(SPECIAL)}

    @classmethod
    def of_bytes(cls, content: bytes, name: object) -> Dictionary:
        """The dictionary that fairseq makes of a file with this content. `name` is what errors call the file.

        A line is all that fairseq takes for one: the symbol is what stands before the last space, spaces included. A
        symbol that occurs again needs the mark #fairseq:overwrite; it then has a second index, which is the one found.

        Raises:
            InputError: the content is not UTF-8, a line has no count, or a symbol occurs twice.
        """
        made = cls()
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{name} is not UTF-8: byte {content[error.start]:#04x} at {error.start + 1}") from error
        # Line ends as of a file that is opened as text: "\r" alone is one, U+2028 is none.
        for number, line in enumerate(io.StringIO(text, newline=None), 1):
            try:
                symbol, count = line.rstrip().rsplit(" ", 1)
                overwrite = count == _OVERWRITE
                if overwrite:
                    symbol, count = symbol.rsplit(" ", 1)
                made._add(symbol, int(count), overwrite)
            except ValueError:
                raise InputError(
                    f"{name}, line {number}: expected a symbol, a space and its count, got {line[:80]!r}"
                ) from None
            except KeyError:
                raise InputError(
                    f"{name}, line {number}: {symbol[:80]!r} occurs twice; {_OVERWRITE} at its end allows that"
                ) from None
        return made

    @classmethod
    def load(cls, path: Path) -> Dictionary:
        """The dictionary of a file; see `of_bytes`. OSError where it cannot be read."""
        return cls.of_bytes(Path(path).read_bytes(), path)

    def _add(self, symbol: str, count: int, overwrite: bool) -> None:
        if symbol in self.indices and not overwrite:
            raise KeyError(symbol)
        self.indices[symbol] = len(self.symbols)
        self.symbols.append(symbol)
        self.count.append(count)

    def __len__(self) -> int:
        return len(self.symbols)

    def __contains__(self, symbol: object) -> bool:
        return symbol in self.indices

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dictionary) and (self.symbols, self.indices) == (other.symbols, other.indices)

    def __hash__(self) -> int:
        return hash(len(self))

    def __getitem__(self, index: int) -> str:
        """The symbol of an index; <unk> for one beyond the last."""
        return self.symbols[index] if index < len(self.symbols) else UNK

    def index(self, symbol: str) -> int:
        """The index of a symbol; that of <unk> for one that is not there."""
        return self.indices.get(symbol, SPECIAL.index(UNK))

    def bos(self) -> int:
        return SPECIAL.index(BOS)

    def pad(self) -> int:
        return SPECIAL.index(PAD)

    def eos(self) -> int:
        return SPECIAL.index(EOS)

    def unk(self) -> int:
        return SPECIAL.index(UNK)
