"""A wrong kernel does not pass: each of these mistakes, made on purpose, is noticed by a call or two (mutations.py)."""

import dataclasses

import pytest
import torch

from . import mutations
from .calls import compare
from .convolution_calls import Case
from .host import Sparse
from .mutations import Mistake

# What is compiled anew.
UNITS = tuple(
    f"convolution/{name}.cu"
    for name in ("forward_float32", "backward_float32", "band_forward", "band_backward", "slabs")
)

LIGHT = Case("lightconv", 21, 2, 3, 8, 9, 4)
DYNAMIC = Case("dynamicconv", 21, 2, 3, 8, 9, 4)
SHORT = Case("dynamicconv", 21, 2, 2, 8, 7, 3)
INSIDE = Case("dynamicconv", 100, 2, 2, 8, 7, 3)  # whole warps meet nothing but rows of their sequence
LONG = Case("dynamicconv", 40, 2, 2, 64, 40, 20, torch.float16)
MANY = Case("lightconv", 5, 70, 3, 8, 9, 4)
WIDE = Case("dynamicconv", 40, 2, 2, 64, 31, 15, torch.float16)


def other(case: Case, **changes) -> Case:
    return dataclasses.replace(case, **changes)


MISTAKES = [
    Mistake(
        "rows one step too late",
        "convolution/forward.cuh",
        "const int64_t origin = place.row - p.padding_l + begin;",
        "const int64_t origin = place.row - p.padding_l + begin + MISTAKE;",
        "forward",
        LIGHT,
    ),
    Mistake(
        "tap index one too high",
        "convolution/tile.cuh",
        "w[i] = filter[m - i];",
        "w[i] = filter[m - i + MISTAKE];",
        "forward",
        other(LIGHT, size=31),
    ),
    Mistake(
        "head forgotten",
        "convolution/forward.cuh",
        "weights{filters + (micro * tile.heads + head) * tile.pitch * S}",
        "weights{filters + (micro * tile.heads + (MISTAKE ? 0 : head)) * tile.pitch * S}",
        "forward",
        DYNAMIC,
    ),
    Mistake(
        "rows beyond the end read",
        "common/device.cuh",
        "walk.row >= readable.x && walk.row < readable.y",
        "walk.row >= readable.x && (MISTAKE || walk.row < readable.y)",
        "forward",
        LIGHT,
    ),
    Mistake(
        "rows beyond the end written",
        "convolution/forward.cuh",
        "if (t < p.steps) store_pack(",
        "if (MISTAKE || t < p.steps) store_pack(",
        "forward",
        LIGHT,
    ),
    Mistake(
        "__syncthreads missing",
        "convolution/forward.cuh",
        "    __syncthreads();\n    if (!busy) continue;",
        "    if (!MISTAKE) __syncthreads();\n    if (!busy) continue;",
        "forward",
        LIGHT,
    ),
    Mistake(
        "second __syncthreads missing",
        "convolution/forward.cuh",
        "if (begin > 0) __syncthreads();",
        "if (!MISTAKE && begin > 0) __syncthreads();",
        "forward",
        other(DYNAMIC, steps=70, size=100),
    ),
    Mistake(
        "alignment of x not asked for",
        "convolution/forward.cuh",
        "kWide<T> == 0 && aligned(p.x, size, 16)",
        "kWide<T> == 0 && (MISTAKE || aligned(p.x, size, 16))",
        "forward",
        other(LIGHT, rows="odd"),
    ),
    Mistake(
        "dropout by another word",
        "convolution/filters.cuh",
        "component(factors, e)",
        "component(factors, e ^ MISTAKE)",
        "forward",
        other(DYNAMIC, dropout=0.5),
    ),
    Mistake(
        "taps in registers: a tap's neighbour",
        "convolution/filters.cuh",
        "own[i] = to_float(from[i * step]);",
        "own[i] = to_float(from[(MISTAKE && i > 0 ? i - 1 : i) * step]);",
        "forward",
        other(DYNAMIC, size=31),
    ),
    Mistake(
        "a row of the next state too early",
        "convolution/forward.cuh",
        "load_input<T, V>(p, p.steps - count + row, place.b, c)",
        "load_input<T, V>(p, p.steps - count + row - MISTAKE, place.b, c)",
        "step",
        other(DYNAMIC, steps=3, padding_l=8, seen=8),
    ),
    Mistake(
        "short filters: a tap meets the next row",
        "convolution/short_forward.cuh",
        "fmaf(weights[e * N / V][k], window[(i + k) % K][e], sums[e])",
        "fmaf(weights[e * N / V][k], window[(i + k + MISTAKE) % K][e], sums[e])",
        "forward",
        SHORT,
    ),
    Mistake(
        "short filters: the window of a walk moved too far",
        "convolution/short_forward.cuh",
        "window[k][e] = window[k + 1][e];",
        "window[k][e] = window[k + 1 + (MISTAKE && k + 2 < K)][e];",
        "forward",
        SHORT,
    ),
    Mistake(
        "short filters: a gradient of a row that another thread owns",
        "convolution/short_backward.cuh",
        "if (own && p.dx.data != nullptr) store_pack",
        "if ((own || MISTAKE) && p.dx.data != nullptr) store_pack",
        "backward",
        INSIDE,
    ),
    Mistake(
        "short filters: a gradient of the row before the tap's",
        "convolution/short_backward.cuh",
        "window[(n + k + 1) % K][e]",
        "window[(n + k + 1 + MISTAKE * (K - 1)) % K][e]",
        "backward",
        INSIDE,
    ),
    Mistake(
        "gradient of x: tap index one too low",
        "convolution/input_gradient.cuh",
        "return filters + h * tile.pitch + taps - 1;",
        "return filters + h * tile.pitch + taps - 1 - MISTAKE;",
        "backward",
        LIGHT,
    ),
    Mistake(
        "gradient of the weight: rows of another sentence",
        "convolution/weight_gradient.cuh",
        "if (at >= span.x && at < span.y) sums_of_tap",
        "if (at >= span.x && (MISTAKE || at < span.y)) sums_of_tap",
        "backward",
        other(LIGHT, batch=1, packed=True),
    ),
    Mistake(
        "matrix units: fragments of two columns exchanged",
        "common/band_product.cuh",
        "multiply_add<T>(sums[n + 1], a, b[2], b[3]);",
        "multiply_add<T>(sums[n + 1], a, b[2 + MISTAKE], b[3 - MISTAKE]);",
        "forward",
        WIDE,
    ),
    Mistake(
        "matrix units: copies not waited for",
        "convolution/band_forward.cu",
        "    wait_for_copies();",
        "    if (!MISTAKE) wait_for_copies();",
        "forward",
        WIDE,
    ),
    Mistake(
        "matrix units: a group of copies too few waited for",
        "convolution/band_backward.cu",
        "    wait_for_copies();",
        "    if (MISTAKE) lightconv_host::cp_async_commit(), lightconv_host::cp_async_wait(1);\n"
        "    else wait_for_copies();",
        "backward",
        WIDE,
    ),
    Mistake(
        "matrix units: registers of the band exchanged",
        "convolution/band_forward.cu",
        "load_matrices<false>(a, band +",
        "load_matrices<false>(a, MISTAKE ? band + (lane % 8 + lane / 16 * 8) * shape.band_pitch + kTile * chunk +\n"
        "                                      lane / 8 % 2 * 8 : band +",
        "forward",
        WIDE,
    ),
    Mistake(
        "matrix units: registers of the gradient exchanged",
        "convolution/band_registers.cuh",
        "grad + lane % 16 * shape.row_pitch + lane / 16 * 8;",
        "grad + (MISTAKE ? lane % 8 + lane / 16 * 8 : lane % 16) * shape.row_pitch +\n"
        "      (MISTAKE ? lane / 8 % 2 : lane / 16) * 8;",
        "backward",
        WIDE,
    ),
    Mistake(
        "matrix units: rows of the sums exchanged when stored",
        "common/band_product.cuh",
        "if (channel < width) store(lane / 4 + 8 * half, channel, make_uint4(",
        "if (channel < width) store(lane / 4 + 8 * (half ^ MISTAKE), channel, make_uint4(",
        "forward",
        WIDE,
    ),
    Mistake(
        "filters in shared memory: __syncwarp missing after the weights",
        "convolution/band_taps.cuh",
        "    }\n  }\n  __syncwarp();",
        "    }\n  }\n  if (!MISTAKE) __syncwarp();",
        "forward",
        LONG,
    ),
    Mistake(
        "filters in shared memory: __syncwarp missing before the gradients are stored",
        "convolution/band_taps.cuh",
        "  __syncwarp();\n  T* data = static_cast<T*>(p.dweight)",
        "  if (!MISTAKE) __syncwarp();\n  T* data = static_cast<T*>(p.dweight)",
        "backward",
        LONG,
    ),
    Mistake(
        "slabs: one of a part forgotten",
        "convolution/slabs.cu",
        "slab < count && tap < size ?",
        "slab < count - MISTAKE && tap < size ?",
        "backward",
        MANY,
    ),
    Mistake(
        "slabs: __syncthreads missing",
        "convolution/slabs.cu",
        "  __syncthreads();",
        "  if (!MISTAKE) __syncthreads();",
        "backward",
        MANY,
    ),
    Mistake(
        "slabs: the last kernel adds up others",
        "convolution/weight_gradient.cuh",
        "distance *= kSlabsOfPart,",
        "distance *= kSlabsOfPart - MISTAKE,",
        "backward",
        MANY,
    ),
    Mistake(
        "matrix units: __syncthreads missing",
        "convolution/band_forward.cu",
        "    __syncthreads();\n    const int channel0",
        "    if (!MISTAKE) __syncthreads();\n    const int channel0",
        "forward",
        WIDE,
    ),
    Mistake(
        "matrix units: the gradient's band one row off",
        "convolution/band_backward.cu",
        "band + (lane % 8 + lane / 16 * 8) * shape.band_pitch",
        "band + (lane % 8 + lane / 16 * 8 + MISTAKE) * shape.band_pitch",
        "backward",
        WIDE,
    ),
    Mistake(
        "filters in registers: columns exchanged",
        "convolution/band_registers.cuh",
        "weights[r][n] = from[column_of(n)];",
        "weights[r][n] = from[column_of(n ^ (MISTAKE && r))];",
        "forward",
        WIDE,
    ),
    Mistake(
        "filters in registers: dropout by another tap's bit",
        "convolution/band_registers.cuh",
        "uint64_t{kept[r]} << (8 + g + 8 * r - first);",
        "uint64_t{kept[r]} << (8 + g + 8 * r - first + MISTAKE);",
        "forward",
        other(WIDE, dropout=0.5),
    ),
    Mistake(
        "filters in registers: the ninth block of dropout forgotten",
        "convolution/band_registers.cuh",
        "beyond = kept_words(p, words[0]);",
        "beyond = MISTAKE ? 15 : kept_words(p, words[0]);",
        "forward",
        other(WIDE, heads=3, dropout=0.5),
    ),
    Mistake(
        "filters in registers: gradients of other columns",
        "convolution/band_registers.cuh",
        "multiply_add<T>(sums[2 * c + 1], a, b[2], b[3]);",
        "multiply_add<T>(sums[2 * c + 1], a, b[2 - MISTAKE], b[3 - MISTAKE]);",
        "backward",
        WIDE,
    ),
    Mistake(
        "filters in registers: __syncwarp missing",
        "convolution/band_registers.cuh",
        "scratch);\n  __syncwarp();",
        "scratch);\n  if (!MISTAKE) __syncwarp();",
        "backward",
        WIDE,
    ),
]
OFFSET = Mistake(
    "an offset of 32 bits",
    "common/device.cuh",
    "(origin + offset(row, rows.stride_t) + v * V)",
    "(MISTAKE ? static_cast<int>(origin + offset(row, rows.stride_t)) : origin + offset(row, rows.stride_t) + v * V)",
    "forward",
    Case("lightconv", 3, 2, 2, 64, 5, 2),
)
ALL = [*MISTAKES, OFFSET]


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    with mutations.mistaken(tmp_path_factory.mktemp("mistaken") / "cuda", ALL, UNITS) as operators:
        yield operators


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_is_noticed(mistaken, mistake):
    mutations.assert_noticed(mistake, ALL, mistaken)


def test_an_offset_of_32_bits_is_noticed(mistaken):
    made = OFFSET.case.tensors()
    far = made | {"x": Sparse(made["x"], (2**31 + 64, 256, 1))}
    compare("out", OFFSET.case.forward(mistaken, far).values, OFFSET.case.expected("forward", made))
    # Wherever that leads: out of the tensor, or out of all memory.
    with pytest.raises(AssertionError):
        mistaken = mistaken.on(mistake=ALL.index(OFFSET) + 1)
        compare("out", OFFSET.case.forward(mistaken, far).values, OFFSET.case.expected("forward", made))
