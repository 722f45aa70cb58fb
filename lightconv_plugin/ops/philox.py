"""The dropout mask, as a pure function of a seed and of the position in the weight tensor.

Every backend can recompute the mask, so it needs no memory between the forward and the backward pass, and it has the
same bits on a CPU, on a GPU and here. It is defined by the counter-based generator Philox-4x32-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"; the reference implementation is Random123). Every backend uses these
words of it:

    flat     the row-major index of the weight in its logical shape, (H, K) or (T, B, H, K), whatever its strides
    counter  (i mod 2³², i div 2³², 0, 0) with i = flat div 4: four uint32
    key      (seed mod 2³², seed div 2³²), the halves of the 64-bit seed: two uint32
    word     Philox(counter, key)[flat mod 4]: uint32
    keep     word ≥ ⌈p·2³²⌉, the product in double precision (it is exact), compared as uint64 (p near 1 reaches 2³²)

Kept weights are multiplied by 1/(1−p), rounded once from double precision to the precision of the sums (float32, or
float64 for float64 tensors); dropped weights become 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = 0xFFFFFFFF
# Counters processed at a time on a CPU: this limits the int64 buffers of a round to 1 MiB each.
_BLOCK = 2**17


def philox_4x32_10(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32 with ten rounds.

    `counter` is four and `key` two int64 tensors that hold uint32 values and broadcast against each other. Returns four
    such tensors. The 32×32→64-bit products wrap around in int64, which leaves the right bits: the sign extension of the
    arithmetic shift is masked away, and so is the upper half of c1 and c3 where it matters.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = (product1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_LOW)
        c2 = (product0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_LOW)
        c1, c3 = product1, product0
        k0 = (k0 + _KEY_STEPS[0]) & _LOW
        k1 = (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1.bitwise_and_(_LOW), c2, c3.bitwise_and_(_LOW)


def words_at(index: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    """The four words of each counter i in `index` (n,), for a `seed` (1,); both int64. Four int64 tensors (n,)."""
    zero = torch.zeros_like(seed)
    return philox_4x32_10((index & _LOW, index >> 32, zero, zero), (seed & _LOW, (seed >> 32) & _LOW))


def dropout_scale(seed: Tensor, shape: torch.Size, p: float, dtype: torch.dtype) -> Tensor:
    """Return the factors of DropConnect: 0 where dropped, 1/(1−p) where kept.

    `seed`: (1,) int64, on the device where the factors are wanted (it is never read by the host). `shape`: any; `p` in
    [0, 1). Returns a contiguous tensor of `shape` and `dtype`.
    """
    count = math.prod(shape)
    counters = -(-count // 4)
    threshold = math.ceil(p * 2.0**32)
    factors = torch.empty((counters, 4), dtype=dtype, device=seed.device)
    block = _BLOCK if seed.device.type == "cpu" else max(counters, 1)
    for start in range(0, counters, block):
        index = torch.arange(start, min(start + block, counters), device=seed.device)
        for lane, word in enumerate(words_at(index, seed)):
            torch.ge(word, threshold, out=factors[start : start + block, lane])
    return factors.flatten()[:count].mul_(1 / (1 - p)).view(shape)
