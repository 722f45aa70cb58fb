"""benchmarks.rows: what becomes of rows in a call of limited time, and the next call."""

import json
import sys

import pytest

pytest.importorskip("fairseq")

from benchmarks import report, rows

ROW = {"runs": [{"seed": 1, "tokens_per_second": 1234.5, "test": {"sacrebleu": 12.5}}]}
# Stands in for `python -m lightconv_plugin reproduce NAME … --runs FOLDER`: done at once, late the first time, failing.
STAND_IN = """\
import json, pathlib, sys, time
name, folder = sys.argv[4], pathlib.Path(sys.argv[sys.argv.index("--runs") + 1])
(folder / "calls").open("a").write(" ".join(sys.argv[3:]) + "\\n")
if name.endswith("fails"):
    sys.exit("error: something is wrong")
begun = folder / (name.replace("/", ".") + ".begun")
if name.endswith("late") and not begun.exists():
    begun.touch()
    time.sleep(60)
row = folder / "results" / (name + ".json")
row.parent.mkdir(parents=True, exist_ok=True)
row.write_text({row!r})
"""


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Runs rows of these names; returns the exit status, the rows of the JSON, and what was printed."""
    python = tmp_path / "python"
    (tmp_path / "stand_in.py").write_text(STAND_IN.replace("{row!r}", repr(json.dumps(ROW))), encoding="utf-8")
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{tmp_path}/stand_in.py" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    data = tmp_path / "data"
    data.mkdir()
    (data / "dict.en.txt").touch()
    monkeypatch.setattr(rows.sys, "executable", str(python))

    def run(*names, seconds=20):
        file = tmp_path / "rows.json"
        file.unlink(missing_ok=True)
        options = ["--data", data, "--folder", tmp_path / "kept", "--seconds", seconds, "--json", file]
        arguments = [*names, *options, "--", "common.bf16=true"]
        status = report.run(lambda: rows.main([str(argument) for argument in arguments]))
        return status, json.loads(file.read_text(encoding="utf-8"))["rows"], capsys.readouterr()

    return run


def test_a_row_that_is_late_is_stopped_and_the_next_call_goes_on(call, tmp_path):
    status, found, said = call("task/done", "task/late", seconds=4)
    assert status == 0
    assert found["task/done"] == {"status": "done", "updates": 0, "run": ROW["runs"][0]}
    assert found["task/late"] == {"status": "stopped", "updates": 0}
    assert "12.5" in said.out
    status, found, _ = call("task/late")
    assert status == 0 and found["task/late"]["status"] == "done"
    first = (tmp_path / "kept" / "calls").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("reproduce task/") and "--no-prepare" in first
    assert first.endswith(f"task.data={tmp_path}/data common.bf16=true")


def test_a_row_that_fails_is_told(call):
    status, found, said = call("task/done", "task/fails")
    assert status != 0 and found["task/done"]["status"] == "done"
    assert found["task/fails"]["status"] == "failed (1): error: something is wrong"
    assert "task/fails: failed (1): error: something is wrong" in said.err
