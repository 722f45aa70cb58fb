"""CASES: numpy values in checkpoints that are not what they say.

With numpy's own functions most of them end in a segmentation fault.
"""

import codecs
import gc
import pickle
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch

SCALAR, RECONSTRUCT = np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]
POINTER = (0x4142434445464748).to_bytes(8, "little")


class Call:
    """Is pickled as a call, with a state for its result if one is given."""

    def __init__(self, function, arguments, *state):
        self.reduced = (function, arguments, *state)

    def __reduce__(self):
        return self.reduced


def dtype(code, *state):
    return Call(np.dtype, (code, False, True), state)


def scalar(kind, raw=POINTER):
    return Call(SCALAR, (kind, raw))


def array(kind, raw=POINTER, shape=(1,)):
    return Call(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, shape, kind, False, raw))


PLAIN = (None, None, None, -1, -1, 0)
OBJECT = dtype("O8", 3, "|", *PLAIN)
STRUCT = dtype("V8", 3, "|", None, ("f",), {"f": (np.dtype("O"), 0)}, 8, 1, 0)
BYTES = Call(np.ndarray, ((1,), "O", POINTER))
CASES = {
    "object scalar": scalar(OBJECT),
    "object array": array(OBJECT),
    "fields scalar": scalar(STRUCT),
    "fields array": array(STRUCT),
    "field offset": array(dtype("V8", 3, "|", None, ("f",), {"f": (np.dtype("f8"), 1 << 40)}, 8, 1, 0)),
    "negative text scalar": scalar(dtype("S8", 3, "|", None, None, None, -100, 1, 0)),
    "negative text array": array(dtype("S8", 3, "|", None, None, None, -8, 1, 0)),
    "huge text": scalar(dtype("U8", 3, "<", None, None, None, 1 << 40, 4, 8)),
    "references scalar": scalar(dtype("f8", 3, "<", None, None, None, -1, -1, 63)),
    "references array": Call(RECONSTRUCT, (np.ndarray, (1,), dtype("f8", 3, "<", None, None, None, -1, -1, 63))),
    "subarray": Call(
        RECONSTRUCT, (np.ndarray, (1,), dtype("f8", 3, "<", (np.dtype("f8"), (1000,)), None, None, -1, -1, 0))
    ),
    "filled subarray": array(dtype("f8", 3, "<", (np.dtype("f8"), (10**8,)), None, None, -1, -1, 0)),
    "number with fields": array(dtype("f8", 3, "<", None, ("f",), {"f": (np.dtype("f8"), 1 << 40)}, -1, -1, 0)),
    "number with objects": scalar(dtype("f8", 3, "<", None, ("f",), {"f": (np.dtype("O"), 0)}, -1, -1, 0)),
    "ndarray of bytes": Call(np.ndarray, (BYTES,)),
    "too few bytes": array(np.dtype("f8"), POINTER, (1000,)),
    "too large": array(np.dtype("u1"), Call(codecs.encode, ("", "latin1")), (2**32, 2**32)),
    "negative shape": array(np.dtype("f8"), POINTER, (-1,)),
    "list as memory": array(np.dtype("f8"), [1, 2]),
    "bytearray as memory": array(np.dtype("f8"), bytearray(POINTER)),
    "booleans beyond 1": array(np.dtype("?"), b"\xff" * 8, (8,)),
    "Namespace as dtype": scalar(Namespace(dtype=np.dtype("f8"))),
}


def main(case: str, path: Path, how: str) -> None:
    """Write a checkpoint with the case, load it as the plugin or fairseq does and use the value.

    Prints "refused: MESSAGE" or "loaded".
    """
    torch.save({"model": {"w": torch.ones(2)}, "extra_state": {"best": CASES[case]}}, path)
    if how == "fairseq":
        from fairseq.checkpoint_utils import load_checkpoint_to_cpu as load

        import lightconv_plugin.models  # noqa: F401 (the patches)
    else:
        from lightconv_plugin.checkpoints.loading import safe_torch_load as load
    try:
        value = load(path if how == "plugin" else str(path))["extra_state"]["best"]
    except Exception as error:
        print("refused:", type(error).__name__, " ".join(str(error).split()))
        return
    repr(value)
    pickle.dumps(value)
    del value
    gc.collect()
    print("loaded")
