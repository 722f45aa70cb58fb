"""benchmarks/gpu_fairseq.sh and wheels.sh: parts, options, the environment of wheels, failures."""

import functools
import importlib.metadata
import os
import sys
import zipfile

import pytest

from tests import programs
from tests.benchmarks.conftest import states

# Not find_spec("pip"): setuptools takes that for a running pip, and leaves its distutils out of this process for good.
HAS_PIP = any(importlib.metadata.distributions(name="pip"))
PARTS = ["environment", "build", "profile", "training", "training_16k", "training_32k", "ragged"]


BIG = "--device cuda --dtype bfloat16 --preset wmt_en_de_big"


@pytest.fixture
def script(stand_in):
    return functools.partial(stand_in, "gpu_fairseq")


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data bin"
    folder.mkdir()
    (folder / "dict.en.txt").write_text("a 1\n", encoding="utf-8")
    return folder


def wheel(folder, name, **files):
    """A wheel with these modules or packages' __init__.py."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    contents = {f"{module}.py".replace("___init__", "/__init__"): text for module, text in files.items()}
    contents[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nowhere\n"
    contents[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)


def test_timing_in_order(script):
    _, content, calls = script("timing", FAIRSEQ_MISSING=0)
    assert content["benchmark"] == "gpu_fairseq_timing"
    assert states(content) == dict.fromkeys(PARTS, "ok") | {"ragged": "not here"}
    assert set(content["results"]) == {"profile", "training", "training_16k", "training_32k"}
    profile, *trainings = calls
    assert profile.startswith("-m benchmarks.gpu_profile --json ") and profile.endswith(BIG)
    sizes = ("fairseq LightConv", "--sentences 512 --length 32", "--sentences 1024 --length 32")
    for call, end in zip(trainings, sizes, strict=True):
        assert call.startswith("-m benchmarks.training --json ")
        assert f"{BIG} --repeats 50 --systems DynamicConv (ours)" in call and call.endswith(end)


def test_other_steps_in_order(script):
    _, content, (small, graphs, half, update) = script("steps", FAIRSEQ_MISSING=0)
    assert list(states(content)) == ["environment", "build", "small_graphs", "graphs", "half", "update_28"]
    assert small.endswith("--preset multi30k_en_de --repeats 50")  # all systems, with graphs too
    assert graphs.endswith("DynamicConv (ours), CUDA graphs fairseq Transformer, CUDA graphs")
    assert f"{BIG} --dtype float16" in half
    assert "--update-freq 28 --sentences 512 --length 32" in update


def test_batches_of_real_text(script, data):
    _, content, (call,) = script("timing", "--parts", "ragged", "--data", data, FAIRSEQ_MISSING=0)
    assert states(content) == {"ragged": "ok"} and set(content["results"]) == {"ragged"}
    assert f"--data {data} {BIG} --repeats 50 --systems DynamicConv (ours)" in call
    assert call.endswith("--max-tokens 16384")


def test_generation_in_order(script, data, tmp_path):
    _, content, calls = script("generation", FAIRSEQ_MISSING=0)
    assert states(content)["generation"] == "ok" and states(content)["trained"] == "not here"
    call, engine = calls
    assert f"{BIG} --beam 4 --sentences 1 32 256 --repeats 7 --systems DynamicConv (ours)" in call
    assert "transformers Marian" in call and engine.endswith("CTranslate2 Transformer, int8_bfloat16")
    assert call.endswith("fairseq Transformer, our search, CUDA graphs")
    for name in "dynamicconv", "transformer":
        (tmp_path / f"{name}.pt").touch()
    options = ("--parts", "trained", "--data", data, "--checkpoints", tmp_path)
    _, content, (call,) = script("generation", *options, FAIRSEQ_MISSING=0)
    assert states(content) == {"trained": "ok"}
    paths = f"DynamicConv={tmp_path}/dynamicconv.pt Transformer={tmp_path}/transformer.pt"
    assert f"--data {data} --path {paths} --device cuda --dtype bfloat16 --beam 4" in call


def test_recipes(script, data):
    _, content, (recipes,) = script("recipes", "--data", data, FAIRSEQ_MISSING=0)
    assert states(content) == dict.fromkeys(["environment", "build", "recipes"], "ok")
    assert set(content["results"]) == {"recipes"}
    assert (
        f"--data {data} --device cuda --dtype bfloat16 --updates 1500 --seconds 285 --configs multi30k_en_de" in recipes
    )


def test_compiled_layers(script):
    _, content, (call,) = script("compile", FAIRSEQ_MISSING=0)
    assert list(states(content)) == ["environment", "build", "compiled"]
    assert f"{BIG} --repeats 50 --compile-blocks --systems DynamicConv (ours) DynamicConv (ours), compiled" in call


def test_rows_are_kept_for_the_next_call(script, data, tmp_path):
    _, content, (call,) = script("rows", "--data", data, "--configs", "iwslt15_en_vi", FAIRSEQ_MISSING=0)
    assert states(content) == dict.fromkeys(["environment", "build", "rows"], "ok")
    names = "iwslt15_en_vi/dynamicconv iwslt15_en_vi/lightweightconv iwslt15_en_vi/talkconv iwslt15_en_vi/transformer"
    assert f"{names} --data {data} --folder {tmp_path}/a folder/cache/rows --seconds 300 -- common.bf16=true" in call


def test_what_is_not_there_is_said(script):
    done, content, calls = script("timing")
    assert not calls and "no --wheels" in done.stdout
    assert states(content) == dict.fromkeys(PARTS[:2], "ok") | dict.fromkeys(PARTS[2:], "not here")
    assert "fairseq is not installed" in done.stdout
    done, content, calls = script("recipes")
    assert not calls and "no --data: nothing to train on" in done.stdout
    assert states(content)["recipes"] == "not here"


def test_chosen_parts_updates_and_the_cpu(script, data):
    _, content, (call,) = script("timing", "--parts", "training", "--device", "cpu", FAIRSEQ_MISSING=0)
    assert list(states(content)) == ["training"]
    assert "--device cpu --dtype bfloat16 --preset wmt_en_de_big --quick --repeats 50 --systems" in call
    options = ("--parts", "recipes", "--data", data, "--updates", "7", "--device", "cpu", "--configs", "iwslt15_en_vi")
    _, _, (call,) = script("recipes", *options, FAIRSEQ_MISSING=0)
    assert "--device cpu --dtype bfloat16 --updates 7" in call and call.endswith("--configs iwslt15_en_vi")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["timing", "--frobnicate"], "unknown argument --frobnicate"),
        (["timing", "--data"], "--data needs a value"),
        (
            ["everything"],
            'the first argument must be timing, steps, compile, generation, recipes or rows, got "everything"',
        ),
        (["timing", "--wheels", "/nowhere"], "--wheels: /nowhere has no *.whl (benchmarks/wheels.sh)"),
        (["timing", "--data", "/nowhere"], "--data: /nowhere is not a data-bin folder"),
        (["recipes", "--configs", "nowhere"], "--configs: configs/nowhere has no dynamicconv.yaml"),
        (["generation", "--checkpoints", "/nowhere"], "--checkpoints: /nowhere has no dynamicconv.pt"),
        (["timing", "--device", "tpu"], "--device must be cuda or cpu, got: tpu"),
        (["timing", "--updates", "0"], "--updates must be a whole number from 1, got: 0"),
    ],
)
def test_wrong_arguments(script, arguments, message):
    done, content, calls = script(*arguments, status=2)
    assert message in done.stderr and content is None and not calls


def test_what_is_no_evidence_needs_a_place(repository):
    """It would replace measurements."""
    command = (repository / "benchmarks/gpu_fairseq.sh", "timing", "--device", "cpu")
    done = programs.run(*command, status=2, OUT=None)
    assert "--device cpu needs --out DIR: its figures are no evidence" in done.stderr


def real(repository, tmp_path, wheels):
    """The part `environment` with this test's own Python; what it printed, and the exit status."""
    options = ("timing", "--device", "cpu", "--parts", "environment", "--wheels", wheels, "--out", tmp_path / "out")
    done = programs.run(repository / "benchmarks/gpu_fairseq.sh", *options, status=None, PYTHON=sys.executable)
    return done.stdout + done.stderr, done.returncode


