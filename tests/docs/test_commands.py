"""The commands of README.md and docs/: options and files exist; those of README and tutorial are run, or marked.

A command that is not run here says so in its comment (`# needs: data, an hour`), or in one before its block
(`<!-- needs: network -->`).
"""

import ast
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightconv_plugin.cli import main
from lightconv_plugin.paths import configs_dir
from tests.docs.pages import Block, blocks
from tests.warm_python import warm_python

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
TUTORIAL = REPOSITORY / "docs" / "tutorial.md"
PAGES = [README, REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
# Cheap enough to be run below.
USER_DIR = shlex.quote(str(REPOSITORY / "lightconv_plugin"))
RUN = ("lightconv doctor", "lightconv doctor --verbose", "lightconv user-dir")
# A path of the checkout in a page's text.
PATH = re.compile(r"`((?:benchmarks|configs|cpu|cuda|docs|lightconv_plugin|scripts|tests)/[\w./*-]+)")


@dataclass(frozen=True)
class Command:
    """One command of a page: its words without redirections and assignments, and what its comment says it needs."""

    place: str
    words: tuple[str, ...]
    needs: str

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
            for sign in "<", ">":
                while sign in words:
                    del words[words.index(sign) : words.index(sign) + 2]
            while words and re.match(r"[A-Za-z_]+=", words[0]):
                del words[0]
            if words:
                found.append(Command(str(block), tuple(words), needs))
    return found


COMMANDS = [
    command for page in PAGES if page.exists() for block in blocks(page, "sh") for command in commands_of(block)
]


def options_of(words) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]


def check_lightconv(words) -> None:
    """The real parser takes them, fairseq's takes what is passed on, and a configuration that they name exists."""
    args = main._parse(main.subparser(words[0]), list(words[1:]))
    passed_on = [*getattr(args, "unknown", []), *getattr(args, "rest", [])]
    if words[0] in ("evaluate", "tune"):
        check_fairseq("generate", ["data-bin", *passed_on])
    elif words[0] == "perplexity":
        check_fairseq("eval-lm", ["data-bin", *passed_on])
    if words[0] == "prepare":
        from lightconv_plugin.recipes.data.tasks import parser_of

        parser_of(args.task).parse_args(args.arguments)
    if words[0] in ("train", "reproduce") and not words[1].startswith("-"):
        assert (configs_dir() / f"{words[1].removesuffix('.yaml').removeprefix('configs/')}.yaml").is_file()


def check_script(name: str, words) -> None:
    path = REPOSITORY / name
    assert path.is_file(), f"there is no {name}"
    text = path.read_text(encoding="utf-8")
    wrapped = re.search(r'-m lightconv_plugin ([\w-]+(?: [\w-]+)?) "\$@"', text)
    if wrapped:
        check_lightconv([*wrapped[1].split(), *words])
        return
    unknown = [option for option in options_of(words) if option not in text]
    assert not unknown, f"{name} does not know {unknown}"


def check_fairseq(command: str, words) -> None:
    from fairseq import options

    parsers = {
        "train": options.get_training_parser,
        "generate": options.get_generation_parser,
        "eval-lm": options.get_eval_lm_parser,
    }
    options.parse_args_and_arch(parsers[command](), input_args=list(words))


def check_module(name: str, words) -> None:
    path = REPOSITORY / f"{name.replace('.', '/')}.py"
    assert path.is_file(), f"there is no module {name}"
    text = "".join(module.read_text(encoding="utf-8") for module in path.parent.glob("*.py"))  # they share options
    unknown = [option for option in options_of(words) if f'"{option}"' not in text]
    assert not unknown, f"{name} does not know {unknown}"


def check_pip(words) -> None:
    """The extras exist."""
    metadata = "".join((REPOSITORY / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "setup.py"))
    for word in words:
        extras = re.fullmatch(r"\.\[([\w,]+)\]", word)
        for extra in extras[1].split(",") if extras else ():
            assert re.search(rf'^\s*"?{extra}"?\s*[=:]\s*\[', metadata, re.MULTILINE), f"there is no extra [{extra}]"


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_of_the_pages_is_one(command):
    program, *words = command.words
    program = program.removeprefix(".venv/bin/")
    for word in words:
        if re.match(r"@?(configs|scripts|benchmarks|tests)/", word):
            assert (REPOSITORY / word.removeprefix("@")).exists(), f"there is no {word}"
    try:
        if program == "lightconv":
            check_lightconv(words)
        elif re.match(r"(scripts|benchmarks)/", program):
            check_script(program, words)
        elif program == "sbatch":
            assert any(word.startswith("scripts/") for word in words)
        elif program.startswith("fairseq-"):
            check_fairseq(program.removeprefix("fairseq-"), words)
        elif program == "python" and words[:1] == ["-m"]:
            check_module(words[1], words[2:])
        elif program == "pip":
            check_pip(words)
        else:
            assert program in ("git", "mkdocs", "pre-commit", "ncu", "nsys"), "no test knows this program"
    except SystemExit as error:
        raise AssertionError(f"{command}: the parser refuses it, see its output") from error


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.place.startswith(("README", "tutorial"))], ids=str)
def test_a_command_of_readme_or_tutorial_is_run_or_says_what_it_needs(command):
    assert command.needs or " ".join(command.words) in RUN


@pytest.mark.parametrize("command", ["lightconv --help", *RUN])
def test_cheap_commands_run(command):
    done = subprocess.run(
        [warm_python(), "-m", "lightconv_plugin", *command.split()[1:]],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.parametrize("page", [README, REPOSITORY / "docs" / "operators.md"], ids=lambda page: page.name)
def test_the_operators_block_runs(page):
    (block,) = [block for block in blocks(page, "python") if "lightconv_plugin.ops" in block.text]
    names = {}
    exec(compile(block.text, str(block), "exec"), names)
    assert names["out"].shape[1:] == (names["B"], names["C"])


@pytest.mark.parametrize(
    "block",
    [block for page in PAGES if page.exists() for block in blocks(page, "python") if not block.title],
    ids=str,
)
def test_imports_of_python_blocks_exist(block):
    for node in ast.parse(block.text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), str(block), "exec"), {})


@pytest.mark.parametrize("page", [page for page in PAGES if page.exists()], ids=lambda page: page.name)
def test_paths_that_the_pages_name_exist(page):
    named = {path for path in PATH.findall(page.read_text(encoding="utf-8")) if "TASK" not in path}
    missing = sorted(path for path in named if not list(REPOSITORY.glob(path.rstrip("/."))))
    # Made by the page itself.
    missing = [path for path in missing if not path.endswith(tuple(b.title for b in blocks(page, "python") if b.title))]
    assert not missing


def test_links_of_the_readme_exist():
    links = re.findall(r"\]\(([^)#]+)(#[^)]*)?\)", README.read_text(encoding="utf-8"))
    missing = [link for link, _ in links if "://" not in link and not (REPOSITORY / link).exists()]
    assert not missing


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 160
