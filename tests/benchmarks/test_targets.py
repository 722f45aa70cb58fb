"""benchmarks.targets: every target judged by made-up results, from the right file, at its worst case."""

import json

import pytest

from benchmarks import targets
from benchmarks.figures import Result, read
from benchmarks.shapes import SETS, Case
from tests.benchmarks import synthetic
from tests.benchmarks.conftest import ran

LARGE = SETS["gpu"][3]  # K = 31
ATTENTION = Case(8192, 8, 1024, 16, 31, causal=True)


def find(name, text):
    (target,) = [t for t in targets.TARGETS if name in t.name and text in t.text]
    return target


def cpu(times, shape=SETS["cpu"][0], operator="dynamicconv"):
    return synthetic.operators([synthetic.case(operator, shape, "float32", times)], gpu=False, dtype="float32")


def gpu(times, shape=LARGE, operator="dynamicconv", dtype="bfloat16", **peaks):
    return synthetic.operators([synthetic.case(operator, shape, dtype, times, **peaks)], gpu=True, dtype=dtype)


def floor(shape, operator, dtype, name):
    return synthetic.case(operator, shape, dtype, {})["floor"][name]


def on(device, benchmark, preset, dtype, **sizes):
    def result(ours, peer, name):
        return synthetic.models(benchmark, preset, {name: ours, peer: 100.0}, gpu=device == "gpu", dtype=dtype, **sizes)

    return result


def ratio_of(measure, peer, ours=targets.DYNAMIC):
    return lambda value: measure(100.0 * value, peer, ours)


def times(shape, operator, peer, build, **options):
    """Ours takes 1 ms forward, the peer `value` times as long."""
    return lambda value: build({"ours": 1e-3, peer: 1e-3 * value}, shape, operator, **options)


def with_bandwidth(operator, shape):
    """The pass with the smaller share of the bandwidth has `value` of it; backward takes twice the forward's time."""

    def result(value):
        forward, backward = (floor(shape, operator, "bfloat16", name)["bytes"] for name in ("forward", "backward"))
        return gpu({"ours": min(forward, backward / 2) / synthetic.RATES.bytes_per_s / value}, shape, operator)

    return result


def grown(key):
    def result(value):
        measured = []
        for shape in SETS["sweep"]:
            factor = value if shape.steps == 65_536 else 1.0
            one = synthetic.case(
                "lightconv", shape, "bfloat16", {"ours": 1e-3 * (factor if key == "time" else 1)}, ours=1
            )
            one["candidates"]["ours"]["peak_bytes"] = 1e6 * (factor if key == "memory" else 1)
            measured.append(one)
        return synthetic.operators(measured, gpu=True, dtype="bfloat16")

    return result


def over_floor(value):
    shape = SETS["cpu"][0]
    return cpu({"ours": value * floor(shape, "lightconv", "float32", "both")["seconds"] / 3}, shape, "lightconv")


def peaks(value):
    return gpu({"ours": 1.0, "fairseq CUDA": 4.0}, dtype="float16", ours=1000 * value, fairseq_CUDA=1000)


