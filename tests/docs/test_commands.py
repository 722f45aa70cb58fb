"""The commands of README.md and docs/: options and files exist; those of README and tutorial are run, or marked.

A command that is not run here says so in its comment (`# needs: data, an hour`), or in one before its block
(`<!-- needs: network -->`).
"""

import ast
import pkgutil
import re
from pathlib import Path

import pytest

from lightconv_plugin.cli import main
from lightconv_plugin.mixers import OUR_OPTIONS
from lightconv_plugin.paths import configs_dir
from lightconv_plugin.recipes.data.tasks import TASKS, parse, variant_of
from lightconv_plugin.recipes.training.overrides import OPEN, expanded, get, given_values, setting
from lightconv_plugin.recipes.training.plan import read_config
from lightconv_plugin.released.models import find
from tests import programs
from tests.docs.pages import blocks, commands_of
from tests.warm_python import warm_python

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
TUTORIAL = REPOSITORY / "docs" / "tutorial.md"
PAGES = [README, REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
# Cheap enough to be run below.
RUN = ("lightconv doctor", "lightconv doctor --verbose", "lightconv user-dir")
# A path of the checkout in a page's text.
PATH = re.compile(r"`((?:benchmarks|configs|cpu|cuda|docs|lightconv_plugin|scripts|tests)/[\w./*-]+)")

COMMANDS = [
    command for page in PAGES if page.exists() for block in blocks(page, "sh") for command in commands_of(block)
]


def options_of(words) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]


def defines(text: str, name: str) -> bool:
    """Whether an option or a variable is in the text, and not only as a part of a longer name."""
    return re.search(rf"(?<![\w-]){name}(?![\w-])", text) is not None


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
    if words[0] == "reproduce" and words[1].startswith("released/"):
        find(words[1].removeprefix("released/"))
    elif words[0] in ("train", "reproduce") and not words[1].startswith("-"):
        config = configs_dir() / f"{words[1].removesuffix('.yaml').removeprefix('configs/')}.yaml"
        assert config.is_file()
        check_overrides(config, [word for word in words[2:] if re.match(r"\+\w|\w+\.\w+=", word)])


def check_overrides(path: Path, overrides) -> None:
    """The configuration has their options, or the parts that it names do."""
    if not overrides:
        return
    from tests.recipes.test_configs import schema

    config = read_config(path)
    overrides = expanded(config, overrides)
    given = given_values(overrides)
    for item, key in zip(overrides, given, strict=True):
        group, option = key.split(".", 1)
        if get(config, key) is None:
            assert item.startswith("+") or group not in OPEN, f"hydra refuses {item}"
            assert option in schema(group, setting(config, given, f"{group}._name")).__dataclass_fields__, key


def check_script(name: str, words) -> None:
    path = REPOSITORY / name
    assert path.is_file(), f"there is no {name}"
    text = path.read_text(encoding="utf-8")
    wrapped = re.search(r'be_lightconv ([\w-]+) "\$@"', text)
    if wrapped:
        check_lightconv([wrapped[1], *words])
        return
    unknown = [option for option in options_of(words) if not defines(text, option)]
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
        elif program == "python" and words[0] == "scripts/dev/calls.py":
            assert words[2] == "lightconv"
            check_lightconv(words[3:])
        elif program == "python" and words[:1] == ["-m"]:
            check_module(words[1], words[2:])
        elif program == "python":
            check_script(words[0], words[1:])
        elif program == "pip":
            check_pip(words)
        else:
            known = ("git", "cd", "chromium", "mkdocs", "pre-commit", "ncu", "nsys")
            assert program in known, "no test knows this program"
    except SystemExit as error:
        raise AssertionError(f"{command}: the parser refuses it, see its output") from error


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.place.startswith(("README", "tutorial"))], ids=str)
def test_a_command_of_readme_or_tutorial_is_run_or_says_what_it_needs(command):
    assert command.needs or " ".join(command.words) in RUN


@pytest.mark.parametrize("command", ["lightconv --help", *RUN])
def test_cheap_commands_run(command):
    assert programs.run(warm_python(), "-m", "lightconv_plugin", *command.split()[1:]).stdout


def test_the_operators_block_runs():
    page = REPOSITORY / "docs" / "operators.md"
    (block,) = [block for block in blocks(page, "python") if "lightconv_plugin.ops" in block.text]
    names = {}
    exec(compile(block.text, str(block), "exec"), names)
    assert names["out"].shape[1:] == (names["B"], names["C"])


