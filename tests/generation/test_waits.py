"""How often the host waits for a GPU in a search: once a step, to see what ended, and once at the end, for the results.

There is no GPU here: tests/waiting.py pretends one.
"""

from dataclasses import replace

import pytest
import torch

from lightconv_plugin.generation.batch_search import TorchSearch
from lightconv_plugin.generation.beam_search import Search
from tests.generation.random_models import PAD, assert_same, random_case
from tests.waiting import PretendDevice


@pytest.fixture
def calls(monkeypatch):
    """How often the methods of a search were called."""
    counts = {"_step": 0, "_keep": 0}

    def count(name):
        method = getattr(Search, name)

        def counted(*args):
            counts[name] += 1
            return method(*args)

        monkeypatch.setattr(Search, name, counted)

    for name in counts:
        count(name)
    return counts


def test_the_host_waits_once_a_step_and_once_for_the_results(calls):
    """Random models and options; each model's encoder reads whether there are pads, and so does what follows it."""
    left = 0
    for seed in range(12):
        case = random_case(seed)
        options = replace(case.options, match_source_len=False)  # which reads the lengths too
        lengths = case.source.ne(PAD).sum(dim=1)
        expected = TorchSearch(case.models, options).search(case.source, lengths, case.max_len)
        calls.update(_step=0, _keep=0)
        with PretendDevice() as device:
            search = TorchSearch([device.put_model(model) for model in case.models], options)
            source, lengths = device.put(case.source), device.put(lengths)
            device.waits.clear()
            found = search.search(source, lengths, case.max_len)
        assert_same(expected, found, f"seed {seed}:")
        reads = ["aten._local_scalar_dense"] * (2 * len(case.models))
        assert device.waits == reads + ["aten._to_copy"] * (calls["_step"] + 1), seed
        assert all(type(tensor) is torch.Tensor for ranked in found for one in ranked for tensor in one.values())
        left += calls["_keep"]
    assert left > 3


def test_waits_are_seen():
    """So that the test above can fail."""
    with PretendDevice() as device:
        x = device.put(torch.arange(6.0))
        cases = {
            "aten._local_scalar_dense": lambda: float(x[0]),
            "aten._to_copy": lambda: (x + 1).tolist(),
            "aten.nonzero": lambda: x.gt(2).nonzero(),
            "aten.index": lambda: x[x.gt(2)],
            "aten.copy_": lambda: torch.zeros(6).copy_(x),
        }
        for operator, wait in cases.items():
            device.waits.clear()
            wait()
            assert device.waits == [operator]
        device.waits.clear()
        y = torch.ones(6, device=x.device) + x[torch.ones(1, dtype=torch.int64).to(x.device, non_blocking=True)]
        assert not device.waits
        assert y.tolist() == [2.0] * 6
        assert device.waits == ["aten._to_copy"]
        device.waits.clear()
        torch.ones(1).to(x.device)
        assert device.waits == ["aten._to_copy"]
        with pytest.raises(AssertionError, match="on the host and on the device"):
            x + torch.ones(6)
