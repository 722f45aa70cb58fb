"""benchmarks/gpu.sh and cpu.sh: parts, failures, wrong arguments. A stand-in takes Python's place."""

import functools

import pytest

from tests import programs
from tests.benchmarks.conftest import states
from tests.warm_python import warm_python

MEASURED = ["main", "short", "sweep", "half", "options", "single", "talk", "talk_single"]
PEERS = ["dynamic_conv1d", "jet_nemotron", "fairseq"]


@pytest.fixture
def gpu(stand_in):
    return functools.partial(stand_in, "gpu")


@pytest.fixture
def folders(tmp_path):
    """The options that name the peers' folders, and the folders."""
    made = [tmp_path / name for name in ("fair seq", "dynamic", "jet")]
    for folder in made:
        folder.mkdir()
    names = ("--fairseq-source", "--dynamic-conv1d", "--jet-nemotron")
    return [word for pair in zip(names, made, strict=True) for word in pair], made


def test_correctness_in_order(gpu):
    done, content, calls = gpu("correctness")
    assert content["benchmark"] == "gpu_correctness"
    away = {"memcheck": "not here", "racecheck": "not here"}  # no compute-sanitizer
    assert list(states(content).items()) == [("build", "ok"), ("tests", "ok"), *away.items()]
    tests = [call for call in calls if "-m pytest" in call]
    assert tests and all("-m gpu" in call and "--durations=" in call and call.endswith("tests/gpu") for call in tests)
    assert "compute-sanitizer was not found" in done.stdout and not [call for call in calls if "operators" in call]


def test_timing_in_order(gpu):
    done, content, calls = gpu("timing")
    assert [name for name in states(content) if name not in PEERS] == ["build", *MEASURED]
    assert states(content) == dict.fromkeys(["build", *MEASURED], "ok") | dict.fromkeys(PEERS, "not here")
    assert set(content["results"]) == set(MEASURED)
    assert all("--device cuda" in call for call in calls if "benchmarks.operators" in call)
    # The last tables: each benchmark's overview, then what became of the parts.
    assert "lightconv T1 B1 C1 H1 K1" in done.stdout and "4.00" in done.stdout and "| single " in done.stdout


def test_the_log_is_what_was_printed(gpu, tmp_path):
    done, _, _ = gpu("timing", "--parts", "build main")
    assert (tmp_path / "a folder" / "out" / "gpu_timing.log").read_text(encoding="utf-8") == done.stdout


def test_the_build_cache_stays(gpu, tmp_path):
    cache = tmp_path / "a folder" / "cache"
    plan = '-c |echo "$TORCH_EXTENSIONS_DIR $TRITON_CACHE_DIR $TRITON_CACHE_AUTOTUNING $TORCHINDUCTOR_CACHE_DIR"\n'
    done, _, _ = gpu("timing", "--parts", "build", plan=plan)
    assert f"{cache}/extensions {cache}/triton 1 {cache}/inductor" in done.stdout
    assert (cache / "extensions").is_dir() and not list((tmp_path / "a folder" / "out").glob("*.parts"))


def test_the_tests_are_shared_out_and_a_failure_in_one_process_counts(gpu):
    done, content, _ = gpu("correctness", "--parts", "tests", plan='-m pytest|echo "share $LIGHTCONV_TEST_SHARE"\n')
    shares = sorted(line for line in done.stdout.splitlines() if line.startswith("share "))
    assert shares == [f"share {number}/{len(shares)}" for number in range(len(shares))]
    plan = "-m pytest|[[ $LIGHTCONV_TEST_SHARE != 0/* ]] || exit 3\n"
    done, content, _ = gpu("correctness", "--parts", "tests", plan=plan, status=1)
    assert states(content) == {"tests": "failed (3)"}


def test_a_failure_costs_the_other_parts_nothing(gpu):
    plan = "--shapes gpu|exit 3\n--shapes short|kill -9 $$\n"
    done, content, _ = gpu("timing", "--parts", "build main short sweep", plan=plan, status=1)
    assert states(content) == {"build": "ok", "main": "failed (3)", "short": "out of time", "sweep": "ok"}
    assert "| main" in done.stdout and "failed (3)" in done.stdout
    assert set(content["results"]) == {"main", "short", "sweep"}  # what was written before the failure counts


