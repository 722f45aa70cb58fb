"""What the installed wheel does where there is no compiler: operators, a training and a translation, by its kernels.

    python tests/packaging/without_compiler.py

It needs torch and the extra [text]. The workflow that builds the wheel runs it on every version of Python;
test_wheel.py runs it here. Each instruction set that this CPU has is tried in a process of its own.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Values of LIGHTCONV_CPU_ISA and ATEN_CPU_CAPABILITY: the best set here, AVX2, and what every CPU has.
SETS = {"best": ("", ""), "AVX2": ("avx2", ""), "none": ("", "default")}


def run_each() -> None:
    for name, (level, capability) in SETS.items():
        # Neither a compiler nor a place for what it writes.
        changes = {
            "PATH": "",
            "TORCH_EXTENSIONS_DIR": "/dev/null/no",
            "LIGHTCONV_BACKEND": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        changes |= {"LIGHTCONV_CPU_ISA": level, "ATEN_CPU_CAPABILITY": capability}
        environment = {**os.environ, **changes}
        environment = {key: value for key, value in environment.items() if value or key == "PATH"}
        subprocess.run([sys.executable, __file__, name], env=environment, check=True)


def check(name: str) -> None:
    import torch

    from lightconv_plugin.diagnostics import selfcheck
    from lightconv_plugin.ops import artifacts, backends

    library = backends.decision("cpu").library
    assert artifacts.PREBUILT in library.parents, library
    for operator in selfcheck.OPERATORS:
        error = selfcheck.operator_error(operator, torch.device("cpu"), torch.float32)
        assert error <= selfcheck.TOLERANCE[torch.float32], (operator, error)

    sys.path.append(str(Path(__file__).resolve().parents[2]))  # after the installed package
    from tests.checkpoints import exports

    model = exports.build_model(exports.pair()).train()
    losses = train(model, torch.randint(4, exports.WORDS, (8, 9)))
    assert losses[-1] < 0.9 * losses[0], losses
    with tempfile.TemporaryDirectory() as folder:
        lines = translate(exports.export(Path(folder, "model"), model.eval()), Path(folder))
    assert len(lines) == 2 and all(lines)
    capability = artifacts.information(library)["capability"]
    print(f"{name}: {capability} kernels, loss {losses[0]:.2f} -> {losses[-1]:.2f}, translated {len(lines)} lines")


def train(model, tokens) -> list[float]:
    """The losses of twenty updates on one batch, to be copied."""
    import torch

    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-3), []
    for _ in range(20):
        loss = model(tokens, tokens.roll(1, 1), tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def translate(model: Path, folder: Path) -> list[str]:
    from lightconv_plugin.cli.main import main

    source, output = folder / "source", folder / "output"
    source.write_text("the dog\nw1 w2 w3\n", encoding="utf-8")
    assert main(["translate", str(model), "--input", str(source), "--output", str(output)]) == 0
    return output.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    if sys.argv[1:]:
        check(sys.argv[1])
    else:
        run_each()