@pytest.mark.skipif(not HAS_PIP, reason="this Python has no pip")
def test_wheels_come_before_what_python_has_and_torch_is_pythons(repository, tmp_path):
    import torch

    wheels = tmp_path / "wheels of mine"
    wheel(wheels, "fairseq_fixed", fairseq___init__="import of_another_wheel\n")
    wheel(wheels, "another", of_another_wheel="")
    out, status = real(repository, tmp_path, wheels)
    assert status == 0, out
    (line,) = [line for line in out.splitlines() if line.startswith("fairseq: ")]
    assert "/env/lib/python" in line and line.endswith(f"torch {torch.__version__}: {torch.__path__[0]}")
    assert not os.path.exists(line.split()[1].rstrip(","))  # thrown away


@pytest.mark.skipif(not HAS_PIP, reason="this Python has no pip")
def test_wheels_that_lack_something(repository, tmp_path):
    wheel(tmp_path / "wheels", "fairseq_fixed", fairseq___init__="import not_to_be_found\n")
    out, status = real(repository, tmp_path, tmp_path / "wheels")
    assert status == 1 and "fairseq cannot be imported: No module named 'not_to_be_found'" in out


# ------------------------------------------------------------------------------------------------ wheels.sh

PIP = """\
#!/bin/bash
# pip wheel, without a network: makes an empty file for each package, except those in LACK.
echo "$*" >>"$CALLS"
folder=''
for ((i = 1; i <= $#; i++)); do
    next=$((i + 1))
    [[ ${!i} != --wheel-dir ]] || folder=${!next}
done
past=''
for word in "$@"; do
    [[ $past != */constraints.txt && -z $inside ]] || { inside=1; [[ " $LACK " == *" $word "* ]] ||
        touch "$folder/${word//-/_}-1.0-py3-none-any.whl"; }
    past=$word
done
"""