def test_peers_are_compiled_while_the_tests_run(gpu, folders):
    options, (fairseq, dynamic, jet) = folders
    done, content, calls = gpu("correctness", *options, plan="gpu_peers|echo compiled\n")
    assert list(states(content))[-1] == "peers" and states(content)["peers"] == "ok" and "compiled" in done.stdout
    (prepared,) = [call for call in calls if "gpu_peers" in call]
    assert f"--fairseq-source {fairseq} --dynamic-conv1d {dynamic} --jet-nemotron {jet}" in prepared
    done, content, _ = gpu(
        "correctness", "--parts", "tests peers", *options, plan="gpu_peers|echo no nvcc; exit 1\n", status=1
    )
    assert "no nvcc" in done.stdout
    assert states(content) == {"tests": "ok", "peers": "failed (1)"}


def test_a_peer_that_fails_costs_itself_only(gpu, folders):
    options, (fairseq, dynamic, jet) = folders
    plan = "--dynamic-conv1d|kill -9 $$\n--fairseq-source|exit 1\n"
    _, content, calls = gpu("timing", "--parts", " ".join(["short", *PEERS, "half"]), *options, plan=plan, status=1)
    failed = {"dynamic_conv1d": "out of time", "jet_nemotron": "ok", "fairseq": "failed (1)"}
    assert states(content) == {"short": "ok", "half": "ok"} | failed
    named = zip((fairseq, dynamic, jet), ("fairseq", "dynamic_conv1d", "jet_nemotron"), strict=True)
    for (folder, name), option in zip(named, options[::2], strict=True):
        (call,) = [call for call in calls if f"{option} {folder}" in call]
        assert f"/{name}.json " in call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["everything"], 'the first argument must be correctness or timing, got "everything"'),
        (["timing", "--frobnicate"], "unknown argument --frobnicate"),
        (["timing", "--parts"], "--parts needs a value"),
        (["correctness", "--parts", "build main"], "--parts: main is none of: build tests"),
        (["timing", "--jet-nemotron", "/nowhere"], "/nowhere is not a folder"),
    ],
)
def test_wrong_arguments(gpu, arguments, message):
    done, content, calls = gpu(*arguments, status=2)
    assert message in done.stderr and content is None and not calls


def test_no_gpu(repository, tmp_path):
    program = tmp_path / "python3"
    program.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    program.chmod(0o755)
    command = (repository / "benchmarks/gpu.sh", "timing", "--out", tmp_path / "out")
    done = programs.run(*command, status=2, PYTHON=program)
    assert "torch finds no CUDA device here" in done.stderr


@pytest.mark.parametrize("arguments", [["--frobnicate"], ["--out"], ["--quick"]])
def test_wrong_arguments_of_the_cpus_script(repository, arguments):
    done = programs.run(repository / "benchmarks/cpu.sh", *arguments, status=1)
    assert arguments[0] in done.stderr


@pytest.mark.parametrize("name", ["cpu.sh", "gpu.sh", "gpu_fairseq.sh", "wheels.sh"])
def test_help(repository, name):
    done = programs.run(repository / "benchmarks" / name, "--help")
    assert f"benchmarks/{name} " in done.stdout


def test_a_share_of_the_tests(repository):
    """Two processes together run every test once."""

    def collected(share):
        options = ("--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu/test_torch.py")
        # Plugins of other packages take longer than the rest.
        environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": 1, "LIGHTCONV_TEST_SHARE": share or None}
        done = programs.run(warm_python(), "-m", "pytest", *options, cwd=repository, status=None, **environment)
        return [line for line in done.stdout.splitlines() if "::" in line], done

    everything, _ = collected("")
    halves = [collected(share)[0] for share in ("0/2", "1/2")]
    assert sorted([*halves[0], *halves[1]]) == sorted(everything) and min(map(len, halves)) > 10
    assert "LIGHTCONV_TEST_SHARE must be NUMBER/COUNT" in (wrong := collected("2/2")[1]).stderr + wrong.stdout
