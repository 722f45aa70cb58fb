"""Every option of every command with a wrong value: refused in one line that names it, before any work, nothing left.

The options are found by looking at the parsers and at what the scripts' --help says, so that a new one is tried too.
"""

import contextlib
import io
import itertools
import urllib.request
from pathlib import Path

import pytest

from lightconv_plugin.cli import main
from lightconv_plugin.recipes.data.tasks import TASKS
from lightconv_plugin.recipes.data.tasks import parser_of as parser_of_task
from tests import ROOT, programs
from tests.recipes.conftest import script_environment

COMMANDS = {name: main.subparser(name) for group in main.COMMANDS.values() for name in group}
WRONG = {
    "choices": ("", "nonsense"),
    "positive": ("", "nonsense", "0", "-1", "1.5", "1e3", "²", "nan"),
    "int": ("", "nonsense", "1.5", "nan", "1e3"),
    "float": ("", "nonsense", "1,5"),
    "not_negative": ("", "nonsense", "-1", "1.5", "nan"),
    "tokens_or_auto": ("", "nonsense", "0", "-3", "1.5"),
    "host_and_port": ("", "nonsense", "host:", ":1", "a/b:1"),
    "_finite": ("", "nonsense", "nan", "inf", "1,5"),
    "_number": ("", "nonsense", "-1", "0", "1.5"),
    "_name": ("", "a/b", "../x"),
    "plain_name": ("", "a/b", "../x"),
    "_figure": ("", "nonsense", "page.html"),
    "bpe_mark": ("nonsense",),
    "natural": ("", "nonsense", "-1", "1.5", "1e3", "nan"),
    "ratio": ("", "nonsense", "0.5", "nan", "inf", "1,5"),
    "probability": ("", "x", "nan", "0", "1", "-0.1", "1e9"),
    "language": ("", "zh-cn", "../x", "a.b"),
    "folder": ("",),
    "folder_as_typed": ("",),
    "place": ("",),
    "expected_size": ("", "nonsense", "train:1", "train:x:1", "train:1:-1"),
}
"""Kind of value (the type's name) -> texts that are none. A kind that is not here fails the test: it wants its own."""


def is_typed(action):
    """Whether an option takes a value that can be wrong by itself; a path or a name may be anything."""
    return bool(action.option_strings) and action.nargs != 0 and (action.choices or action.type not in (None, Path))


def kind_of(action):
    return "choices" if action.choices else action.type.__name__


def refusal(parse):
    """What a parser says when it refuses, which it does with status 2."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as stopped:
        parse()
    assert stopped.value.code == 2
    return said.getvalue()


def assert_one_line(said, *names):
    """One line is the error, and names the option (by one of its names) and the value."""
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "error:" in line]
    *names, value = names
    assert any(name in line for name in names) and value in line, line


@pytest.mark.parametrize("command", [name for name, parser in COMMANDS.items() if any(map(is_typed, parser._actions))])
def test_options_of_the_lightconv_command(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for action in filter(is_typed, COMMANDS[command]._actions):
        for option, value in itertools.product(action.option_strings[-1:], WRONG[kind_of(action)]):
            words = [option, *[value] * action.nargs] if isinstance(action.nargs, int) else [f"{option}={value}"]
            assert_one_line(refusal(lambda words=words: main.main([command, *words])), option, value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("task", TASKS)
def test_options_of_the_tasks_of_prepare(task, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(urllib.request.OpenerDirector, "open", lambda *arguments, **options: pytest.fail("downloads"))
    tried = 0
    for action in filter(is_typed, parser_of_task(task)._actions):
        for option, value in itertools.product(action.option_strings, WRONG[kind_of(action)]):
            assert main.main(["prepare", task, f"{option}={value}"]) == 2
            assert_one_line(capsys.readouterr().err, option, value)
            tried += 1
    assert main.main(["prepare", task, "--no-such-option"]) == 2
    assert_one_line(capsys.readouterr().err, "--no-such-option", "unrecognized")
    assert tried > 7 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        "average --inputs /no/where --output out.pt",
        "prepare iwslt14_de_en --data /no/where",
        "prepare gbw --mirror /no/where --any-size",
        "average --inputs /no/where --output out.pt --num-last-checkpoints 3",
        "tune /no/where /no/where/either",
        "score --sys /no/where --ref /no/where/either",
        "score --gen /no/where",
        "score --metric perplexity --log /no/where",
        "shortlist /no/where --output out.txt",
        "translate /no/where",
        "convert /no/where out.pt --to plugin",
        "train /no/where",
        "evaluate /no/where /no/where/either",
        "perplexity /no/where /no/where/either",
        "demo /no/where",
        "reproduce /no/where --seeds 1",
        "report /no/where -o out.html",
    ],
)
def test_what_is_not_there_is_named_and_nothing_made(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and "/no/where" in err and err.count("\n") == 1, err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "option, value",
    [
        *itertools.product(["--lenpen", "--unkpen", "--max-len-a", "--temperature"], ["nan", "inf"]),
        *itertools.product(["--min-len", "--max-len-b", "--no-repeat-ngram-size", "--max-len-a"], ["-1"]),
        *itertools.product(["--temperature"], ["0", "-1"]),
        ("--device", "toaster"),
    ],
)
def test_numbers_of_the_search_that_make_no_sense(option, value, tmp_path, capsys):
    """They are refused before the checkpoint is opened: this one could not be."""
    pytest.importorskip("fairseq")
    (tmp_path / "empty.pt").touch()
    assert main.main(["translate", str(tmp_path / "empty.pt"), f"{option}={value}"]) == 2
    assert_one_line(capsys.readouterr().err, option, option.lstrip("-").replace("-", "_"), value)


# ------------------------------------------------------------------------------------------------ shell scripts

SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("*.sh") if path.read_bytes().startswith(b"#!"))
PASSES_ON = {"test.sh", "evaluate.sh", "score.sh", "perplexity.sh", "slurm_train.sh"}
"""Scripts whose further arguments are another program's: pytest's, fairseq's, those of train.sh."""


NO_PROXY = "http://127.0.0.1:1"  # through which nothing is downloaded


def place(folder):
    """What a script wants to be there before it looks at its options."""
    (folder / "config.yaml").touch()
    (folder / "data").mkdir()
    first = {
        "average.sh": folder / "data",
        "train.sh": folder / "config.yaml",
        "fuzz.sh": "1",
        "prepare.sh": "parallel",
    }
    return {script: [argument] for script, argument in first.items()}


def made(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in PASSES_ON])
def test_an_unknown_option_of_a_script_is_named_before_any_work(script, tmp_path):
    arguments = place(tmp_path).get(script, [])
    before = made(tmp_path)
    environment = script_environment(TMPDIR=str(tmp_path), http_proxy=NO_PROXY, https_proxy=NO_PROXY)
    command = [ROOT / "scripts" / script, *arguments, "--no-such-option"]
    done = programs.run(*command, status=None, cwd=tmp_path, input="", env=environment)
    assert done.returncode in (1, 2), done.stderr
    assert "--no-such-option" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert "--no-such-option" in done.stderr.splitlines()[-1], done.stderr
    assert "download" not in done.stderr
    assert made(tmp_path) == before
