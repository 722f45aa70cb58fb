"""Which backend serves: LIGHTCONV_BACKEND, the first call, failures, several threads and processes."""

import ctypes
import logging
import re

import pytest
import torch

from lightconv_plugin import ops
from lightconv_plugin.errors import InputError
from lightconv_plugin.ops import artifacts, backends, compilation, instructions, reference, registration

from .conftest import by_reference
from .toy_libraries import BROKEN, LIBRARY, TOY, Toy, relay

LOADED = "print(ops.lightconv(x, weight, 1).unique().tolist(), backends.decision('cpu').library)"


@pytest.fixture(scope="module")
def first_calls(tmp_path_factory):
    """A toy with kernels, and what four processes said whose first call came at the same time."""
    toy = Toy(tmp_path_factory.mktemp("toy"), TOY)
    processes = [toy.start(LOADED, OMP_NUM_THREADS="1") for _ in range(4)]
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    return toy, said


@pytest.fixture
def toy(first_calls):
    """A toy with kernels, which are compiled."""
    return first_calls[0]


# ------------------------------------------------------------------------------------------------ the first call


def test_processes_at_once_compile_once(first_calls):
    toy, said = first_calls
    (library,) = (toy.cache / name for name in toy.built() if name.endswith(".so"))
    assert [out for out, _ in said] == [f"[101.0] {library}\n"] * 4
    compiling = "lightconv_plugin: compiling the CPU kernels (once, about 35 s) ...\n"
    waiting = "lightconv_plugin: waiting for another process that is compiling the CPU kernels ...\n"
    errors = sorted(err for _, err in said)
    assert errors.count(compiling) == 1 and set(errors) <= {compiling, waiting, ""}


def test_a_compiled_library_is_loaded_in_no_time_and_with_no_tools(toy):
    out, err = toy.run(
        """
        import sys, time
        began = time.perf_counter()
        ops.lightconv(x, weight, 1)
        print(time.perf_counter() - began)
        assert backends.backend("cpu") == "cpu"
        assert not {"torch.utils.cpp_extension", "setuptools", "ninja"} & set(sys.modules)
        """,
        PATH="",
    )
    assert float(out) < 1 and err == ""  # a few milliseconds where nothing else runs


def test_every_operator_goes_to_the_library_and_only_the_first_call_comes_by(toy):
    toy.run("""
        asked = []
        decide = backends.backend
        backends.backend = lambda device: asked.append(device) or decide(device)
        out = ops.lightconv(x, weight, 1)
        assert (out == 101).all() and asked == ["cpu"]
        dynamic, state, offset = torch.randn(5, 2, 3, 4), torch.randn(3, 2, 6), torch.rand(5, 2, 3)
        args = (None, 1, "softmax", 0.0)
        results = [
            torch.ops.lightconv.lightconv_backward(out, x, weight, None, None, *args, False, True, True)[0],
            torch.ops.lightconv.dynamicconv_backward(out, x, dynamic, None, None, *args, False, False, True, True)[1],
            ops.dynamicconv(x, dynamic, 1),
            *ops.lightconv_step(x, state, weight),
            *ops.dynamicconv_step(x, state, dynamic),
            torch.ops.lightconv.lightconv_step_backward(
                None, state, x, state, weight, None, "none", 0.0, False, True, True, True)[2],
            torch.ops.lightconv.dynamicconv_step_backward(
                out, None, x, state, dynamic, None, "none", 0.0, True, False, True, True, True)[2],
            ops.talkconv(x, offset, offset, 2, 2),
            *ops.talkconv_step(x, state, offset, 3),
            *torch.ops.lightconv.talkconv_backward(out, x, offset, None, None, None, 2, 0, True, True, False),
            *torch.ops.lightconv.talkconv_step_backward(out, None, x, state, offset, 3, True, True, True),
        ]
        assert all((result == 101).all() for result in results) and asked == ["cpu"]
        assert ops.lightconv(x.requires_grad_(), weight, 1).requires_grad
    """, OMP_NUM_THREADS="1")  # fmt: skip


