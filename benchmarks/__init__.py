"""Benchmarks: the operators, a training step and generation, each measured together with its peers in one run.

    python -m benchmarks.operators      forward and backward of the operators, with floors and other implementations
    python -m benchmarks.training       one update of fairseq's Trainer
    python -m benchmarks.generation     fairseq's beam search
    python -m benchmarks.recipes        short real trainings of the four mixers, and their scores
    benchmarks/cpu.sh, gpu.sh, gpu_fairseq.sh   all of them, with results in benchmarks/results/
    python -m benchmarks.targets        which targets the results reach
    python -m benchmarks.plots          time against T, with the floor
    python -m benchmarks.bars           the speeds of README.md's table
    python -m benchmarks.seeds          the scores of each seed
    python -m benchmarks.diagram        the block and its mixers

The first three interleave the candidates (one call of each per round), report medians, and check that the peers compute
the same numbers before timing them. Other work on the machine makes every ratio meaningless.
"""

import os

# Otherwise torch's profiler, used to measure memory on a CPU, logs each start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "9")
