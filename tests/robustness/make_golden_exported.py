"""Makes golden files that need no fairseq: exported models, their graphs, and a saved graph of the operators.

    python -m tests.robustness.make_golden_exported tests/robustness/golden/NAME tests/robustness/golden/CHECKPOINTS

The models are those of golden checkpoints (make_golden.py), so they must translate as these did. Like those, they are
made once for a version worth remembering, and every later version has to load them.
"""

import gzip
import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path

import torch

from lightconv_plugin import ops
from lightconv_plugin.cli import main as command
from tests.robustness.golden_files import LANGUAGE_MODEL, data_of, expectations, unpack

DEPLOYED = ("dynamic", "talk", "gated_short")


class Operators(torch.nn.Module):
    """Every operator in one module."""

    def forward(self, x, light, dynamic, left, right, lengths):
        y = ops.lightconv(x, light, 3, lengths=lengths)
        y = ops.dynamicconv(y, dynamic, 2, lengths=lengths, renorm_padding=True, normalize="l2")
        y = ops.talkconv(y, left, right, 3, 2, lengths=lengths)
        y, _ = ops.lightconv_step(y, None, light)
        y, _ = ops.dynamicconv_step(y, None, dynamic)
        return ops.talkconv_step(y, None, left, 3)[0]


def arguments(steps: int, batch: int) -> tuple[torch.Tensor, ...]:
    """Of Operators: 2 heads of 3 channels, K = 4."""
    generator = torch.Generator().manual_seed(steps)
    x, dynamic = (torch.randn(steps, batch, *size, generator=generator) for size in ((6,), (2, 4)))
    light = torch.randn(2, 4, generator=generator)
    left, right = (torch.rand(steps, batch, 2, generator=generator) for _ in range(2))
    return x, light, dynamic, left, right, torch.arange(1, batch + 1)


def pack(folder: Path, to: Path) -> None:
    """A folder's files as a .tar.gz with the same bytes each time."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            info = tarfile.TarInfo(path.name)
            info.size = path.stat().st_size
            archive.addfile(info, io.BytesIO(path.read_bytes()))
    to.write_bytes(gzip.compress(content.getvalue(), mtime=0))


def run(*arguments: object) -> None:
    if command.main(list(map(str, arguments))) != 0:
        raise SystemExit(f"make_golden_exported: failed: lightconv {' '.join(map(str, arguments))}")


def main() -> int:
    out, checkpoints = map(Path, sys.argv[1:])
    out.mkdir()  # golden files stay as they are
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in expectations(checkpoints)["models"]:
            data = data_of(name, folder / f"data-{name}")
            text = ("-s", "de", "-t", "en", "--tokenizer", "none", "--bpe-codes", "none")
            text = () if name == LANGUAGE_MODEL else text
            for dtype in ("float32", "int8") if name == "dynamic" else ("float32",):
                model = folder / f"{name}-{dtype}"
                run("export", unpack(checkpoints, name, folder), model, "--data", data, "--dtype", dtype, *text)
                pack(model, out / f"{model.name}.tar.gz")
            if name in DEPLOYED:
                run("deploy", folder / f"{name}-float32", folder / f"{name}-graphs", "--format", "torch.export")
                pack(folder / f"{name}-graphs", out / f"{name}-graphs.tar.gz")
    steps, batch = torch.export.Dim("steps", min=4), torch.export.Dim("batch", min=2)
    shape = {0: steps, 1: batch}
    program = torch.export.export(
        Operators(), arguments(7, 3), dynamic_shapes=(shape, None, shape, shape, shape, {0: batch})
    )
    torch.export.save(program, out / "operators.pt2")
    expected = {
        "torch": torch.__version__,
        "checkpoints": checkpoints.name,
        "operators": Operators()(*arguments(9, 2)).tolist(),
    }
    (out / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
