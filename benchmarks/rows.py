"""Whole rows of the results, several at the same time, in calls of limited time: the next call goes on.

    python -m benchmarks.rows iwslt15_en_vi/dynamicconv iwslt15_en_vi/transformer --data DATA_BIN --folder DIR \\
        --seconds 300 --json FILE -- common.bf16=true

Each is one `lightconv reproduce CONFIG --seeds N` with prepared data; trainings, states and rows are kept in DIR. What
is not done after `--seconds` is stopped, and the next call with the same DIR resumes it from the last checkpoint. What
follows -- are overrides for all. The exit status is 1 if a row failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, report
from benchmarks.recipes import require_data_bin, stop, with_overrides
from benchmarks.report import BenchmarkError
from lightconv_plugin.cgroups import cores
from lightconv_plugin.records.file import read_folder
from lightconv_plugin.records.trainings import trainings


def parser() -> argparse.ArgumentParser:
    result = report.parser("rows", __doc__)
    result.add_argument("configs", nargs="+", metavar="CONFIG", help="names of configurations")
    result.add_argument("--data", type=Path, required=True, metavar="DATA_BIN", help="their prepared data")
    result.add_argument("--folder", type=Path, required=True, metavar="DIR", help="keeps trainings and rows")
    result.add_argument("--seed", type=int, default=1, metavar="N", help="of the trainings (default: %(default)s)")
    result.add_argument("--seconds", type=machine.positive, default=300, help="at most (default: %(default)s)")
    result.add_argument("--json", type=machine.json_file, metavar="FILE", help="write what became of each to FILE")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Run, print a table and write the JSON; BenchmarkError for wrong options and failed rows."""
    options, overrides = with_overrides(parser(), arguments)
    require_data_bin(options.data)
    options.folder.mkdir(parents=True, exist_ok=True)
    threads = max(1, cores() // len(options.configs))
    rows = [Row(name, options, overrides, threads) for name in options.configs]
    # `timeout` ends a part by this signal; no child process may outlive it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        stack.callback(stop, rows)
        end = time.monotonic() + options.seconds
        while time.monotonic() < end and any(row.process.poll() is None for row in rows):
            time.sleep(0.1)
        late = {row.name for row in rows if row.process.poll() is None}
        stop(rows)
    results = {row.name: row.result(row.name in late) for row in rows}
    print(_table(results))
    if options.json:
        content = {"benchmark": "rows", "seed": options.seed, "overrides": overrides, "rows": results}
        report.write_json(options.json, content)
    if wrong := [f"{name}: {row['status']}" for name, row in results.items() if row["status"].startswith("failed")]:
        raise BenchmarkError("; ".join(wrong))


class Row:
    """One `lightconv reproduce`, in a session of its own; `process` runs it."""

    def __init__(self, name: str, options: argparse.Namespace, overrides: list[str], threads: int) -> None:
        self.name, self.seed = name, options.seed
        self.folder, self.results = options.folder / name, options.folder / "results"
        self.log = options.folder / f"{name.replace('/', '.')}.log"
        command = [sys.executable, "-m", "lightconv_plugin", "reproduce", name, "--seeds", str(options.seed)]
        command += ["--runs", str(options.folder), "--no-prepare", f"task.data={options.data.resolve()}", *overrides]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                start_new_session=True,
            )

    def result(self, late: bool) -> dict[str, Any]:
        """status: done, stopped or failed; the updates of the training, and the row's run if it is done."""
        known = trainings(read_folder(self.folder / f"seed{self.seed}").records)
        found: dict[str, Any] = {"updates": known[-1].updates if known else 0}
        if late:
            return {"status": "stopped", **found}
        if self.process.returncode:
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
            said = [line.strip() for line in lines if line.strip()]
            return {"status": f"failed ({self.process.returncode}): {(said or ['nothing was said'])[-1]}", **found}
        row = json.loads((self.results / f"{self.name}.json").read_text(encoding="utf-8"))
        return {"status": "done", **found, "run": next(run for run in row["runs"] if run["seed"] == self.seed)}


def _table(results: dict[str, dict[str, Any]]) -> str:
    lines = []
    for name, result in results.items():
        run = result.get("run", {})
        bleu = run.get("test", {}).get("sacrebleu")
        speed = run.get("tokens_per_second")
        lines.append([name, result["status"], result["updates"], report.digits(speed), report.digits(bleu)])
    return report.table(["row", "", "updates", "tokens/s", "sacreBLEU"], lines)


if __name__ == "__main__":
    sys.exit(report.run(main))
