"""benchmarks.training: the right models, the same work for each, tables and JSON."""

import json

import pytest
import torch

pytest.importorskip("fairseq")

from benchmarks import report, systems, timing, training
from tests.benchmarks.conftest import ran

SMALL = systems.sized(systems.PRESETS["iwslt_de_en"], True, None, None)


@pytest.fixture(scope="module")
def task():
    return systems.task(systems.dictionary(100))


# ------------------------------------------------------------------------------------------------ the models


@pytest.mark.parametrize("preset", systems.PRESETS)
@pytest.mark.parametrize("system", systems.SYSTEMS)
def test_every_system_is_what_it_is_called(system, preset, task):
    model = systems.build(system, systems.PRESETS[preset], task, tiny=True)
    modules = {type(module).__module__ for module in model.modules()}
    ours = "lightconv_plugin.modules."
    assert (ours + "convolutions" in modules) == (system in (systems.DYNAMIC, systems.LIGHT))
    assert (ours + "talk" in modules) == (system == systems.TALK)
    assert ("fairseq.modules.dynamic_convolution" in modules) == (system == systems.FAIRSEQ_DYNAMIC)
    assert ("fairseq.modules.lightweight_convolution" in modules) == (system == systems.FAIRSEQ_LIGHT)
    assert type(model).__module__.startswith("lightconv_plugin" if "ours" in system else "fairseq")


def test_another_mixer_under_a_systems_name_is_refused(task):
    model = systems.build(systems.DYNAMIC, SMALL, task, tiny=True)
    for system in (systems.LIGHT, systems.TALK, systems.FAIRSEQ_DYNAMIC, systems.TRANSFORMER):
        with pytest.raises(report.BenchmarkError, match="was built with other token mixers"):
            systems._check(system, model)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(systems.LIGHT, systems.FAIRSEQ_LIGHT), (systems.DYNAMIC, systems.FAIRSEQ_DYNAMIC)]
)
def test_ours_and_fairseqs_have_the_same_parameters(ours, theirs, task):
    """But for the convolutions' biases, which fairseq's dynamic layers carry along and never use."""
    for preset in systems.PRESETS.values():
        pair = [systems.build(system, preset, task, tiny=True) for system in (ours, theirs)]
        unused = sum(p.numel() for name, p in pair[1].named_parameters() if name.endswith("conv.conv_bias"))
        assert systems.parameters(pair[0]) == systems.parameters(pair[1]) - unused


def test_sizes_of_the_presets(task):
    sizes = {}
    for name in ("iwslt_de_en", "multi30k_en_de"):
        for system in systems.SYSTEMS:
            model = systems.build(system, systems.PRESETS[name], task)
            layer = model.encoder.layers[0]
            sizes[name, system] = (len(model.encoder.layers), len(model.decoder.layers), layer.fc1.out_features)
    for system in systems.SYSTEMS:
        convolutions = system != systems.TRANSFORMER
        assert sizes["iwslt_de_en", system] == (7 if convolutions else 6, 6, 1024)
        assert sizes["multi30k_en_de", system] == (4, 4, 256)


def test_random_batches_are_as_fairseqs_collater_makes_them():
    words = systems.dictionary(100)
    first, second = systems.random_batches(SMALL, words, 2)
    again, _ = systems.random_batches(SMALL, words, 2)
    assert len(words) == 100 and torch.equal(first["target"], again["target"])
    assert not torch.equal(first["target"], second["target"])
    inputs = first["net_input"]
    assert inputs["src_tokens"].shape == first["target"].shape == (4, 6) and first["ntokens"] == 24
    assert (inputs["src_tokens"][:, -1] == words.eos()).all() and (first["target"][:, -1] == words.eos()).all()
    assert (inputs["prev_output_tokens"][:, 0] == words.eos()).all()
    assert torch.equal(inputs["prev_output_tokens"][:, 1:], first["target"][:, :-1])
    assert inputs["src_tokens"][:, :-1].min() >= words.nspecial


# ------------------------------------------------------------------------------------------------ training


def test_training_quick(capsys, tmp_path):
    file = tmp_path / "training.json"
    out, _ = ran(training.main, capsys, "--quick", "--dtype", "bfloat16", "--json", file)
    content = json.loads(file.read_text(encoding="utf-8"))
    assert list(content["systems"]) == list(systems.SYSTEMS)
    assert content["benchmark"] == "training" and content["dtype"] == "bfloat16"
    assert content["tokens_per_batch"] == [24] * 4 and content["vocabulary"] == 100
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    rows = {first: rest for first, *rest in cells}
    speeds = {name: measured["tokens_per_s"] for name, measured in content["systems"].items()}
    for name, measured in content["systems"].items():
        assert measured["calls"] == 2 and measured["peak_bytes"] > 0 and measured["parameters"] > 10_000
        assert rows[name][2] == f"{speeds[name]:,.0f}"
        for place, peer in (3, systems.FAIRSEQ_DYNAMIC), (4, systems.TRANSFORMER):
            ratio = timing.ratio(content["systems"][peer], measured)
            assert rows[name][place] == str(ratio) and ratio.low is not None


