"""benchmarks/COSTS.md: what the rows that were not run would take."""

import json

import pytest

from benchmarks import costs
from benchmarks.report import BenchmarkError

CONFIG = """# @package _global_
# Parameters with a dictionary:
#   everything   total   2,000,000
dataset: {max_tokens: 3000}
optimization: {max_update: 1000, update_freq: [4]}
"""


def test_a_run_is_read_from_its_configuration(tmp_path):
    path = tmp_path / "dynamicconv.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    run = costs.read_run(path, "a few pairs", None)
    assert (run.updates, run.tokens, run.parameters) == (1000, 12_000_000, 2_000_000)
    assert run.operations == 6 * 12e6 * 2e6


@pytest.mark.parametrize("without", ["total", "max_update", "max_tokens", "update_freq"])
def test_a_configuration_that_does_not_say_it_is_refused(tmp_path, without):
    path = tmp_path / "dynamicconv.yaml"
    path.write_text(CONFIG.replace(without, "something"), encoding="utf-8")
    with pytest.raises(BenchmarkError, match=r"dynamicconv\.yaml"):
        costs.read_run(path, "", None)


def measurement(preset: str, speed: float, **machine) -> dict:
    machine = {"threads": 2, "cpu": "X", "versions": {"torch": "2"}} | machine
    systems = {name: {"tokens_per_s": speed} for name in costs.SYSTEMS.values()}
    return {
        "benchmark": "training",
        "preset": preset,
        "dtype": "float32",
        "data": "random, 4 × 6 tokens",
        "machine": machine,
        "systems": systems,
    }


def cells(page: str, name: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_hours_come_from_measurements_of_the_same_size_only(tmp_path):
    (tmp_path / "cpu_training.json").write_text(json.dumps(measurement("iwslt_de_en", 1000.0)), encoding="utf-8")
    page = costs.page(tmp_path)
    assert cells(page, "iwslt14_de_en/dynamicconv")[-1] == f"{50_000 * 4000 / 1000 / 3600:,.0f}"
    assert cells(page, "wmt16_en_de/dynamicconv")[-1] == "–"
    assert "No GPU has been measured" in page

    gpu = {"benchmark": "gpu_fairseq_timing", "results": {"training_16k": measurement("wmt_en_de_big", 1e6, gpu="GPU")}}
    others = {"training": 2e6, "training_32k": 3e6}  # with batches of other sizes
    gpu["results"] |= {name: measurement("wmt_en_de_big", speed, gpu="GPU") for name, speed in others.items()}
    (tmp_path / "gpu_fairseq_timing.json").write_text(json.dumps(gpu), encoding="utf-8")
    page = costs.page(tmp_path)
    assert "hours, GPU, float32" in page and "No GPU has been measured" not in page
    hours = f"{30_000 * 3584 * 128 / 1e6 / 3600:,.0f}"
    assert cells(page, "wmt16_en_de/talkconv")[-2:] == ["–", hours]  # machines in alphabetical order
    assert cells(page, "iwslt14_de_en/talkconv")[-1] == "–"


def test_every_type_has_its_own_hours_and_a_quick_run_none(tmp_path):
    for number, (dtype, speed, quick) in enumerate(
        [("float32", 1e3, False), ("bfloat16", 2e3, False), ("int4", 9e3, True)]
    ):
        content = measurement("iwslt_de_en", speed) | {"dtype": dtype, "quick": quick}
        (tmp_path / f"{number}.json").write_text(json.dumps(content), encoding="utf-8")
    page = costs.page(tmp_path)
    assert "hours, 2 threads of X, bfloat16 | hours, 2 threads of X, float32 |" in page and "int4" not in page
    hours = [f"{50_000 * 4000 / speed / 3600:,.0f}" for speed in (2000, 1000)]
    assert cells(page, "iwslt14_de_en/dynamicconv")[-2:] == hours


def test_counted_hours(tmp_path):
    """A second of products, half a second of bytes and a launch of half a second for every 16,384 tokens."""
    counts = {"launches": {"": 1}, "bytes": {"": 150}, "product_bytes": 100, "flops": 10}
    content = {"preset": "wmt_en_de_big", "host_s_per_launch": 0.5, "rates": {"flops_per_s": 10, "bytes_per_s": 100}}
    content["steps"] = {"DynamicConv (ours)": {"training, 16384 tokens": counts}}
    (tmp_path / "counted_steps.json").write_text(json.dumps(content), encoding="utf-8")
    page = costs.page(tmp_path)
    hours = f"{30_000 * 3584 * 128 / 16_384 * 2 / 3600:,.0f}"
    assert cells(page, "wmt16_en_de/dynamicconv")[-1] == hours and "*Counted*" in page
    assert cells(page, "wmt16_en_de/talkconv")[-1] == cells(page, "iwslt14_de_en/dynamicconv")[-1] == "–"
