"""The two tables at the top of README.md, from the cells of other tables: see benchmarks/pages.py."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import tables_cpu, tables_gpu, tables_scores
from benchmarks.tables import Cell, Table

_PLAIN = "fairseq's Transformer"
_TRANSFORMER = "self-attention (fairseq's Transformer)"


def _one(table: Table, row: str, column: str) -> Cell:
    (found,) = table.find(row, column)
    return found


def cpu() -> Table:
    training, generation, scores = tables_cpu.training(), tables_cpu.generation(), tables_scores.TABLES["Multi30k"]()

    def step(system: str) -> Cell:
        return _one(training, "*40 × 25*", system)

    def speed(system: str) -> Cell:
        return _one(generation, system, "beam 5, 32")

    rows = [
        [
            "training step, DynamicConv, IWSLT size",
            f"{step('DynamicConv, ours')} tokens/s",
            f"{step('fairseq DynamicConv')} fairseq's DynamicConv, {step('fairseq Transformer')} fairseq's Transformer",
            "`python -m benchmarks.training`",
        ],
        [
            "beam 5, 32 sentences, DynamicConv",
            f"{speed('DynamicConv, ours')} sentences/s",
            f"{speed('fairseq Transformer')} fairseq's Transformer; in our search {speed('*Transformer, our search')}, "
            f"in CTranslate2 {speed('CTranslate2*, float32')}",
            "`python -m benchmarks.generation`",
        ],
        [
            "the same with int8 weights",
            f"{speed('DynamicConv, ours, int8')} sentences/s",
            f"the Transformer in our search {speed('*Transformer, our search, int8')}, "
            f"in CTranslate2 {speed('CTranslate2*, int8')}",
            "`python -m benchmarks.generation`",
        ],
        [
            "Multi30k En→De, BLEU, three seeds",
            f"{_one(scores, 'DynamicConv', 'test')} DynamicConv",
            f"{_one(scores, _TRANSFORMER, 'test')} fairseq's Transformer of the same size",
            "`scripts/reproduce.sh`",
        ],
    ]
    headers = ["two cores of an AMD EPYC, float32 (BLEU: an H100)", "this plugin", "for comparison", "command"]
    return Table(f"{training.source}, {generation.source}, {scores.source}", headers, rows)


def gpu() -> Table:
    operators, training, generation = tables_gpu.against_fairseq(), tables_gpu.training(), tables_gpu.generation()
    times = sorted(cell.value for cell in operators.find("*", "forward + backward"))

    def tokens(system: str) -> Cell:
        return _one(training, system, "tokens/s")

    def sentences(system: str) -> Cell:
        return _one(generation, system, "256 sentences")

    rows = [
        [
            "operators, forward and backward",
            f"{times[0]:.1f} to {times[-1]:.1f} times as fast",
            "fairseq's CUDA layers",
        ],
        [
            "training, DynamicConv, 213M parameters",
            f"{tokens('DynamicConv, ours')} tokens/s",
            f"{tokens('fairseq Transformer')} fairseq's Transformer",
        ],
        [
            "beam 4, 256 sentences, the same model",
            f"{sentences('DynamicConv, ours')} sentences/s, with CUDA graphs {sentences('*CUDA graphs')}",
            f"{sentences(_PLAIN)} {_PLAIN}; in our search, without graphs, {sentences(f'{_PLAIN}, our search')}",
        ],
    ]
    headers = ["one NVIDIA H100, half precision ([more](docs/performance.md#the-gpu))", "this plugin", "for comparison"]
    return Table(f"{operators.source}, {training.source}, {generation.source}", headers, rows)


TABLES: dict[str, Callable[[], Table]] = {"headlines": cpu, "headlines of the GPU": gpu}
