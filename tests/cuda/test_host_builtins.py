"""The header that stands in for CUDA: it computes what a device would, and complains where it must."""

import subprocess

import pytest
import torch

from . import host


@pytest.fixture(scope="module")
def program():
    return host.build(host.HERE / "host_builtins.cu", *host.EMULATOR)


def run(program, name, **options):
    return subprocess.run([program, name], capture_output=True, env=host.environment(), timeout=120, **options)


@pytest.mark.parametrize("name", ["shuffles", "sums", "products", "limits", "exponentials"])
def test_computes(program, name):
    result = run(program, name, text=True)
    assert (result.stdout, result.returncode) == ("right\n", 0), result.stderr


@pytest.mark.parametrize("name", ["barrier", "warp barrier", "copy"])
def test_a_correct_program_gives_the_same_bits_in_every_order(program, name):
    assert run(program, name, text=True).stdout == "same\n"


@pytest.mark.parametrize(
    "name",
    [
        "missing barrier",
        "missing warp barrier",
        "warp barrier between warps",
        "unwritten shared memory",
        "copy without wait",
    ],
)
def test_a_race_shows_in_the_results(program, name):
    assert run(program, name, text=True).stdout == "differ\n"


@pytest.mark.parametrize(
    ("name", "complaint"),
    {
        "shared overrun": "heap-buffer-overflow",
        "shared underrun": "heap-buffer-overflow",
        "global overrun": "heap-buffer-overflow",
        "misaligned vector": "misaligned address",
        "early return": "divergent barrier: thread (0,0,0) waits for __syncthreads at",
        "two barriers": "divergent barrier: thread (0,0,0) waits for __syncthreads at",
        "lane leaves": "lanes do not meet: thread (0,0,0) waits for __shfl_sync at",
        "wrong mask": "thread (16,0,0) calls __shfl_sync with a mask that leaves it out",
        "misaligned copy": "cp.async: global address not a multiple of 16",
        "lowered limit": "the limit of shared memory is lowered from 65536 to 50000",
        "misaligned matrix": "ldmatrix: shared address not a multiple of 16",
    }.items(),
)
def test_complains(program, name, complaint):
    result = run(program, name, text=True)
    assert result.returncode != 0
    assert complaint in result.stderr


def test_half_types_convert_as_torch_does(program):
    generator = torch.Generator().manual_seed(1)
    magnitudes = torch.exp2(torch.rand(20000, generator=generator) * 60 - 40)
    values = torch.cat([magnitudes, -magnitudes, torch.tensor([0.0, -0.0, float("inf"), 65519.99, 65520.0, 3.4e38])])
    # Ties: half-way between two neighbours of each type.
    every = torch.arange(0x7BFF, dtype=torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        neighbours = every.view(dtype).float(), (every + 1).view(dtype).float()
        values = torch.cat([values, ((neighbours[0].double() + neighbours[1].double()) / 2).float()])
    result = run(program, "convert", input=values.numpy().tobytes())
    assert result.returncode == 0, result.stderr.decode()
    words = torch.frombuffer(bytearray(result.stdout[: 4 * len(values)]), dtype=torch.int16).view(2, -1)
    for row, dtype in zip(words, (torch.float16, torch.bfloat16), strict=True):
        assert torch.equal(row, values.to(dtype).view(torch.int16))
    floats = torch.frombuffer(bytearray(result.stdout[4 * len(values) :]), dtype=torch.float32).view(2, -1)
    all_words = torch.arange(-0x8000, 0x8000).to(torch.int16).roll(0x8000)
    for row, dtype in zip(floats, (torch.float16, torch.bfloat16), strict=True):
        want = all_words.view(dtype).float()
        assert torch.equal(row.nan_to_num(7.5), want.nan_to_num(7.5))
        assert torch.equal(row.isnan(), want.isnan())


def test_threads_switch_by_ucontext_where_there_is_no_assembly(tmp_path):
    other = tmp_path / "by_ucontext.cpp"
    other.write_text(f'#define LIGHTCONV_HOST_UCONTEXT\n#include "{host.EMULATOR[0]}"\n')
    program = host.build(host.HERE / "host_builtins.cu", other, *host.EMULATOR[1:], sanitize=False)
    for name in ("shuffles", "sums", "products"):
        assert run(program, name, text=True).stdout == "right\n"