CPU_TRAINING = on("cpu", "training", "iwslt_de_en", "float32")
CPU_GENERATION = on("cpu", "generation", "iwslt_de_en", "float32", beam=5, sentences=32)
CPU_SENTENCE = on("cpu", "generation", "iwslt_de_en", "float32", beam=5, sentences=1)
GPU_TRAINING = on("gpu", "training", "wmt_en_de_big", "bfloat16")
GPU_GENERATION = on("gpu", "generation", "wmt_en_de_big", "bfloat16", beam=4, sentences=256)
SHORT = SETS["short"][0]
# For each target, a result in which its figure is the given value.
MADE = {
    ("CPU operators", "the floor"): over_floor,
    ("CPU operators", "T ≤ 128"): times(SETS["cpu"][1], "lightconv", "fairseq band", cpu),
    ("CPU operators", "T = 512"): times(SETS["cpu"][2], "dynamicconv", "fairseq band", cpu),
    ("CPU operators", "dynamic models take"): times(SETS["cpu"][2], "dynamicconv", "fairseq unfold", cpu),
    ("CPU training", "fairseq's DynamicConv"): ratio_of(CPU_TRAINING, "fairseq DynamicConv"),
    ("CPU training", "Transformer"): ratio_of(CPU_TRAINING, targets.TRANSFORMER),
    ("32 sentences", "fairseq's"): ratio_of(CPU_GENERATION, targets.TRANSFORMER),
    ("32 sentences, float32", "CTranslate2"): ratio_of(CPU_GENERATION, "CTranslate2 Transformer, float32"),
    ("32 sentences, int8", "CTranslate2"): ratio_of(
        CPU_GENERATION, "CTranslate2 Transformer, int8", f"{targets.DYNAMIC}, int8"
    ),
    ("one sentence, float32", "CTranslate2"): ratio_of(CPU_SENTENCE, "CTranslate2 Transformer, float32"),
    ("one sentence, int8", "CTranslate2"): ratio_of(
        CPU_SENTENCE, "CTranslate2 Transformer, int8", f"{targets.DYNAMIC}, int8"
    ),
    ("GPU lightconv", "80 %"): with_bandwidth("lightconv", LARGE),
    ("GPU dynamicconv, K ≤ 31", "65 %"): with_bandwidth("dynamicconv", LARGE),
    ("fairseq's CUDA layers", "4 ×"): times(LARGE, "lightconv", "fairseq CUDA", gpu, dtype="float16"),
    ("fairseq's CUDA layers", "memory"): peaks,
    ("attention", "every T"): times(SETS["sweep"][0], "lightconv", "attention (flash)", gpu),
    ("attention", "8192"): times(ATTENTION, "lightconv", "attention (flash)", gpu),
    ("K = 4", "dynamic-conv1d"): times(SHORT, "dynamicconv", "dynamic-conv1d", gpu),
    ("K = 4", "Jet-Nemotron"): times(SHORT, "dynamicconv", "Jet-Nemotron", gpu),
    ("GPU training", "Transformer"): ratio_of(GPU_TRAINING, targets.TRANSFORMER),
    ("GPU generation", "Transformer"): ratio_of(GPU_GENERATION, targets.TRANSFORMER),
    ("growth", "time"): grown("time"),
    ("growth", "memory"): grown("memory"),
}


def test_every_target_is_tested():
    assert {find(*names) for names in MADE} == set(targets.TARGETS)
    assert len(MADE) == len(targets.TARGETS)


@pytest.mark.parametrize("names", MADE, ids=" / ".join)
def test_reached_and_missed(names):
    target = find(*names)
    better, worse = (0.98, 1.02) if target.at_most else (1.02, 0.98)
    for factor, status in ((better, targets.REACHED), (worse, targets.MISSED)):
        verdict = targets.judge(target, [Result("a.json", MADE[names](target.limit * factor))])
        assert verdict.status == status and verdict.figure.value == pytest.approx(target.limit * factor)


@pytest.mark.parametrize("names", MADE, ids=" / ".join)
def test_other_results_say_nothing(names):
    """Each target looks at its own results only: the others' leave it unmeasured, or serve it as they should."""
    target = find(*names)
    result = Result("a.json", MADE[names](target.limit))
    content = result.content
    wrong = [content | {"dtype": "float64"}] if content["benchmark"] == "operators" else [content | {"preset": "other"}]
    other = {k: v for k, v in content["machine"].items() if k not in synthetic.GPU}
    wrong.append(content | {"machine": other if result.on_gpu else content["machine"] | synthetic.GPU})
    wrong.append(content | {"benchmark": "recipes"})
    for changed in wrong:
        assert targets.judge(target, [Result("a.json", changed)]).status == targets.UNKNOWN


