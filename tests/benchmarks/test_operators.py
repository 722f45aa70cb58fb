"""benchmarks.operators: what it measures, prints and writes, and what it refuses."""

import json
import logging
import sys

import pytest
import torch

from benchmarks import candidates, floors, gpu_peers, naive, operators, report, timing
from benchmarks.shapes import SETS, Case, parse
from lightconv_plugin.ops import backends
from tests import programs
from tests.benchmarks.conftest import ran

fairseq = candidates.import_fairseq()
MODULES = ["fairseq band", "fairseq unfold"] * bool(fairseq)
EVERYONE = {
    "lightconv": ["ours", "our reference", *MODULES, "conv1d depthwise"],
    "dynamicconv": ["ours", "our reference", *MODULES, naive.NAME],
    "talkconv": ["ours", "our reference", "prefix sums"],
}
FILTERS = ("lightconv", "dynamicconv")


def test_quick(capsys, tmp_path):
    file = tmp_path / "operators.json"
    out, _ = ran(operators.main, capsys, "--quick", "--json", file)
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["benchmark"] == "operators" and content["dtype"] == "float32" and content["quick"]
    assert content["machine"]["versions"]["torch"] == torch.__version__
    assert content["machine"]["threads"] == torch.get_num_threads() and content["machine"]["cpu"] in out
    assert min(content["rates"].values()) > 0
    assert [(c["operator"], c["name"]) for c in content["cases"]] == [
        (operator, case.name) for operator in operators.OPERATORS for case in SETS["quick"]
    ]
    for case in content["cases"]:
        # The loop has softmax only.
        lacks = [naive.NAME] if case["case"]["normalize"] != "softmax" else []
        assert list(case["candidates"]) == [name for name in EVERYONE[case["operator"]] if name not in lacks]
        assert min(case["floor"][name]["bytes_as_copy_s"] for name in ("forward", "both")) > 0
        assert case["backend"] == backends.backend("cpu")
        for measured in case["candidates"].values():
            assert measured["peak_bytes"] > 0
            for name in ("forward", "both"):
                assert 0 < measured[name]["best_s"] <= measured[name]["median_s"] <= measured[name]["worst_s"]
                assert measured[name]["calls"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["operators.json"]


def test_bytes_are_at_the_rate_of_the_copies_in_the_rounds_of_their_pass(capsys, tmp_path, monkeypatch):
    file, copies = tmp_path / "o.json", iter([2.0, 3.0])

    def interleaved(calls, repeats, timer):
        return {name: [next(copies) if name == "copy of x" else 1.0] for name in calls}

    monkeypatch.setattr(floors, "measure", lambda *_, **__: floors.Rates(1e9, 1e9))
    monkeypatch.setattr(timing, "interleaved", interleaved)
    case = ("--shapes", "9,2,16,4,3", "--operators", "lightconv")
    ran(operators.main, capsys, "--quick", "--no-memory", "--json", file, *case)
    (case,) = json.loads(file.read_text(encoding="utf-8"))["cases"]
    copied = {name: of["bytes_as_copy_s"] * 2 * 9 * 2 * 16 * 4 / of["bytes"] for name, of in case["floor"].items()}
    assert copied == pytest.approx({"forward": 2.0, "both": 3.0})


def test_the_tables_say_what_the_json_says(capsys, tmp_path):
    file = tmp_path / "o.json"
    case = ("--shapes", "9,2,16,4,3", "--operators", "lightconv")
    out, _ = ran(operators.main, capsys, "--quick", "--json", file, *case)
    (case,) = json.loads(file.read_text(encoding="utf-8"))["cases"]
    ours, floor = case["candidates"]["ours"]["both"]["median_s"], case["floor"]["both"]["seconds"]
    peer = case["candidates"]["conv1d depthwise"]["both"]["median_s"]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    table = {row[0]: row for row in rows}
    assert table[f"ours ({case['backend']})"][4:7] == [report.milliseconds(ours), report.digits(ours / floor), "1.00"]
    assert table["conv1d depthwise"][6] == report.digits(peer / ours)
    overview = table["lightconv T9 B2 C16 H4 K3"]
    assert overview[1] == report.milliseconds(ours) and overview[-1] == report.digits(peer / ours)
    assert f"copy {json.loads(file.read_text())['rates']['bytes_per_s'] / 1e9:.1f} GB/s" in out


def test_variants_passes_and_types(capsys, tmp_path):
    file = tmp_path / "o.json"
    arguments = "--quick --shapes 8,2,128,2,5c --variants plain glu dropout --passes backward both --dtype bfloat16"
    ran(operators.main, capsys, *arguments.split(), "--no-memory", "--without", "our reference", "--json", file)
    cases = json.loads(file.read_text(encoding="utf-8"))["cases"]
    assert [c["operator"] for c in cases] == ["lightconv"] * 3 + ["dynamicconv"] * 3 + ["talkconv"]
    assert [c["case"]["glu"] for c in cases[:3]] == [False, True, False]
    assert [c["case"]["dropout"] for c in cases[:3]] == [0, 0, 0.1]
    for case in cases:
        assert case["case"]["causal"] and set(case["floor"]) == {"backward", "both"}
        assert set(case["candidates"]["ours"]) == {"backward", "both"}
        assert "our reference" not in case["candidates"]
        assert ("attention" in case["candidates"]) == (not case["case"]["glu"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--shapes 8,2,30,4,3", "numbers must be at least 1, and H must divide C"),
        ("--shapes 8,2,30", "'8,2,30' is neither one of cpu, lengths, gpu, short, sweep, quick nor T,B,C,H,K"),
        ("--operators talkconv --variants glu", "--variants: talkconv has neither GLU nor dropout, and --operators"),
        ("--json /nowhere/at/all.json", "--json: /nowhere/at is not a folder"),
        ("--fairseq-source /nowhere", "--fairseq-source: /nowhere has no fairseq/modules/lightconv_layer"),
        ("--dynamic-conv1d /nowhere", "--dynamic-conv1d: /nowhere has no headwise.py"),
        ("--jet-nemotron /nowhere", "--jet-nemotron: /nowhere has no jetai/modeling/hf/dconv_fwdbwd.py"),
    ],
)
def test_wrong_options_are_one_clear_line(capsys, arguments, message):
    out, error = ran(operators.main, capsys, "--quick", *arguments.split(), status=2)
    assert not out
    assert error.count("\n") == 1 and message in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there(capsys):
    _, error = ran(operators.main, capsys, "--device", "cuda", status=2)
    assert error == "error: --device cuda: torch finds no CUDA device here\n"


@pytest.mark.parametrize("arguments", ["--dtype int8", "--repeats 0", "--repeats x", "--operators conv", "--frob"])
def test_options_that_do_not_parse(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        operators.main(arguments.split())
    assert stop.value.code == 2 and arguments.split()[0] in capsys.readouterr().err


def test_logging_is_left_as_it_was(capsys):
    before = logging.root.manager.disable
    ran(operators.main, capsys, "--quick", "--operators", "lightconv")
    assert logging.root.manager.disable == before


def test_as_a_command():
    done = programs.run(sys.executable, "-m", "benchmarks.operators", "--shapes", "1,2", status=2)
    assert done.stderr.startswith("error: --shapes: '1,2' is neither")


# ------------------------------------------------------------------------------------------------ what is measured


def every_candidate(operator, case, dtype=torch.float64):
    a = candidates.arguments(operator, case, torch.device("cpu"), dtype)
    made = [candidates.ours(a), candidates.our_reference(a), *candidates.fairseq_modules(a)]
    return a, [*made, *candidates.depthwise(a), *candidates.prefix_sums(a)]


@pytest.mark.parametrize("causal", [False, True], ids=["centred", "causal"])
def test_the_fused_loop_computes_the_same_outputs_and_gradients(causal):
    a = candidates.arguments("dynamicconv", Case(12, 3, 12, 3, 5, causal), torch.device("cpu"), torch.float32)
    (loop,), ours = naive.fused_loop(a), candidates.ours(a)
    out = ours.run()
    torch.testing.assert_close(loop.run(), out, rtol=0, atol=1e-5)
    for theirs, expected in zip(
        torch.autograd.grad(loop.run(), loop.inputs, loop.grad),
        torch.autograd.grad(out, ours.inputs, ours.grad),
        strict=True,
    ):
        torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("normalize", ["softmax", "none"])
@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["steps-first", "batch-first"])
@pytest.mark.parametrize("causal", [False, True], ids=["centred", "causal"])
@pytest.mark.parametrize("operator", FILTERS)
def test_peers_compute_the_same_outputs_and_gradients(operator, causal, batch_first, glu, normalize):
    case = Case(12, 3, 12, 3, 5, causal, normalize, 0.0, glu, batch_first)
    _, made = every_candidate(operator, case)
    assert [c.name for c in made] == [name for name in EVERYONE[operator] if name != naive.NAME]  # in float32 only
    ours, *others = made
    out = ours.run()
    gradients = torch.autograd.grad(out, ours.inputs, ours.grad)
    for peer in others:
        theirs = peer.run()
        dx, dweight = torch.autograd.grad(theirs, peer.inputs, peer.grad)
        pairs = ((peer.to_tbc(theirs), out), (peer.to_tbc(dx), gradients[0]), (dweight, gradients[1]))
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # fairseq's softmax is in float32


@pytest.mark.parametrize("batch_first", [False, True], ids=["steps-first", "batch-first"])
@pytest.mark.parametrize("causal", [False, True], ids=["centred", "causal"])
def test_talkconvs_peers_compute_the_same_outputs_and_gradients(causal, batch_first):
    a, made = every_candidate("talkconv", Case(12, 3, 12, 3, 6, causal, batch_first=batch_first))
    assert [c.name for c in made] == EVERYONE["talkconv"]
    assert a.case.reach == ((5, 0) if causal else (2, 3)) and len(a.offsets) == 2 - causal
    ours, *others = made
    out = ours.run()
    gradients = torch.autograd.grad(out, ours.inputs, ours.grad)
    for peer in others:
        theirs = peer.run()
        torch.testing.assert_close(peer.to_tbc(theirs), out)
        for got, want in zip(torch.autograd.grad(theirs, peer.inputs, peer.grad), gradients, strict=True):
            torch.testing.assert_close(got, want)


def test_a_peer_that_computes_something_else_is_named_and_costs_the_others_nothing(capsys, monkeypatch, tmp_path):
    def wrong(a):
        for peer in right(a):
            yield candidates.Candidate("liar", lambda peer=peer: peer.run() * 1.01, peer.inputs, peer.grad, peer.to_tbc)

    right = candidates.depthwise
    monkeypatch.setattr(candidates, "depthwise", wrong)
    file = tmp_path / "o.json"
    _, error = ran(operators.main, capsys, "--quick", "--operators", "lightconv", "--json", file, status=2)
    assert "liar for lightconv T16 B2 C32 H4 K7: other numbers than ours: relative error" in error
    for case in json.loads(file.read_text(encoding="utf-8"))["cases"]:
        assert set(case["candidates"]["liar"]) == {"error"} and "both" in case["candidates"]["ours"]


@pytest.mark.parametrize("when", ["made", "run", "differentiated"])
def test_a_peer_that_fails_is_named_and_costs_the_others_nothing(when, capsys, monkeypatch, tmp_path):
    def broken(a):
        def fails(*_):
            raise RuntimeError("no kernel image\nand more")

        if when == "made":
            fails()
        inputs = (a.x.detach().clone().requires_grad_(),)
        run = fails if when == "run" else lambda: inputs[0] * 1
        peer = candidates.Candidate("broken", run, inputs, a.grad, None)
        if when == "differentiated":
            peer.both = fails
        yield peer

    monkeypatch.setattr(gpu_peers, "named", lambda a, options: {"broken": lambda: broken(a)})
    file = tmp_path / "o.json"
    options = ("--operators", "lightconv", "--no-memory", "--json", file)
    _, error = ran(operators.main, capsys, "--quick", *options, status=2)
    assert "broken for lightconv T16 B2 C32 H4 K7: RuntimeError: no kernel image" in error
    for case in json.loads(file.read_text(encoding="utf-8"))["cases"]:
        assert case["candidates"]["broken"]["error"] == "RuntimeError: no kernel image"
        assert {"forward", "both"} <= set(case["candidates"]["ours"])


def test_ours_must_not_fail_and_what_was_measured_before_is_there(monkeypatch, tmp_path):
    measure, file = operators._measure, tmp_path / "o.json"

    def second_fails(operator, case, *others):
        if case.kernel_size == 4:
            raise RuntimeError("an illegal memory access was encountered")
        return measure(operator, case, *others)

    monkeypatch.setattr(operators, "_measure", second_fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        operators.main(["--quick", "--operators", "lightconv", "--json", str(file)])
    content = json.loads(file.read_text(encoding="utf-8"))
    assert [case["name"] for case in content["cases"]] == ["T16 B2 C32 H4 K7"] and content["rates"]


def test_caches_are_flushed_by_reading(monkeypatch):
    """What was written last would be written back within the time of the call."""

    class Event:
        def __init__(self, enable_timing):
            self.record = lambda: versions.append(clock.flush._version)

    versions = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 4096)
    clock = timing.CudaClock(torch.device("cpu"))
    written = clock.flush._version
    clock.sum.fill_(1)
    clock.time(lambda: None)
    assert versions == [written, written] and clock.sum == 0


def test_a_peer_without_memory_costs_the_others_nothing(capsys, monkeypatch, tmp_path):
    def exhausted():
        raise torch.OutOfMemoryError("tried to allocate 137 GiB")

    def greedy(a):
        yield candidates.Candidate("greedy", exhausted, (a.x,), a.grad, None)

    monkeypatch.setattr(candidates, "depthwise", greedy)
    file = tmp_path / "o.json"
    out, _ = ran(operators.main, capsys, "--quick", "--operators", "lightconv", "--json", file)
    case = json.loads(file.read_text(encoding="utf-8"))["cases"][0]
    assert "greedy: out of memory" in out
    assert case["candidates"]["greedy"] == {"error": "out of memory"} and "both" in case["candidates"]["ours"]


@pytest.mark.parametrize("operator", FILTERS)
def test_dropout_reaches_every_candidate(operator):
    _, made = every_candidate(operator, Case(12, 3, 12, 3, 5, dropout=0.5))
    for candidate in made:
        assert not torch.equal(candidate.run(), candidate.run()), candidate.name


# ------------------------------------------------------------------------------------------------ floors


def test_floors_of_the_five_shapes():
    """At 30 GB/s and 190 GFLOP/s, forward and backward: as published with the targets."""
    rates = floors.Rates(30e9, 190e9)
    expected = [(1.6, 2.1), (1.6, 2.1), (2.2, 2.1), (3.6, 4.1), (3.0, 0.9)]
    for case, (by_bytes, by_operations) in zip(SETS["cpu"], expected, strict=True):
        both = floors.work("dynamicconv", case, 4)["both"]
        assert both.bytes / rates.bytes_per_s * 1e3 == pytest.approx(by_bytes, abs=0.06)
        assert both.flops / rates.flops_per_s * 1e3 == pytest.approx(by_operations, abs=0.06)
        assert both.seconds(rates) * 1e3 == pytest.approx(max(by_bytes, by_operations), abs=0.06)
        assert both.bound(rates) == ("bytes" if by_bytes > by_operations else "operations")


def test_work_counts_each_tensor_once():
    case = Case(10, 3, 8, 2, 5)
    light, dynamic, talk = (floors.work(operator, case, 2) for operator in operators.OPERATORS)
    assert light["forward"] == floors.Work((240 + 240 + 10) * 2, 2 * 5 * 240)
    assert light["backward"] == floors.Work((240 + 240 + 240 + 10 + 10) * 2, 4 * 5 * 240)
    assert dynamic["forward"].bytes - light["forward"].bytes == (300 - 10) * 2
    assert dynamic["both"] == dynamic["forward"] + dynamic["backward"]
    assert talk["forward"] == floors.Work((240 + 240 + 2 * 60) * 2, 6 * 240)
    assert talk["backward"] == floors.Work((240 + 240 + 240 + 4 * 60) * 2, 10 * 240)
    causal = floors.work("talkconv", Case(10, 3, 8, 2, 5, causal=True), 2)
    assert causal["forward"] == floors.Work((240 + 240 + 60) * 2, 4 * 240)
    gated = floors.work("lightconv", Case(10, 3, 8, 2, 5, glu=True), 2)
    assert gated["forward"].bytes == (480 + 240 + 10) * 2
    assert gated["backward"].bytes == (240 + 480 + 480 + 20) * 2


def test_sets_are_those_of_the_targets():
    assert all(case.steps * case.batch * case.channels == 2**26 for name in ("gpu", "sweep") for case in SETS[name])
    assert [case.kernel_size for case in SETS["gpu"]] == [3, 7, 15, 31, 63]
    assert (SETS["sweep"][0].steps, SETS["sweep"][-1].steps) == (64, 65_536)
    assert [case.channels // case.heads for case in SETS["short"]] == [1, 4, 16, 32]
    assert all(case.causal and case.batch_first and case.normalize == "none" for case in SETS["short"])
    assert parse("4,2,8,2,3c") == (Case(4, 2, 8, 2, 3, causal=True),)
    assert parse("4,2,8,2,3c")[0].padding_l == 2 and parse("4,2,8,2,3")[0].padding_l == 1


# ------------------------------------------------------------------------------------------------ timing and memory


class Clock:
    """Time that passes only in calls: each takes what it says."""

    slow = 10

    def time(self, call):
        seconds = call()
        return lambda: seconds

    def synchronize(self):
        pass


def test_calls_are_interleaved():
    order = []

    def call(name, seconds):
        def run():
            order.append(name)
            return seconds

        return run

    calls = {"a": call("a", 1), "b": call("b", 2)}
    assert timing.interleaved(calls, 3, Clock(), warm_up=1) == {"a": [1, 1, 1], "b": [2, 2, 2]}
    assert order == ["a", "b"] * 4


@pytest.mark.parametrize(("even", "repeats", "slow"), [(False, 20, 4), (False, 3, 3), (False, 1, 1), (True, 20, 20)])
def test_what_is_slow_is_called_less_often(even, repeats, slow):
    times = timing.interleaved({"fast": lambda: 1, "slow": lambda: 60}, repeats, Clock(), even=even)
    assert (len(times["fast"]), len(times["slow"])) == (repeats, slow)


def test_summary_and_best():
    found = timing.summary([3.0, 1.0, 2.00000049])
    assert found.pop("samples_s") == [3.0, 1.0, 2.0]  # six digits, in their order
    assert found == {"median_s": 2.00000049, "best_s": 1.0, "worst_s": 3.0, "calls": 3}
    values = iter([9, 9, 5, 3, 4])
    assert timing.best(lambda: next(values), 3, Clock()) == 3


def test_peak_of_memory_held_at_once():
    def call():
        first = torch.empty(2**20, dtype=torch.uint8)
        second = torch.empty(3 * 2**20, dtype=torch.uint8)
        del first, second
        torch.empty(2 * 2**20, dtype=torch.uint8)

    assert timing.peak_bytes(call, torch.device("cpu")) == pytest.approx(4 * 2**20, abs=4096)


# ------------------------------------------------------------------------------------------------ files


def test_json_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "result.json"
    report.write_json(file, {"old": 1})
    with pytest.raises(TypeError):
        report.write_json(file, {"new": object()})
    assert json.loads(file.read_text()) == {"old": 1} and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0, "0"),
        (0.00123, "0.0012"),
        (0.5, "0.500"),
        (12.345, "12.3"),
        (1234.5, "1234"),
    ],
)
def test_digits(value, text):
    assert report.digits(value) == text
