"""A small corpus, and a way to start a script as a user would."""

import itertools
import os
import signal
import sys
from unittest import mock

import pytest

from tests import ROOT, programs
from tests.recipes.reproduce.reproduction_world import templates, world  # noqa: F401  (fixtures)
from tests.warm_python import warm_python


def script_environment(python=None, **changes):
    """The environment of a script under test: this interpreter instead of a set-up of its own, one thread.

    The plugin is this checkout's, as lib.sh has it: another one may be installed. `python` is `warm_python()` where it
    is not given: a test that signals processes, or looks for them, gives `sys.executable`.
    """
    clean = {key: value for key, value in os.environ.items() if key != "PYTHON"}
    python = python or warm_python()
    return clean | {"LIGHTCONV_PYTHON": python, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | changes


def heed_ctrl_c():
    """For Popen's preexec_fn: a shell without job control starts what it puts in the background with Ctrl-C ignored;
    nohup has the end of the terminal ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def run_script():
    """Run scripts/NAME with arguments, and the `options` of programs.run."""

    def run(name, *arguments, env=None, **options):
        # Of this process's variables, only those that are passed on.
        environment = {"PYTHONPATH": None} | dict.fromkeys(os.environ) | (env or script_environment())
        return programs.run(ROOT / "scripts" / name, *arguments, env=environment, **options)

    return run


def write_parts(folder, names, sizes, seed=5):
    """Parallel text of the grammar in parts of these names and numbers of lines."""
    from lightconv_plugin.recipes.grammar.corpus import pairs

    folder.mkdir(parents=True, exist_ok=True)
    stream = pairs(seed)
    for name, size in zip(names, sizes, strict=True):
        rows = list(itertools.islice(stream, size))
        for lang, side in (("en", 0), ("de", 1)):
            (folder / f"{name}.{lang}").write_text("".join(row[side] + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """(raw, prepared): a miniature corpus, prepared in a path with a space and a comma."""
    from lightconv_plugin.recipes.data.tasks import prepare

    base = tmp_path_factory.mktemp("mini, corpus")
    raw = write_parts(base / "raw text", ("train", "val", "test_2016_flickr"), (300, 20, 20))
    out = base / "prepared"
    with mock.patch.object(sys, "executable", warm_python()):  # by which fairseq-preprocess is started
        prepare("multi30k_en_de", ["--data", str(raw), "--out", str(out), "--bpe", "200", "--workers", "2"])
    return raw, out


def check_recipes(out):
    """What corpus.json says of the text of each language repeats how the test set was tokenised."""
    import json

    from lightconv_plugin.text.recipe import Recipe

    about = json.loads((out / "corpus.json").read_text(encoding="utf-8"))
    assert set(about["text"]) == {about["src"], about["tgt"]}
    for lang, known in about["text"].items():
        tokenise = Recipe.of_json(known).tokenise()
        raw, tok = ((out / kind / f"test.{lang}").read_text(encoding="utf-8").split("\n") for kind in ("raw", "tok"))
        assert [tokenise(line) for line in raw] == tok and len(tok) > 2
