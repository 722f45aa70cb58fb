"""Measurements: the operators, a training step and generation, each beside its peers in one run.

    python -m benchmarks.operators      forward and backward of the operators, beside floors and other implementations
    python -m benchmarks.training       one update of fairseq's Trainer
    python -m benchmarks.generation     fairseq's beam search
    python -m benchmarks.recipes        short real trainings of the four mixers, and their scores
    benchmarks/cpu.sh, gpu.sh, gpu_fairseq.sh   all of it, into benchmarks/results/
    python -m benchmarks.targets        what the results say of each target
    python -m benchmarks.plots          time against T, with the floor

The first three interleave what they compare (one call of each, then the next round), report medians, and check that the
peers compute the same numbers before they time them. A machine that does something else falsifies every ratio.
"""

import os

# torch's profiler, which counts memory on a CPU, else announces each of its beginnings and ends.
os.environ.setdefault("KINETO_LOG_LEVEL", "9")
