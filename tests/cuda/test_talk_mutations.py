"""A wrong kernel of talkconv does not pass: each of these mistakes is noticed by a call (mutations.py)."""

import math

import pytest
import torch

from . import mutations
from .mutations import Mistake
from .talk_calls import TalkCase

UNITS = ("talk/talk_float32.cu", "talk/talk_band.cu")
PLAIN = TalkCase(70, 2, 2, 8, 9, 5, top=1.6)
ODD = TalkCase(70, 2, 3, 5, 9, 5, top=1.6, rows="odd")
LENGTHS = TalkCase(60, 3, 2, 8, 9, 5, lengths=torch.int64)
PACKED = TalkCase(90, 1, 2, 8, 9, 5, packed=True)
FAR = TalkCase(330, 1, 1, 64, 3, 3, top=40)
STEP = TalkCase(12, 2, 2, 8, 7, 0, seen=5)
BAND = TalkCase(90, 2, 2, 72, 15, 7, torch.float16, top=1.6)
BAND_FAR = TalkCase(330, 1, 1, 16, 3, 3, torch.float16, top=80)

MISTAKES = [
    Mistake(
        "quads of another block",
        "talk/forward.cuh",
        "quads + (s - start) / 4 * pitch",
        "quads + ((s - start) / 4 + MISTAKE) * pitch",
        "forward",
        PLAIN,
    ),
    Mistake(
        "sixteens from rows that are not the first of sixteen",
        "talk/forward.cuh",
        "!(up_to_sixteen && (s & 15) == 0)",
        "!(up_to_sixteen && (s & (MISTAKE ? 3 : 15)) == 0)",
        "forward",
        TalkCase(70, 1, 1, 8, 31, 31),
    ),
    Mistake(
        "the fraction of the row before forgotten",
        "talk/forward.cuh",
        "if (window.before != 0.0f) {",
        "if (!MISTAKE && window.before != 0.0f) {",
        "forward",
        PLAIN,
    ),
    Mistake(
        "the row after instead of the one beyond",
        "talk/forward.cuh",
        "source.row(window.last, values);",
        "source.row(max(window.last - MISTAKE, window.first), values);",
        "forward",
        PLAIN,
    ),
    Mistake(
        "windows beyond what is staged taken for staged",
        "talk/forward.cuh",
        "window.most() <= stop) {",
        "(MISTAKE || window.most() <= stop)) {",
        "forward",
        FAR,
    ),
    Mistake(
        "__syncthreads missing before sums of four",
        "talk/forward.cuh",
        "      __syncthreads();\n      for (int at = threadIdx.x; at < count * vectors",
        "      if (!MISTAKE) __syncthreads();\n      for (int at = threadIdx.x; at < count * vectors",
        "forward",
        PLAIN,
    ),
    Mistake(
        "__syncthreads missing after sums of four",
        "talk/forward.cuh",
        "(stop - start) / 16);\n    __syncthreads();",
        "(stop - start) / 16);\n    if (!MISTAKE) __syncthreads();",
        "forward",
        TalkCase(70, 1, 1, 8, 31, 31),
    ),
    Mistake(
        "alignment of x not asked for",
        "talk/forward.cuh",
        "% kTalkVector == 0 && aligned(p.x, size, bytes)",
        "% kTalkVector == 0 && (MISTAKE || aligned(p.x, size, bytes))",
        "forward",
        TalkCase(70, 2, 2, 8, 9, 5, rows="odd"),
    ),
    Mistake(
        "a row of the next state too early",
        "talk/forward.cuh",
        "talk_row<T, V>(p, steps - kept + row, b, c)",
        "talk_row<T, V>(p, steps - kept + row - MISTAKE, b, c)",
        "step",
        STEP,
    ),
    Mistake(
        "head forgotten",
        "talk/forward.cuh",
        "c / (p.channels / p.heads), t,",
        "(MISTAKE ? 0 : c / (p.channels / p.heads)), t,",
        "forward",
        ODD,
    ),
    Mistake(
        "rows beyond the end in windows",
        "talk/forward.cuh",
        "static_cast<int>(span.end));\n    range.add",
        "MISTAKE ? steps : static_cast<int>(span.end));\n    range.add",
        "forward",
        LENGTHS,
    ),
    Mistake(
        "reaches: the last outputs of each chunk forgotten",
        "talk/backward.cuh",
        "t < min(t0 + kReachRows, steps)",
        "t < min(t0 + kReachRows - 8 * MISTAKE, steps)",
        "backward",
        FAR,
    ),
    Mistake(
        "reaches: the sequence of a chunk's first output for all",
        "talk/backward.cuh",
        "if (p.cu_seqlens != nullptr && t >= span.end)",
        "if (!MISTAKE && p.cu_seqlens != nullptr && t >= span.end)",
        "backward",
        TalkCase(330, 1, 1, 64, 40, 40, packed=True),
    ),
    Mistake(
        "reaches: a segment without its last chunk",
        "talk/backward.cuh",
        "at < kReachThreads; at += kReachHeads) range",
        "at < (MISTAKE ? kReachHeads : kReachThreads); at += kReachHeads) range",
        "backward",
        FAR,
    ),
    Mistake(
        "gradient of x: whole windows one row too long",
        "talk/backward.cuh",
        "if (at >= 0 && at + S <= whole) {",
        "if (at >= 0 && at + S <= whole + MISTAKE) {",
        "backward",
        TalkCase(70, 2, 1, 8, 25, 9),
    ),
    Mistake(
        "gradient of x: windows that miss a row next to them",
        "talk/backward.cuh",
        "if (at < -S || at > whole) continue;",
        "if (at < -S + MISTAKE || at > whole) continue;",
        "backward",
        PLAIN,
    ),
    Mistake(
        "gradient of x: another head's windows",
        "talk/backward.cuh",
        "windows[i * tile.heads + head];",
        "windows[i * tile.heads + (MISTAKE ? 0 : head)];",
        "backward",
        ODD,
    ),
    Mistake(
        "gradient of x: second __syncthreads missing",
        "talk/backward.cuh",
        "if (t0 > outputs.low) __syncthreads();",
        "if (!MISTAKE && t0 > outputs.low) __syncthreads();",
        "backward",
        TalkCase(90, 1, 1, 8, 31, 31),
    ),
    Mistake(
        "gradient of the state left out",
        "talk/backward.cuh",
        "if (p.grad_state.data != nullptr && s >= steps - kept) {",
        "if (!MISTAKE && p.grad_state.data != nullptr && s >= steps - kept) {",
        "step_backward",
        STEP,
    ),
    Mistake(
        "gradient of the offset: the row beside the right one",
        "talk/windows.cuh",
        "row_at(i, window.last, c)",
        "row_at(i, max(window.last - MISTAKE, 0), c)",
        "backward",
        PLAIN,
    ),
    Mistake(
        "gradient of the offset: some lanes' channels forgotten",
        "talk/windows.cuh",
        "sum += __shfl_xor_sync(kFullWarp, upper",
        "sum += (MISTAKE ? 0.0f : 1.0f) * __shfl_xor_sync(kFullWarp, upper",
        "backward",
        PLAIN,
    ),
    Mistake(
        "matrix units: fragments of rows exchanged",
        "talk/talk_band.cu",
        "const Window window = rows[8 * half];",
        "const Window window = rows[MISTAKE ? 0 : 8 * half];",
        "forward",
        BAND,
    ),
    Mistake(
        "matrix units: a column's window for its neighbour's",
        "talk/talk_band.cu",
        "second = columns[8 * half + 1];",
        "second = columns[8 * half + !MISTAKE];",
        "backward",
        BAND,
    ),
    Mistake(
        "matrix units: a group of copies too few waited for",
        "talk/talk_band.cu",
        "      wait_for_copies();",
        "      if (MISTAKE) lightconv_host::cp_async_commit(), lightconv_host::cp_async_wait(1);\n"
        "      else wait_for_copies();",
        "forward",
        BAND,
    ),
    Mistake(
        "matrix units: registers of the sums exchanged",
        "talk/talk_band.cu",
        "multiply_add<T>(sums[n + 1], a, b[2], b[3]);",
        "multiply_add<T>(sums[n + 1], a, b[2 + MISTAKE], b[3 - MISTAKE]);",
        "backward",
        BAND,
    ),
    Mistake(
        "matrix units: __syncthreads missing",
        "talk/talk_band.cu",
        "      __syncthreads();\n      const int begin",
        "      if (!MISTAKE) __syncthreads();\n      const int begin",
        "backward",
        BAND,
    ),
    Mistake(
        "matrix units: second __syncthreads missing",
        "talk/talk_band.cu",
        "if (slice > 0 || start > all.low) __syncthreads();",
        "if (!MISTAKE && (slice > 0 || start > all.low)) __syncthreads();",
        "backward",
        BAND_FAR,
    ),
    Mistake(
        "matrix units: chunks that are needed left out",
        "talk/talk_band.cu",
        "max((mine.low - start) >> 4, 0)",
        "max((mine.low - start + MISTAKE) >> 4, 0)",
        "forward",
        BAND_FAR,
    ),
    Mistake(
        "matrix units: rows written beyond the end",
        "talk/talk_band.cu",
        "if (row < rows) store_16_bytes",
        "if (MISTAKE || row < rows) store_16_bytes",
        "forward",
        TalkCase(37, 1, 1, 16, 3, 3, torch.float16),
    ),
    Mistake(
        "matrix units: passes that overlap",
        "talk/talk_band.cu",
        "start += shape.chunks * kTile) {",
        "start += (shape.chunks - MISTAKE) * kTile) {",
        "backward",
        BAND_FAR,
    ),
    Mistake(
        "matrix units: the offsets of some outputs forgotten",
        "talk/talk_band.cu",
        "if (first + i * together < rows) writer",
        "if (first + i * together < rows - MISTAKE) writer",
        "backward",
        BAND,
    ),
    Mistake(
        "matrix units: an output's offsets from another output's window",
        "talk/talk_band.cu",
        "return own[row_of(i)];",
        "return own[row_of(MISTAKE ? 0 : i)];",
        "backward",
        BAND,
    ),
    Mistake(
        "matrix units: windows overwritten before all have read them",
        "talk/talk_band.cu",
        "  __syncthreads();  // all have read",
        "  if (!MISTAKE) __syncthreads();  // all have read",
        "backward",
        BAND_FAR,
    ),
]
SPREAD = Mistake(
    "matrix units: what is not finite stays where zeros met it",
    "talk/talk_band.cu",
    "if (__all_sync(kFullWarp, probe == 0.0f)) continue;",
    "if (MISTAKE || __all_sync(kFullWarp, probe == 0.0f)) continue;",
    "backward",
    BAND,
)
ALL = [*MISTAKES, SPREAD]


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    with mutations.mistaken(tmp_path_factory.mktemp("mistaken") / "cuda", ALL, UNITS) as operators:
        yield operators


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_is_noticed(mistaken, mistake):
    mutations.assert_noticed(mistake, ALL, mistaken)


def test_a_spread_nan_is_noticed(mistaken):
    made = SPREAD.case.tensors()
    made["grad"][40, 0, 7] = math.nan
    mutations.assert_noticed(SPREAD, ALL, mistaken, made)
