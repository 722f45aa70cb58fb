"""Measurements: the operators, a training step and generation, each beside its peers in one run.

    python -m benchmarks.operators      forward and backward of the operators, beside floors and other implementations
    python -m benchmarks.training       one update of fairseq's Trainer
    python -m benchmarks.generation     fairseq's beam search
    benchmarks/cpu.sh, benchmarks/gpu.sh    all of it, into benchmarks/results/

Every program interleaves what it compares (one call of each, then the next round), reports medians, and checks that the
peers compute the same numbers before it times them. A machine that does something else falsifies every ratio.
"""

import os

# torch's profiler, which counts memory on a CPU, else announces each of its beginnings and ends.
os.environ.setdefault("KINETO_LOG_LEVEL", "9")
