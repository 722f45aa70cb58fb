"""numpy values in checkpoints: those that training writes load as numpy wrote them, forged ones are refused."""

import concurrent.futures
import copy
import io
from argparse import Namespace

import numpy as np
import pytest
import torch
from torch import _weights_only_unpickler as restricted

from lightconv_plugin.checkpoints import safe_globals
from lightconv_plugin.checkpoints.loading import safe_torch_load
from tests.checkpoints import hostile_numpy
from tests.checkpoints.fairseq_files import lightconv, refused, save
from tests.checkpoints.hostile_numpy import CASES, OBJECT, POINTER, scalar
from tests.robustness.torture import Fork

# ------------------------------------------------------------------------------------------------ forged values


def outcome(case, how, tmp_path):
    """What hostile_numpy.py prints, in a process of its own because a failure is a segmentation fault."""
    log = tmp_path / "log"
    status = Fork(hostile_numpy.main, case, tmp_path / "a.pt", how, log=log, token="").wait()
    assert status == 0, f"status {status}: {log.read_text()[-2000:]}"
    return log.read_text().splitlines()[-1]


@pytest.mark.parametrize("case", CASES)
def test_a_forged_value_is_refused(case, tmp_path):
    said = outcome(case, "plugin", tmp_path)
    assert said.startswith(f"refused: InputError {tmp_path / 'a.pt'} is refused: "), said
    assert "a.pt is refused: a numpy " in said or "a.pt is refused: numpy.ndarray" in said, said


@pytest.mark.parametrize("case", ["object scalar", "negative text array", "ndarray of bytes"])
def test_fairseqs_own_loading_refuses_it_too(case, tmp_path):
    pytest.importorskip("fairseq")
    import lightconv_plugin.models  # noqa: F401  (here once, and not in every child)

    assert outcome(case, "fairseq", tmp_path).startswith("refused: UnpicklingError")


def unpickled(*operations):
    with safe_globals.allowed(safe_globals.checkpoint_globals()):
        return restricted.load(io.BytesIO(b"\x80\x02" + b"".join(operations) + b"."), encoding="utf-8")


SHAPE = b"K\x01\x85"  # (1,)


@pytest.mark.parametrize("name", [b"numpy\nndarray", b"lightconv_plugin.checkpoints.numpy_data\nPlainArray"])
@pytest.mark.parametrize("call", [b"R", b"\x81"], ids=["REDUCE", "NEWOBJ"])
def test_no_class_of_arrays_can_be_called(name, call):
    with pytest.raises(Exception, match=r"must not be called|Unsupported global"):
        unpickled(b"c", name, b"\n", SHAPE, b"X\x01\0\0\0O\x86", call)


def test_no_other_object_becomes_a_dtype():
    """A state may set any attribute of a Namespace, its class among them."""
    slots = b"}X\x09\0\0\0__class__cnumpy\ndtype\ns"
    with pytest.raises(TypeError, match="object layout differs"):
        unpickled(b"cargparse\nNamespace\n)R", b"}", slots, b"\x86b")


def test_memory_that_a_tensor_shares_is_not_freed_by_a_second_state():
    new = b"cnumpy.core.multiarray\n_reconstruct\n)R"
    dtype = b"cnumpy\ndtype\nX\x02\0\0\0u1\x85R"
    raw = b"c_codecs\nencode\nX\x01\0\0\0aX\x06\0\0\0latin1\x86R"
    fill = b"(K\x01" + SHAPE + dtype + b"\x89" + raw + b"tb"
    array = unpickled(new, fill)
    assert array.tolist() == [97] and array.dtype == np.uint8
    with pytest.raises(Exception, match="filled once"):
        unpickled(new, fill, fill)


def test_the_command_names_file_and_type(tmp_path, output, capsys):
    path = save(tmp_path / "a.pt", {"w": torch.ones(1)}, extra_state={"best": scalar(OBJECT, POINTER)})
    said = refused(capsys, "--inputs", path, "--output", output)
    assert said.endswith(f"{path} is refused: a numpy dtype must be numbers or text, got 'O8'")


# ------------------------------------------------------------------------------------------------ honest values

NUMBERS = [np.dtype(code) for code in "?bhilqBHILQefdgFDG"]
ARRAYS = {
    **{f"{dtype.name}-{dtype.char}": np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype) for dtype in NUMBERS},
    "big-endian": np.arange(5, dtype=">i4"),
    "big-endian-text": np.array(["ä", "bcd"], dtype=">U3"),
    "text": np.array(["ä", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "transposed": np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2),
    "no-dimensions": np.array(3),
    "large": np.arange(5000.0),
}


