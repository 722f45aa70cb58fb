"""What `auto` chooses: by what was measured, for the instructions that this CPU has and may use."""

import json

import pytest
import torch

pytest.importorskip("fairseq")

from lightconv_plugin.generation import dtypes
from lightconv_plugin.models.plain import plain_model
from lightconv_plugin.paths import package_dir
from tests.generation import toys

CPU = torch.device("cpu")


@pytest.fixture
def cpu(monkeypatch):
    """A CPU with these instructions."""
    return lambda level, machine="x86_64": (
        monkeypatch.setattr(dtypes, "instruction_set", lambda: level),
        monkeypatch.setattr(dtypes.platform, "machine", lambda: machine),
    )


@pytest.mark.parametrize("instructions", dtypes.TABLE)
def test_auto_is_the_best_of_what_was_measured_and_never_slower_than_float32(instructions):
    for size, measured in dtypes.TABLE[instructions].items():
        speeds = {"float32": (1.0, 1.0), **measured}
        for same in (size, size + 1):
            found = speeds[dtypes.best(instructions, same)]
            assert min(found) >= 1
            assert all(min(other) < 1 or found[0] * found[1] >= other[0] * other[1] for other in speeds.values())
    assert dtypes.best(instructions, min(dtypes.TABLE[instructions]) - 1) == "float32"


def test_the_table_is_what_the_benchmark_wrote():
    file = package_dir().parent / "benchmarks" / "results" / "cpu_decoding_dtypes.json"
    if not file.is_file():
        pytest.skip("not in a checkout")
    levels = json.loads(file.read_text(encoding="utf-8"))["levels"]
    assert levels.keys() == dtypes.TABLE.keys()
    for level, rows in levels.items():
        for row in rows:
            for dtype, speeds in dtypes.TABLE[level][row["size"]].items():
                speed = row["seconds"]["float32"] / row["seconds"][dtype]
                assert speeds[row["sentences"] > 1] == pytest.approx(speed, abs=0.006)


def test_where_nothing_was_measured_it_is_float32(cpu):
    models = [plain_model(toys.ours())]
    cpu("AVX-512 VNNI BF16")
    assert dtypes.fastest_type(models, CPU, None)[0] == "float32"  # few channels
    cpu(None, machine="aarch64")
    assert dtypes.fastest_type(models, CPU, None) == ("float32", "nothing else was measured on this CPU (aarch64)")


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((6, 1), "float32"), ((7, 0), "float16"), ((7, 5), "float16"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")],
)
def test_on_a_gpu_it_is_the_type_of_its_tensor_cores(capability, dtype, monkeypatch):
    models, gpu = [plain_model(toys.ours())], torch.device("cuda:1")
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or capability)
    reason = f"the fastest on a GPU of compute capability {capability[0]}.{capability[1]}"
    assert dtypes.fastest_type(models, gpu, None) == (dtype, reason) and asked == [gpu]
    models.append(plain_model(toys.ours()).half())
    assert dtypes.fastest_type(models, gpu, None) == ("float32", "the model is already in float16")


PLACES = {"all of torch": torch.backends, "CUDA": torch.backends.cuda.matmul}


@pytest.fixture
def set_back():
    """The precision of float32 products is as before, under the names of all versions of torch."""
    yield
    torch.set_float32_matmul_precision("highest")
    for place in PLACES.values():
        if hasattr(place, "fp32_precision"):
            place.fp32_precision = "none"


@pytest.mark.usefixtures("set_back")
def test_tf32_is_stated():
    assert dtypes.products() == "without TF32"
    torch.set_float32_matmul_precision("high")
    assert dtypes.products() == "with TF32"


@pytest.mark.usefixtures("set_back")
@pytest.mark.parametrize("place", PLACES)
def test_tf32_is_stated_where_it_was_set_by_its_newer_name(place):
    if not hasattr(PLACES[place], "fp32_precision"):
        pytest.skip("before torch 2.9")
    PLACES[place].fp32_precision = "tf32"
    assert dtypes.products() == "with TF32"


def test_a_type_without_instructions_is_warned_about(cpu):
    cpu("AVX-512 VNNI")
    message = "has no bfloat16 instructions: bfloat16 is no faster than float32 for a batch"
    assert message in dtypes.slow_type("bfloat16", CPU)
    assert dtypes.slow_type("int8", CPU) is None and dtypes.slow_type("bfloat16", torch.device("cuda")) is None
    cpu("AVX-512 VNNI BF16")
    assert dtypes.slow_type("bfloat16", CPU) is None