def test_the_block_about_the_options_of_models_prints_them(capsys):
    pytest.importorskip("fairseq")
    (block,) = [block for block in blocks(REPOSITORY / "docs" / "models.md", "python") if "print_help" in block.text]
    exec(compile(block.text, str(block), "exec"), {})
    printed = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    ours = {"--" + name.replace("_", "-") for name in OUR_OPTIONS}
    assert printed > ours | {"--encoder-kernel-size-list", "--encoder-glu", "--weight-dropout", "--decoder-conv-dim"}


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
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


def text_of(page: Path) -> str:
    """The page, without the commands that are wrong on purpose (tests/docs/test_newcomer.py runs those)."""
    return page.read_text(encoding="utf-8").partition("\n## Ten wrong commands\n")[0]


def words_of(text: str) -> set[str]:
    return {word for page in PAGES if page.exists() for word in re.findall(text, text_of(page))}


def test_recipes_and_data_that_the_pages_name_exist():
    """A folder of runs/ has a configuration, and one of data/ a preparation, or a command writes it."""
    text = "\n".join(map(text_of, PAGES))
    made = set(re.findall(r"(?:save_dir=|--out )((?:runs|data)/[\w/]+)", text))
    made |= {f"data/{variant_of('wmt17_zh_en', parse('wmt17_zh_en', ['--without-cwmt']))}"}
    made |= {f"data/{name}" for name in re.findall(r"--name (\w+)", text)}
    made |= {f"data/{task}" for task in TASKS} | {"data/TASK", "runs/TASK/SYSTEM/seedN", "runs/demo/grammar"}
    made |= set(re.findall(r"^ +data: (data/\w+)", "\n".join(map(Path.read_text, configs_dir().rglob("*.yaml"))), re.M))
    wrong = []
    for page in PAGES:
        for path in re.findall(r"(?<![\w/.-])((?:runs|data)/(?!test_)[\w/*-]+)", text_of(page)):
            recipe = path.removeprefix("runs/").removesuffix("/*")
            parents = [recipe, *map(str, Path(recipe).parents)]
            known = any((configs_dir() / parent).with_suffix(".yaml").is_file() for parent in parents[:-1])
            known |= (configs_dir() / recipe).is_dir() or any(path == m or path.startswith(f"{m}/") for m in made)
            if not known:
                wrong.append(f"{page.name}: {path}")
    assert not wrong


@pytest.fixture(scope="module")
def sources():
    """The text in which an option or a variable of the environment is defined: ours, and fairseq's."""
    fairseq = pytest.importorskip("fairseq")
    ours = [
        REPOSITORY / name for name in ("lightconv_plugin", "scripts", "benchmarks", "tests/robustness", "tests/cuda")
    ]
    theirs = [Path(fairseq.__file__).parent / name for name in ("options.py", "dataclass", "tasks", "models")]
    files = [file for place in (*ours, *theirs) for file in (place.rglob("*") if place.is_dir() else [place])]
    return "\n".join(f.read_text(encoding="utf-8") for f in files if f.suffix in (".py", ".sh", ".h", ".cpp"))


def test_options_and_variables_that_the_pages_name_exist(sources):
    options, variables = words_of(r"`(--[a-z][\w-]+)"), words_of(r"\b(LIGHTCONV_[A-Z_]+)\b")
    of_others = {"--no-build-isolation", "--only-binary"}  # pip's
    of_others |= {"--dynamic-gain", "--encoder-dynamic-gain", "--decoder-dynamic-gain"}  # adding_an_option.md adds it
    sources += " ".join(OUR_OPTIONS)  # made from a table
    missing = {
        name for name in options - of_others
        if not defines(sources, name) and not re.search(rf"\b{name[2:].replace('-', '_')}\b", sources)
    }  # fmt: skip
    assert len(options) > 80 and not missing | {name for name in variables if not defines(sources, name)}
    dotted = words_of(r"`(lightconv_plugin(?:\.\w+)+)`")
    assert not [name for name in dotted if not exists(name)]


def exists(name: str) -> bool:
    """Whether a dotted name is that of a module, or of something in one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_subcommands_that_the_pages_name_exist():
    named = words_of(r"`lightconv ([a-z][a-z-]*)")
    assert named and not named - {name for group in main.COMMANDS.values() for name in group}
