"""Types in fairseq's checkpoints besides tensors and plain containers, for torch's safe loading (weights_only)."""

from argparse import Namespace


def checkpoint_globals() -> list:
    """Types that can only hold data: Namespace, and numpy's arrays and numbers.

    Every old-style model or optimizer has a Namespace. --eval-bleu and best scores store numpy values, named
    `numpy.core` in files written with numpy 1 and `numpy._core` with numpy 2.
    """
    import numpy as np

    dtype_classes = {type(np.dtype(code)) for code in np.typecodes["All"]}
    # Taken from numpy's own pickles: the two functions are in a private module whose name depends on the version.
    builders = {"_reconstruct": np.zeros(1).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
    named = [(f, f"numpy.{core}.multiarray.{name}") for name, f in builders.items() for core in ("core", "_core")]
    return [Namespace, np.ndarray, np.dtype, *dtype_classes, *named]


def meters(types: dict[str, type]) -> list:
    """The training statistics in files of fairseq 0.6 to 0.9, as (type, name in the file); `types`: by name."""
    return [(types[name], f"fairseq.meters.{name}") for name in METERS]


METERS = ("AverageMeter", "TimeMeter", "StopwatchMeter")