def test_the_backend_is_logged_once_and_only_for_who_asks(toy):
    program = """
        import logging, os, sys
        logging.basicConfig(level=os.environ["LEVEL"], stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
        logging.getLogger("torch").setLevel("WARNING")
        for _ in range(2):
            ops.lightconv(x, weight, 1)
            ops.dynamicconv(x, torch.randn(5, 2, 3, 4), 1)
    """
    out, err = toy.run(program, LEVEL="DEBUG")
    assert re.fullmatch(r"lightconv_plugin DEBUG operators on cpu tensors: backend cpu \(/.*lightconv_cpu.so\)\n", out)
    assert err == ""
    out, _ = toy.run(program, LEVEL="DEBUG", LIGHTCONV_BACKEND="reference")
    assert out == "lightconv_plugin DEBUG operators on cpu tensors: backend reference (LIGHTCONV_BACKEND=reference)\n"
    assert toy.run(program, LEVEL="INFO") == ("", "")


def test_without_a_compiler_a_library_of_fewer_instructions_serves(toy, tmp_path):
    toy = Toy(tmp_path, relay(toy.run(LIBRARY)[0].strip()))
    if instructions.compiled_for() != "AVX512":
        pytest.skip(
            f"this CPU has one set of instructions less to choose from: {instructions.compiled_for() or 'none'}"
        )
    lesser, _ = toy.run(LIBRARY, LIGHTCONV_CPU_ISA="avx2")
    used, said = toy.run(LIBRARY, PATH="")
    assert used == lesser
    assert said.count("WARNING") <= 1 and "using the CPU kernels for AVX2, which are slower" in said
    assert "no C++ compiler was found" in said
    toy.write("// another\n", "new.h")  # what is stale serves nobody
    _, said = toy.run("ops.lightconv(x, weight, 1)", PATH="")
    assert "Falling back to the reference" in said


def test_threads_that_come_first_together_decide_once(toy):
    toy.run("""
        import threading
        calls, load = [], backends._load
        backends._load = lambda kind: calls.append(kind) or load(kind)
        results, barrier = [], threading.Barrier(8)
        def work():
            barrier.wait()
            results.append((ops.lightconv(x, weight, 1) > 100).all())
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert calls == ["cpu"] and len(results) == 8 and all(results)
    """)


def test_a_fork_in_the_middle_of_the_decision_does_not_hang_the_child(toy):
    toy.run("""
        import os
        def call():
            return bool((ops.lightconv(x, weight, 1) > 100).all())
        with backends._lock:  # a thread of the parent is deciding
            child = os.fork()
            if child == 0:
                import threading
                thread = threading.Thread(target=lambda: os._exit(0 if call() else 2))
                thread.start()
                thread.join(30)
                os._exit(3)
        assert os.waitpid(child, 0)[1] == 0
        assert call()
        child = os.fork()
        if child == 0:
            os._exit(0 if call() else 2)
        assert os.waitpid(child, 0)[1] == 0
    """, OMP_NUM_THREADS="1")  # fmt: skip


def test_torchs_own_threads_are_used(toy):
    """torch.set_num_threads holds for the kernels, and there is no second OpenMP beside torch's."""
    out, _ = toy.run("""
        import re
        for number in (2, 1, 2):
            torch.set_num_threads(number)
            assert (ops.lightconv(x, weight, 1) == 100 + number).all()
        runtimes = set(re.findall(r"/\\S*(?:gomp|iomp|libomp)\\S*", open("/proc/self/maps").read()))
        assert len(runtimes) == 1, runtimes
        print(*runtimes)
    """, OMP_NUM_THREADS="2")  # fmt: skip
    assert "/torch" in out or "/libgomp" in out