def test_a_step_trains(task):
    """What is timed changes every parameter that has a gradient, by Adam, with another dropout mask each time."""
    from benchmarks import trainers

    for system in (systems.DYNAMIC, systems.FAIRSEQ_DYNAMIC):
        model = systems.build(system, SMALL, task, tiny=True)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        batches = iter(systems.random_batches(SMALL, task.target_dictionary, 3))
        step = trainers.steps(model, task, torch.device("cpu"), "float32", batches)
        for _ in range(3):
            step()
        assert model.training
        with pytest.raises(StopIteration):
            step()
        same = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
        # The bias of the keys has no gradient but for roundings, which may cancel.
        assert not [name for name in same if not name.endswith(("conv_bias", "k_proj.bias"))]


def test_an_update_of_several_batches_and_steps_in_graphs(task, monkeypatch):
    from benchmarks import trainers
    from lightconv_plugin.compat import step_graphs
    from tests.generation.recordings import Recordings

    recordings = Recordings()
    monkeypatch.setattr(step_graphs, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(step_graphs, "CudaGraphs", lambda device: recordings)
    model = build_with_learned_positions(task)
    batches = iter(systems.random_batches(SMALL, task.target_dictionary, 6))
    step = trainers.steps(model, task, torch.device("cpu"), "float32", batches, update_freq=3, graphs=True)
    for _ in range(2):
        step()
    assert next(batches, None) is None and (recordings.recorded, recordings.replayed) == (1, 4)


@pytest.mark.parametrize("update_freq, updates", [(1, 8), (2, 4), (3, 3), (28, 1)])
def test_nothing_is_recorded_while_steps_are_timed(update_freq, updates):
    """Every batch comes at least twice before."""
    assert training._recording(4, update_freq, torch.device("cuda")) == updates
    assert training._recording(4, update_freq, torch.device("cpu")) == 0


def build_with_learned_positions(task):
    """Those of fairseq's sinusoids ask for a length that is on the host, which a recording on the CPU refuses."""
    from tests.models import toys

    return toys.build(task_=task, encoder_learned_pos=True, decoder_learned_pos=True)


def test_on_a_gpu_graphs_are_measured_too():
    names = list(training._candidates(systems, torch.device("cuda"), False))
    assert names == [*systems.SYSTEMS, *(f"{name}, CUDA graphs" for name in systems.WITH_GRAPHS)]
    assert list(training._candidates(systems, torch.device("cpu"), False)) == list(systems.SYSTEMS)


def test_compiled_layers_are_measured_beside_the_others(capsys, tmp_path, monkeypatch):
    from lightconv_plugin.models import layers

    compiled = []
    monkeypatch.setattr(layers, "_compiled", lambda forward: compiled.append(forward) or forward)
    file, chosen = tmp_path / "t.json", [systems.LIGHT, f"{systems.LIGHT}, compiled"]
    options = ("--quick", "--compile-blocks", "--repeats", 1, "--systems", *chosen, "--json", file)
    ran(training.main, capsys, *options)
    assert list(json.loads(file.read_text(encoding="utf-8"))["systems"]) == chosen
    # Two warm-up steps, a timed one and one for the memory, of two layers on each side.
    assert len(compiled) == 4 * 4


def test_only_the_named_systems(capsys, tmp_path):
    file = tmp_path / "t.json"
    out, _ = ran(training.main, capsys, "--quick", "--systems", systems.LIGHT, "--json", file, "--repeats", 3)
    content = json.loads(file.read_text(encoding="utf-8"))
    assert list(content["systems"]) == [systems.LIGHT] and "–" in out
    assert content["systems"][systems.LIGHT]["calls"] == 3


def test_batches_of_a_data_bin_folder(capsys, tmp_path, toy_data):
    file = tmp_path / "t.json"
    arguments = ("--quick", "--data", toy_data, "--max-tokens", 60, "--systems", systems.DYNAMIC, systems.TRANSFORMER)
    ran(training.main, capsys, *arguments, "--json", file)
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["data"] == str(toy_data) and 1 < len(content["tokens_per_batch"]) <= 4
    assert 0 < max(content["tokens_per_batch"]) <= 60 and len(set(content["tokens_per_batch"])) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--data /nowhere", "--data: /nowhere is not a data-bin folder: it has no dict.*.txt"),
        ("--data /nowhere --length 4", "--sentences and --length are for random tokens, not for --data"),
        (
            "--systems LightConv",
            "--systems: allowed are 'DynamicConv (ours)', 'LightConv (ours)', 'TaLK (ours)', 'fairseq",
        ),
        ("--json /nowhere/t.json", "--json: /nowhere is not a folder"),
        ("--dtype float16", "--dtype float16 needs --device cuda"),
    ],
)
def test_training_refuses(capsys, arguments, message):
    out, error = ran(training.main, capsys, "--quick", *arguments.split(), status=2)
    assert not out and message in error and error.count("\n") == 1


def test_a_data_bin_folder_without_a_training_set(capsys, tmp_path):
    for language in ("de", "en"):
        (tmp_path / f"dict.{language}.txt").write_text("a 3\nb 2\n", encoding="utf-8")
    _, error = ran(training.main, capsys, "--quick", "--data", tmp_path, status=2)
    assert error.startswith(f"error: --data: {tmp_path}: ")
