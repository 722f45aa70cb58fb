"""The fenced blocks of the Markdown pages, and their commands."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>\w+)?(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^(?P=indent)```$',
    re.MULTILINE | re.DOTALL,
)

_TAB = re.compile(r'^=== "(.*)"$', re.MULTILINE)
ROOT = Path(__file__).resolve().parents[2]
USER_DIR = shlex.quote(str(ROOT / "lightconv_plugin"))


@dataclass(frozen=True)
class Block:
    """One fenced block.

    language: such as "sh"; "" where none is given. title: of `title="…"`, or "". line: of its first line, from 1.
    tab: the title of the tab it is in, such as "pip", or "".
    """

    page: Path
    language: str
    title: str
    line: int
    text: str
    tab: str = ""

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
            tabs = _TAB.findall(content, 0, match.start()) if match["indent"] else []
            found.append(Block(page, language, match["title"] or "", line, text, tabs[-1] if tabs else ""))
    return found


@dataclass(frozen=True)
class Command:
    """One command of a page: its words without redirections and assignments, and what its comment says it needs.

    given, written: the files that standard input and output are redirected to, or "".
    """

    place: str
    words: tuple[str, ...]
    needs: str
    given: str = ""
    written: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {' '.join(self.words)}"


def commands_of(block: Block) -> list[Command]:
    """The commands of a block; `&&` separates two, a backslash continues a line, # begins a comment."""
    lines = block.page.read_text(encoding="utf-8").splitlines()
    above = next((line for line in reversed(lines[: block.line - 2]) if line.strip()), "")
    of_block = re.fullmatch(r"<!-- needs: (.*) -->", above.strip())
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        code, _, comment = line.partition(" #") if not line.startswith("#") else ("", "", line)
        needs = re.search(r"needs: ([^.]*)", comment)
        needs = needs[1] if needs else of_block[1] if of_block else ""
        for part in code.replace('"$(lightconv user-dir)"', USER_DIR).split("&&"):
            words = [word for word in shlex.split(part) if word != "…"]
            redirected = {"<": "", ">": ""}
            for sign in redirected:
                while sign in words:
                    place = words.index(sign)
                    redirected[sign] = words[place + 1]
                    del words[place : place + 2]
            while words and re.match(r"[A-Za-z_]+=", words[0]):
                del words[0]
            if words:
                found.append(Command(str(block), tuple(words), needs, *redirected.values()))
    return found