def test_compiled_graphs_made_before_and_after_the_first_call(toy):
    toy.run("""
        run = torch.compile(lambda x: ops.lightconv(x * 1, weight, 1) + 1, fullgraph=True, backend="aot_eager")
        assert (run(x) > 101).all() and backends.backend("cpu") == "cpu" and (run(x) > 101).all()
    """)


# ------------------------------------------------------------------------------------------------ failures


def test_a_failure_is_told_once_and_the_reference_computes(tmp_path):
    toy = Toy(tmp_path, BROKEN)
    program = """
        dynamic = torch.randn(5, 2, 3, 4, requires_grad=True)
        for _ in range(2):
            out = ops.lightconv(x, weight, 1)
            torch.testing.assert_close(out, reference.lightconv(x, weight, *[None] * 4, 1, "softmax", 0.0, False))
            ops.dynamicconv(x, dynamic, 1).sum().backward()
        assert dynamic.grad.any() and backends.backend("cpu") == "reference"
        print(backends.decision("cpu").error.log)
    """
    out, err = toy.run(program, PYTHONWARNINGS="error")
    compiling, warning = err.splitlines()
    assert compiling == "lightconv_plugin: compiling the CPU kernels (once, about 35 s) ..."
    assert warning.startswith("the CPU kernels cannot be used: ") and "three" in warning
    assert f"log: {out.strip()}" in warning and warning.endswith("Falling back to the reference, which is slower")


def test_a_library_without_kernels_is_a_failure(plain):
    out, err = plain.run("print(backends.backend('cpu')); assert ops.lightconv(x, weight, 1).shape == x.shape")
    assert out == "reference\n" and "has no kernel for lightconv, lightconv_backward, " in err


def test_a_library_that_cannot_be_loaded_any_more_is_compiled_again(plain):
    path = compilation.build(artifacts.recipe("cpu"))
    path.write_bytes(b"not a library".ljust(path.stat().st_size))
    assert backends.decision("cpu").error is None or "has no kernel" in backends.decision("cpu").reason
    assert ctypes.CDLL(str(path)).lightconv_answer() == 42


def test_architectures_that_leave_out_a_gpu_are_a_failure(plain, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    monkeypatch.setitem(artifacts.SOURCES, "cuda", plain.sources)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;8.6")
    decided = backends.decision("cuda")
    assert decided.backend == "reference"
    assert "TORCH_CUDA_ARCH_LIST=8.0;8.6 lacks this machine's GPU of capability 9.0; add it, or" in decided.reason
    monkeypatch.setattr(backends, "_decided", {})
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "new")
    assert "TORCH_CUDA_ARCH_LIST: GPU architectures must be numbers" in backends.decision("cuda").reason


def test_an_operator_that_a_backend_does_not_have_is_computed_by_the_reference(monkeypatch):
    # As dropout on a GPU: without the question, the operator would call itself.
    monkeypatch.setattr(backends, "_decided", {"cpu": backends.Decision("cpu")})
    monkeypatch.setattr(backends, "has_kernel", lambda operator, device: False)
    x, seed = torch.randn(5, 2, 6), torch.tensor([3])
    out = registration._native_or_reference("dropout")(x, seed, 0.5)
    assert torch.equal(out, reference.dropout(x, seed, 0.5))


# ------------------------------------------------------------------------------------------------ LIGHTCONV_BACKEND


def test_the_reference_loads_nothing(plain, monkeypatch):
    monkeypatch.setenv("LIGHTCONV_BACKEND", "reference")
    monkeypatch.setattr(artifacts, "find_all", lambda kind: pytest.fail("looked for a library"))
    assert [backends.backend(device) for device in ("cpu", "cuda", "xpu")] == ["reference"] * 3
    assert not plain.cache.exists()


@pytest.mark.parametrize("value", ["", "auto"], ids=["empty", "auto"])
def test_other_devices_have_the_reference(value, plain, monkeypatch):
    monkeypatch.setenv("LIGHTCONV_BACKEND", value)
    assert backends.decision("xpu").backend == "reference"
    assert backends.decision("xpu").reason == "there are no native kernels for xpu tensors"


