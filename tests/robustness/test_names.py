"""Names of files and folders that a shell, hydra or argparse could take for something else.

Whole runs in folders with such names: `scripts/dev/torture.sh --names`, of which test_torture.py does a part. The tests
of the scripts themselves work in folders with spaces, commas and quotes.
"""

import re
from importlib.metadata import version

import pytest

from lightconv_plugin.recipes.training.overrides import quote
from tests import ROOT, programs
from tests.recipes.conftest import script_environment
from tests.robustness.torture import ODD_NAMES

# In the place of the interpreter: writes down its arguments, and what fairseq-generate would print.
RECORDER = """#!/usr/bin/env bash
printf '%s\\0' "$@" "<end>" >>"$RECORD"
"""
CALLS = {
    "average.sh": ["{run}", "2"],
    "evaluate.sh": ["{data}", "{run}/checkpoint.pt"],
    "perplexity.sh": ["{data}", "{run}/checkpoint.pt"],
}


@pytest.mark.parametrize("script", CALLS)
@pytest.mark.parametrize("name", ODD_NAMES.values(), ids=ODD_NAMES)
def test_tools_get_names_as_they_are(script, name, tmp_path):
    """Relative ones, so that a leading dash is the first character; what a name says is not run."""
    python = tmp_path / "python"
    python.write_text(RECORDER)
    python.chmod(0o755)
    place = tmp_path / "work"
    for folder in (f"{name}run", f"{name}data"):
        (place / folder).mkdir(parents=True)
    (place / f"{name}run/checkpoint.pt").write_text("x")
    (place / f"{name}data/test.de-en.en.idx").write_text("x")
    arguments = [argument.format(run=f"{name}run", data=f"{name}data") for argument in CALLS[script]]
    environment = script_environment(LIGHTCONV_PYTHON=str(python), RECORD=str(tmp_path / "record"))
    programs.run(ROOT / "scripts" / script, *arguments, cwd=place, env=environment, PYTHON=None)
    given = (tmp_path / "record").read_text().split("\0")
    dash = "./" if script == "average.sh" else ""  # the other commands look for themselves
    whole = [dash * argument.startswith("-") + argument for argument in arguments if argument != "2"]
    assert all(argument in given for argument in whole), given
    assert not [path for path in tmp_path.rglob("*executed*") if path.parent.name != "work"]
    assert sorted(path.name for path in place.iterdir()) == sorted((f"{name}run", f"{name}data"))


@pytest.mark.parametrize("name", [*ODD_NAMES.values(), "a\\\n", "\\\\'", "'\\'", "\\'\\\\'x\\\\"])
def test_hydra_reads_every_name_as_it_is(name):
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    for path in (f"/{name}/x", f"/x/{name}"):
        if re.search(r"\\('|\Z)", path) and version("hydra-core").startswith("1.0."):
            with pytest.raises(ValueError, match=r"hydra 1.0 cannot read a name with a backslash"):
                quote(path)
            continue
        read = OverridesParser.create().parse_override(f"task.data={quote(path)}").value()
        assert OmegaConf.create({"path": read}).path == path


def test_what_hydra_would_replace_is_refused():
    with pytest.raises(ValueError, match=r"/a\$\{b\}: a name with \$\{ cannot be passed to hydra"):
        quote("/a${b}")