@pytest.fixture
def wheels(repository, tmp_path):
    python = tmp_path / "python3.12"
    python.write_text(PIP, encoding="utf-8")
    python.chmod(0o755)

    def run(*arguments, lack="", status=0):
        environment = {"CALLS": tmp_path / "calls", "LACK": lack, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return programs.run(repository / "benchmarks/wheels.sh", *arguments, status=status, **environment)

    return run


def test_wheels_are_collected_at_pinned_versions(wheels, repository, tmp_path):
    folder = tmp_path / "a new" / "folder"
    done = wheels(folder)
    call = (tmp_path / "calls").read_text(encoding="utf-8")
    assert "wheel --no-deps" in call and f"--constraint {repository / 'scripts' / 'constraints.txt'}" in call
    names = [path.name.partition("-1.0")[0] for path in folder.glob("*.whl")]
    assert {"fairseq_fixed", "omegaconf", "hydra_core", "antlr4_python3_runtime", "cloudpickle"} <= set(names)
    assert not {"torch", "numpy"} & set(names) and done.stdout.startswith(f"{len(names)} wheels, ")
    # Every one of them has a version there.
    pinned = (repository / "scripts" / "constraints.txt").read_text(encoding="utf-8").lower()
    assert all(f"{name.replace('_', '-').lower()}==" in pinned for name in names)


def test_a_wheel_that_did_not_come(wheels, tmp_path):
    done = wheels(tmp_path / "folder", lack="hydra-core", status=2)
    assert "no wheel of hydra-core came" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no folder was named"),
        (["a", "b"], "one folder, got a and b"),
        (["timing", "--frobnicate"], "unknown argument --frobnicate"),
        (["a", "--python"], "--python needs a value"),
        (["a", "--python", "python-of-nowhere"], "python-of-nowhere is needed"),
    ],
)
def test_wrong_arguments_of_wheels(wheels, arguments, message):
    assert message in wheels(*arguments, status=2).stderr