def test_the_worst_case_counts():
    target = find("CPU operators", "T ≤ 128")
    measured = [
        synthetic.case("lightconv", shape, "float32", {"ours": 1.0, "fairseq band": ratio, "fairseq unfold": 50.0})
        for shape, ratio in ((SETS["cpu"][0], 5.0), (SETS["cpu"][1], 2.0), (SETS["cpu"][2], 1.0))
    ]
    verdict = targets.judge(target, [Result("a.json", synthetic.operators(measured, gpu=False, dtype="float32"))])
    assert verdict.status == targets.MISSED and verdict.figure.value == pytest.approx(2.0)
    assert verdict.figure.of == f"lightconv {SETS['cpu'][1].name}"


def test_the_youngest_file_counts_with_all_that_it_holds():
    target = find("attention", "every T")
    make = MADE["attention", "every T"]
    old, new, beside = make(0.5), make(3.0), make(2.0)
    new["machine"] = new["machine"] | {"date": "2026-03-01T00:00:00+00:00"}
    results = [Result("gpu.json", new), Result("old.json", old), Result("gpu.json", beside)]
    verdict = targets.judge(target, results)
    assert (verdict.status, verdict.result.file, verdict.figure.value) == (targets.REACHED, "gpu.json", 2.0)


@pytest.mark.parametrize("update_freq, status", [(1, targets.REACHED), (28, targets.MISSED)])
def test_updates_of_several_batches_are_other_measurements(update_freq, status):
    make = MADE["GPU training", "Transformer"]
    newer = make(1.4) | {"update_freq": update_freq}
    newer["machine"] = newer["machine"] | {"date": "2026-03-01T00:00:00+00:00"}
    results = [Result("gpu_fairseq_timing.json", make(1.0)), Result("gpu_fairseq_steps.json", newer)]
    assert targets.judge(find("GPU training", "Transformer"), results).status == status


def test_small_tensors_and_other_variants_have_no_share_of_the_bandwidth():
    target = find("GPU dynamicconv, K ≤ 31", "65 %")
    for shape in (Case(64, 64, 1024, 16, 31), SETS["gpu"][4], Case(256, 256, 1024, 16, 31, glu=True)):
        assert targets.judge(target, [Result("a.json", gpu({"ours": 1.0}, shape))]).status == targets.UNKNOWN


def write(folder, **contents):
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def test_reading_a_folder(tmp_path):
    training = MADE["GPU training", "Transformer"](1.5)
    write(
        tmp_path,
        gpu={"benchmark": "gpu", "parts": [], "results": {"training": training, "main": gpu({"ours": 1.0})}},
        single=over_floor(1.0),
        quick=over_floor(1.0) | {"quick": True},
        scores={"systems": {"dynamicconv": 27.0}},
        list=[1, 2],
    )
    found = read(tmp_path)
    assert [(r.file, r.content["benchmark"]) for r in found] == [
        ("gpu.json", "training"),
        ("gpu.json", "operators"),
        ("single.json", "operators"),
    ]


def test_the_table(capsys, tmp_path):
    write(tmp_path, cpu=over_floor(2.5), gpu={"results": {"t": MADE["GPU training", "Transformer"](1.5)}})
    out, _ = ran(targets.main, capsys, tmp_path)
    lines = out.splitlines()
    assert len(lines) == 2 + len(targets.TARGETS) + 2
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:-2]]
    assert cells[0][2:4] == ["missed", "2.50"] and cells[0][5] == "cpu.json, 2026-01-02"
    assert [row[2:4] for row in cells if row[0].startswith("GPU training")] == [["reached", "1.50"]]
    assert lines[-1] == f"1 reached, 1 missed, {len(targets.TARGETS) - 2} not measured"


def test_the_results_of_the_repository_can_be_read(capsys):
    out, _ = ran(targets.main, capsys)
    assert "cpu_operators" in out


@pytest.mark.parametrize("name", ["nowhere", "broken"])
def test_what_cannot_be_read(capsys, tmp_path, name):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.json").write_text("{", encoding="utf-8")
    out, error = ran(targets.main, capsys, tmp_path / name, status=2)
    assert not out and str(tmp_path / name) in error
