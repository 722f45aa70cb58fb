"""Collects the results of the parts of gpu.sh or gpu_fairseq.sh in one file:
`python -m benchmarks.collect WORK FILE [--print]`.

WORK/parts has lines with a part's name, status and seconds, separated by tabs; the last line about a part counts.
WORK/json/NAME.json is a benchmark's output, possibly incomplete. --print, used at the end, prints the tables and adds
the GPU's name to the file, which tests do not record.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import report


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collect", description=__doc__.partition("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--print", action="store_true", help="print the tables, and add the card to the file")
    options = parser.parse_args(arguments)
    parts = {}
    for line in (options.work / "parts").read_text(encoding="utf-8").splitlines():
        name, status, seconds = line.split("\t")
        parts[name] = {"name": name, "status": status, "seconds": round(float(seconds), 1)}
    results = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((options.work / "json").glob("*.json"))
    }
    content = {"benchmark": options.file.stem, "parts": list(parts.values()), "results": results}
    report.write_json(options.file, content)
    if options.print:
        # These import torch, which would take too long without --print, since that is called after every part.
        import torch

        from benchmarks import machine
        from benchmarks.operators import overview

        if torch.cuda.is_available():
            report.write_json(options.file, content | machine.card())
        for name, result in results.items():
            if result["benchmark"] == "operators" and result["cases"]:
                print(f"== {name}: {result['dtype']}, copy {result['rates']['bytes_per_s'] / 1e9:.0f} GB/s")
                for measured in result["cases"][0]["floor"]:
                    print(overview(result["cases"], measured) + "\n")
        rows = [[part["name"], part["status"], part["seconds"]] for part in parts.values()]
        print(report.table(["part", "", "seconds"], rows))


if __name__ == "__main__":
    sys.exit(report.run(main))
