"""A short set of calls on a GPU, to be run under compute-sanitizer: `python -m tests.gpu.sanitize [NUMBER]`.

With PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor is an allocation of its own, so that an access beyond it is seen.
"""

import sys

import torch

from lightconv_plugin.ops import backends
from tests.gpu.calls import CONVOLUTIONS, DTYPES, Arguments, Case, drawn, drawn_talk, talk


def main(number):
    assert backends.decision("cuda").backend == "cuda", backends.decision("cuda").reason
    cases = [
        Case(operator, 40, 2, 2, 64, size, size // 2, dtype)
        for operator in CONVOLUTIONS
        for dtype in DTYPES.values()
        for size in (4, 31)
    ]
    cases += [drawn(seed) for seed in range(number)]
    cases += [
        talk(150, 2, 2, per_head, 15, right, dtype, top=1.5)
        for dtype in DTYPES.values()
        for per_head in (4, 64)
        for right in (0, 15)
    ]
    cases += [drawn_talk(seed) for seed in range(number // 2)]
    for case in cases:
        Arguments(case, torch.device("cuda")).everything()
        torch.cuda.synchronize()
    print(f"{len(cases)} calls, forward and backward")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 24)
