"""fairseq's dictionaries without fairseq: four implicit symbols, then those of a file of `symbol count` lines."""

from __future__ import annotations

import io
from pathlib import Path

from lightconv_plugin.errors import InputError

BOS, PAD, EOS, UNK = "<s>", "<pad>", "</s>", "<unk>"
SPECIAL = (BOS, PAD, EOS, UNK)
_OVERWRITE = "#fairseq:overwrite"


class Dictionary:
    """Symbols and their indices, with the attribute names of fairseq's Dictionary.

    symbols, count: by index. indices: by symbol. nspecial: number of implicit symbols.
    """

    nspecial = len(SPECIAL)

    def __init__(self) -> None:
        self.symbols = [*SPECIAL]
        self.count = [1] * len(SPECIAL)
        self.indices = {symbol: index for index, symbol in enumerate(SPECIAL)}

    @classmethod
    def of_bytes(cls, content: bytes, name: object) -> Dictionary:
        """The dictionary that fairseq makes from a file with this content. `name` is the file's name in errors.

        Lines are parsed as in fairseq: everything before the last space is the symbol, which may contain spaces. A
        repeated symbol needs the mark #fairseq:overwrite; lookups then return its second index.

        Raises:
            InputError: the content is not UTF-8, a line has no count, or a symbol occurs twice.
        """
        made = cls()
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{name} is not UTF-8: byte {content[error.start]:#04x} at {error.start + 1}") from error
        # Line ends as in a file opened in text mode: "\r" alone is one, U+2028 is not.
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
        """The dictionary in a file; see `of_bytes`. OSError if it cannot be read."""
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
        return isinstance(other, Dictionary) and self.symbols == other.symbols

    def __hash__(self) -> int:
        return hash(len(self))

    def __getitem__(self, index: int) -> str:
        """The symbol of an index; <unk> for an index beyond the last."""
        return self.symbols[index] if index < len(self.symbols) else UNK

    def index(self, symbol: str) -> int:
        """The index of a symbol; that of <unk> for an unknown symbol."""
        return self.indices.get(symbol, SPECIAL.index(UNK))

    def bos(self) -> int:
        return SPECIAL.index(BOS)

    def pad(self) -> int:
        return SPECIAL.index(PAD)

    def eos(self) -> int:
        return SPECIAL.index(EOS)

    def unk(self) -> int:
        return SPECIAL.index(UNK)