@pytest.mark.parametrize("value", ["CPU", "native", "gpu", "0"])
def test_what_is_no_backend(value, plain, monkeypatch):
    monkeypatch.setenv("LIGHTCONV_BACKEND", value)
    said = f"LIGHTCONV_BACKEND must be one of auto, cpu, cuda, reference, or unset, got '{value}'"
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            backends.backend("cpu")


def test_a_forced_backend_that_cannot_be_built_is_an_error(broken, monkeypatch, caplog, capsys):
    monkeypatch.setenv("LIGHTCONV_BACKEND", "cpu")
    caplog.set_level(logging.WARNING)  # a program without a log of its own
    for _ in range(2):
        with pytest.raises(InputError, match=r"LIGHTCONV_BACKEND=cpu: the CPU kernels cannot be used: .*; log: "):
            backends.backend("cpu")
    assert capsys.readouterr().err.count("compiling the CPU kernels") == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("forced", "device"), [("cuda", "cpu"), ("cpu", "cuda"), ("cpu", "xpu")])
def test_a_forced_backend_serves_no_other_device(forced, device, plain, monkeypatch):
    monkeypatch.setenv("LIGHTCONV_BACKEND", forced)
    said = f"LIGHTCONV_BACKEND={forced}: these kernels are for {forced} tensors, got tensors on {device}"
    with pytest.raises(InputError, match=said):  # which a command shows in one line
        backends.backend(device)
    assert not plain.cache.exists()
    # A device whose backend was chosen before.
    monkeypatch.setattr(backends, "_decided", {device: backends.Decision(device)})
    with pytest.raises(RuntimeError, match=said):
        backends.backend(device)


def test_cuda_without_a_gpu(plain, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setenv("LIGHTCONV_BACKEND", "cuda")
    with pytest.raises(RuntimeError, match="the CUDA kernels cannot be used: torch sees no CUDA device"):
        backends.backend("cuda")


def test_wrong_settings_raise_at_every_call(toy):
    toy.run("""
        import os
        for name, value, error, said in (
            ("LIGHTCONV_BACKEND", "cuda", RuntimeError, "LIGHTCONV_BACKEND=cuda: these kernels are for cuda tensors"),
            ("LIGHTCONV_BACKEND", "rubbish", ValueError, "LIGHTCONV_BACKEND must be"),
            ("LIGHTCONV_KEEP_MALLOC", "yes", ValueError, "LIGHTCONV_KEEP_MALLOC must be"),
            ("LIGHTCONV_CPU_ISA", "rubbish", ValueError, "LIGHTCONV_CPU_ISA must be"),
        ):
            os.environ[name] = value
            for _ in range(3):
                try:
                    ops.lightconv(x, weight, 1)
                except error as caught:
                    assert said in str(caught), caught
                else:
                    raise AssertionError((name, value))
            del os.environ[name]
        os.environ["LIGHTCONV_BACKEND"] = "cpu"
        assert (ops.lightconv(x, weight, 1) > 100).all()
    """)


def test_an_operator_under_the_reference_is_the_reference(toy):
    toy.run(
        """
        want = reference.lightconv(x, weight, *[None] * 4, 1, "softmax", 0.0, False)
        assert torch.equal(ops.lightconv(x, weight, 1), want) and not torch.ops.loaded_libraries
        """,
        LIGHTCONV_BACKEND="reference",
    )


# ------------------------------------------------------------------------------------------------ the tests' own means


def test_by_reference_is_what_it_says(monkeypatch):
    x, weight = torch.randn(5, 2, 6), torch.randn(3, 4)
    before = ops.lightconv(x, weight, 1)
    monkeypatch.setattr(reference, "lightconv", lambda x, *options: torch.full_like(x, 7))
    with by_reference():
        assert (ops.lightconv(x, weight, 1) == 7).all()
    monkeypatch.undo()
    assert torch.equal(ops.lightconv(x, weight, 1), before)
