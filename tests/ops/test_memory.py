"""What small arguments with long filters may take from the native kernels: never K² or T × B × C × K elements.

All cases run in a process of their own, whose highest memory is reset before each. (Of the reference, test_guarantees
sees every tensor.)
"""

import json
import os
import sys
import textwrap

import pytest

from tests import programs

PROGRAM = """
    import ctypes
    import json
    import torch
    from lightconv_plugin import ops
    from tests.memory import reset_peak, status

    def taken(call, *shapes, dtype=torch.float32):
        leaves = [torch.rand(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        assert reset_peak()
        before = status("VmRSS")
        out = call(*leaves)
        out = out if isinstance(out, torch.Tensor) else out[0]
        gradients = torch.autograd.grad(out.sum(), leaves)
        highest = status("VmHWM") - before
        del out, gradients
        ctypes.CDLL(None).malloc_trim(0)
        return highest, status("VmRSS") - before

    def light(x, weight):
        return ops.lightconv(x, weight, weight.shape[-1] - 1)

    def gated(x, weight):
        return ops.lightconv(x, weight, weight.shape[-1] // 2, glu=True)

    def dynamic(x, weight):
        return ops.dynamicconv(x, weight, weight.shape[-1] - 1)

    def first(step):
        return lambda x, weight: step(x, None, weight)

    K, step, dynamic_step = 8192, ops.lightconv_step, ops.dynamicconv_step
    taken(light, (4, 1, 2), (1, 3)), taken(dynamic, (4, 1, 32), (4, 1, 1, 3))  # what the first calls load
    print(json.dumps({
        "narrow heads": taken(light, (4, 1, 2), (1, K)),
        "narrow heads with gates": taken(gated, (4, 1, 4), (1, K)),
        "narrow heads, as long as the filter": taken(light, (K, 1, 2), (1, K)),
        "one channel a head": taken(light, (4, 1, 64), (64, K)),
        "wide heads": taken(light, (4, 1, 2048), (1, K)),
        "wide heads in half precision": taken(light, (4, 1, 2048), (1, K), dtype=torch.bfloat16),
        "wide heads with gates": taken(gated, (4, 1, 4096), (1, K)),
        "predicted, narrow": taken(dynamic, (4, 1, 4), (4, 1, 2, K)),
        "predicted, wide": taken(dynamic, (4, 1, 2048), (4, 1, 1, K)),
        "one token, narrow": taken(first(step), (1, 1, 2), (1, K)),
        "one token, wide": taken(first(step), (1, 1, 2048), (1, K)),
        "one token, predicted": taken(first(dynamic_step), (1, 1, 2048), (1, 1, 1, K)),
        "after a long state": taken(step, (1, 1, 2), (K - 1, 1, 2), (1, K)),
        "windows of any size": taken(lambda x, o: ops.talkconv(x, o, o, 2**30 - 1, 2**30 - 1), (4, 1, 64), (4, 1, 2)),
    }))
"""


@pytest.mark.parametrize("backend", ["native"], indirect=True)
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc/self/clear_refs")
def test_long_filters_take_little_memory(backend):
    one_thread = {"LIGHTCONV_BACKEND": "cpu", "OMP_NUM_THREADS": "1"}
    done = programs.run(sys.executable, "-c", textwrap.dedent(PROGRAM), **one_thread)
    # MiB; the arguments have 2 MiB at most. What is kept for the next call is a thread's scratch memory.
    much = {name: taken for name, taken in json.loads(done.stdout).items() if taken[0] > 80 or taken[1] > 40}
    assert not much, f"highest and kept memory in MiB: {much}"