@pytest.mark.parametrize("given", ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_arrays_load_and_can_be_saved_again(given, zipped, tmp_path):
    content = {"x": given, "again": [given]}
    for name in ("first.pt", "second.pt"):
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=zipped)
        content = safe_torch_load(tmp_path / name)
        got = content["x"]
        assert isinstance(got, np.ndarray) and got is content["again"][0]
        usual = torch.load(tmp_path / name, weights_only=False)["x"]  # numpy makes the byte order native
        assert type(usual) is np.ndarray and got.dtype == usual.dtype
        assert got.shape == given.shape and got.tolist() == given.tolist()
        assert got.flags.f_contiguous == given.flags.f_contiguous


def test_results_are_numpys_own(tmp_path):
    torch.save({"x": np.arange(3.0)}, tmp_path / "a.pt")
    got = safe_torch_load(tmp_path / "a.pt")["x"]
    for result in (got + 1, got * got, -got, got.cumsum()):
        assert type(result) is np.ndarray and result.shape == (3,)
    for result in (got.sum(), got.mean(), got[1], np.float64(2) + got[2], got.max()):
        assert type(result) is np.float64
    got += 1
    assert got.tolist() == [1, 2, 3]
    assert torch.from_numpy(copy.deepcopy(got)).tolist() == [1, 2, 3]


SCALARS = [
    *(dtype.type(1) for dtype in NUMBERS if dtype.char not in "qQ"),  # they load as l and L, of the same size
    *(np.float64(np.nan), np.float64(-0.0), np.int64(-(2**63)), np.uint64(2**64 - 1)),
    *(np.str_("ä b"), np.bytes_(b"ab")),
]


@pytest.mark.parametrize("given", SCALARS, ids=repr)
def test_scalars_are_numpys_own(given, tmp_path):
    torch.save({"x": given}, tmp_path / "a.pt")
    got = safe_torch_load(tmp_path / "a.pt")["x"]
    assert type(got) is type(given) and got.dtype == given.dtype
    assert repr(got) == repr(given)


def test_a_dtype_can_be_saved_again(tmp_path):
    torch.save({"x": np.dtype(">f4")}, tmp_path / "a.pt")
    torch.save(safe_torch_load(tmp_path / "a.pt"), tmp_path / "b.pt")
    assert torch.load(tmp_path / "b.pt", weights_only=False)["x"] == np.dtype(">f4")


def test_an_average_keeps_numpy_statistics(tmp_path, output):
    statistics = {"best": np.float32(1.5), "counts": np.arange(4)}
    path = save(tmp_path / "a.pt", {"w": torch.ones(1)}, extra_state=statistics)
    assert lightconv("--inputs", path, "--output", output) == 0
    got = torch.load(output, weights_only=False)["extra_state"]
    assert type(got["best"]) is np.float32 and type(got["counts"]) is np.ndarray
    assert got["counts"].tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------ torch's list


@pytest.fixture
def only():
    """Sets torch's list of allowed types until the end of the test."""
    before = torch.serialization.get_safe_globals()

    def replaced(entries):
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(entries)

    yield replaced
    replaced(before)


def test_torchs_list_is_as_it_was(only, tmp_path):
    """Many programs allow some types themselves; loading works with them and leaves them allowed, and no others."""
    own = [Namespace, np.ndarray, np.dtype, type(np.dtype("f8")), np.float64(0).__reduce__()[0]]
    for listed in (own, []):
        only(listed)
        torch.save({"x": np.float64(1.5), "y": np.arange(3), "args": Namespace(arch="x")}, tmp_path / "a.pt")
        for _ in range(3):
            loaded = safe_torch_load(tmp_path / "a.pt")
            assert loaded["x"] == 1.5 and loaded["y"].tolist() == [0, 1, 2] and loaded["args"].arch == "x"
        assert set(torch.serialization.get_safe_globals()) == set(listed)


def test_several_threads_load_at_once(only, tmp_path):
    """torch's list belongs to all threads: without a lock, one takes back what another still needs."""
    only([])
    for i in (1, 2):
        model = {f"w{j}": torch.ones(200) for j in range(200 * i)}
        save(tmp_path / f"{i}.pt", model, args=Namespace(arch="x"), extra_state={"best": np.float64(1)})
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(safe_torch_load, tmp_path / f"{i % 2 + 1}.pt") for i in range(40)]
        assert all(load.result()["args"].arch == "x" for load in loads)
    assert torch.serialization.get_safe_globals() == []
