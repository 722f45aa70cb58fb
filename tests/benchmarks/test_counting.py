"""Launches, bytes and waits of the steps: what is counted, and that the systems need what was recorded."""

import json

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("fairseq", reason="fairseq is not installed")

from benchmarks import counting, machine, systems
from benchmarks.launches import Counter, as_on_cuda
from lightconv_plugin import ops

RECORDED = json.loads((machine.ROOT / "benchmarks" / "results" / "counted_steps.json").read_text(encoding="utf-8"))
MORE = 1.05


def counted(call, *shapes, dtype=torch.bfloat16):
    tensors = [torch.zeros(shape, device="meta", dtype=dtype) for shape in shapes]
    with Counter() as counter:
        call(*tensors)
    return counter.counts


def test_products():
    counts = counted(torch.mm, (3, 4), (4, 5))
    assert counts.launches == {"aten.mm": 1} and counts.flops == 2 * 3 * 4 * 5
    assert counts.bytes.total() == counts.product_bytes == 2 * (3 * 4 + 4 * 5 + 3 * 5)


def test_views_and_allocations_are_nothing():
    counts = counted(lambda x: torch.empty_like(x.view(6).expand(2, 6)), (2, 3))
    assert not counts.launches and not counts.bytes


def test_what_is_read_and_written():
    """An expanded tensor is read once, a look-up reads what it writes, a tensor changed in place is both."""
    assert counted(lambda x: x.expand(8, 3) + 1, (1, 3)).bytes.total() == 2 * (3 + 24)
    rows = torch.zeros(2, dtype=torch.int64, device="meta")
    assert counted(lambda x: x.index_select(0, rows), (100, 3)).bytes.total() == 2 * 2 * 6 + 2 * 8
    assert counted(lambda x, y: x.add_(y), (5,), (5,)).bytes.total() == 2 * 15
    assert counted(lambda x, y: torch._foreach_add_([x, y], [y, x]), (5,), (5,)).bytes.total() >= 2 * 15


def test_dropout_is_one_launch_as_on_cuda():
    with as_on_cuda():
        assert counted(lambda x: F.dropout(x, 0.1), (5,)).launches == {"aten.native_dropout": 1}
        assert not counted(lambda x: F.dropout(x, 0.1, training=False), (5,)).launches


def test_our_convolution():
    counts = counted(lambda x, w: ops.lightconv(x, w, 1), (6, 2, 8), (2, 3))
    assert counts.launches == {"lightconv.lightconv": 1} and counts.flops == 2 * 6 * 2 * 8 * 3


def test_waits_are_noted_with_their_place():
    def waits(x):
        return float(x.sum()) + float(x.sum().cpu())

    counts = counted(waits, (5,))
    assert [place.partition(":")[0] for place in counts.waits] == ["test_counting.py"] * 2


def as_recorded():
    """Other versions of torch and fairseq call other operators."""
    return RECORDED["machine"]["versions"] == counting.versions()


@pytest.mark.skipif(not as_recorded(), reason="recorded with other versions of torch or fairseq")
@pytest.mark.parametrize("system", systems.SYSTEMS)
def test_steps_need_what_was_recorded(system):
    """If a step needs less, or more for a good reason, record it: the command is in benchmarks/counting.py."""
    steps = counting.count_system(system, quick=True)
    assert steps.keys() == RECORDED["tiny"][system].keys()
    for name, counts in steps.items():
        recorded = RECORDED["tiny"][system][name]
        if not isinstance(counts, dict):
            assert counts == recorded
            continue
        for kind in ("launches", "bytes"):
            now, then = (sum(which[kind].values()) for which in (counts, recorded))
            assert then / MORE <= now <= MORE * then, f"{name}: {now} {kind}, {then} were recorded"
        assert len(counts["waits"]) == len(recorded["waits"]), counts["waits"]
