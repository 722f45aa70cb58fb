"""The fenced blocks of the Markdown pages."""

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>\w+)?(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^(?P=indent)```$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    language: such as "sh"; "" where none is given. title: of `title="…"`, or "". line: of its first line, from 1.
    """

    page: Path
    language: str
    title: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path, language: str) -> list[Block]:
    """The page's blocks in this language, without their indentation (a tab's blocks are indented)."""
    content = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(content):
        if match["language"] == language:
            text = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
            line = content.count("\n", 0, match.start("text")) + 1
            found.append(Block(page, language, match["title"] or "", line, text))
    return found
