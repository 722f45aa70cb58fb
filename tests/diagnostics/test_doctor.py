"""`lightconv doctor`: a good installation, one without fairseq, and each problem that it finds."""

import json
import re
import sys
from importlib import metadata

import pytest
import torch

from lightconv_plugin.cli import main
from lightconv_plugin.diagnostics import checks, selfcheck
from lightconv_plugin.modules import products
from lightconv_plugin.ops import backends
from lightconv_plugin.ops.artifacts import NativeError
from tests import programs
from tests.diagnostics.findings import statuses

WITHOUT_FAIRSEQ = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "fairseq" or name.startswith("fairseq."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


# ------------------------------------------------------------------------------------------------ as a user runs it


def test_everything_works_with_fairseq(repository, capsys):
    pytest.importorskip("fairseq")
    assert main.main(["doctor", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    said = json.loads(out)
    assert said["ok"] is True
    assert said["plugin"] == str(repository / "lightconv_plugin")
    assert said["versions"]["torch"] == metadata.version("torch")
    assert said["torch"]["devices"] == [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    assert said["backends"]["cpu"]["backend"] == "cpu"
    assert said["backends"]["cpu"]["library"].endswith("lightconv_cpu.so") and said["backends"]["cpu"]["built"]
    assert set(said["against_reference"]) == set(said["self_check"])
    assert all(0 <= error < 5e-2 for error in said["against_reference"].values())
    assert said["fairseq"]["available"] is True
    assert {"dynamicconv", "lightweightconv", "dynamicconv_wmt_en_de_big"} <= set(said["fairseq"]["architectures"])
    assert "processes_without_gpu" in dict(said["fairseq"]["patches"])
    assert all(len(patch) == 2 and all(patch) for patch in said["fairseq"]["patches"])
    errors = said["self_check"]
    assert {"lightconv on cpu, float32", "dynamicconv on cpu, bfloat16"} <= errors.keys()
    assert all(0 <= error < 1e-5 for name, error in errors.items() if name.endswith("float32"))
    names = [finding["name"] for finding in said["findings"] if finding["status"] == "ok"]
    assert {"fairseq", "models", "model self-check", *errors} <= set(names)


def test_one_line_per_area_and_the_rest_with_verbose(capsys):
    pytest.importorskip("fairseq")
    assert main.main(["doctor"]) == 0
    brief = capsys.readouterr().out.splitlines()
    areas = [line.split(":")[0].split(maxsplit=1)[1] for line in brief if line.startswith(("ok", "info"))]
    assert areas == [
        *("python", "plugin", "torch", "compilers", "memory", "disk", "backend for cpu tensors", "allocator"),
        "operators on cpu",
        *("fairseq", "patches", "models", "model self-check"),
    ]
    assert brief[-1].startswith("everything works")
    assert main.main(["doctor", "--verbose"]) == 0
    verbose = capsys.readouterr().out.splitlines()
    assert {line.split(":")[0] for line in brief} < {line.split(":")[0] for line in verbose}
    patches = int(next(line for line in brief if "patches: " in line).split()[2])
    assert sum(line.startswith("info     patch ") for line in verbose) == patches > 0
    assert any(line.startswith("ok       lightconv on cpu, float32: forward, backward and step") for line in verbose)
    assert any("architectures: " in line and "dynamicconv_wmt_en_de_big" in line for line in verbose)


def test_in_a_process_that_cannot_import_fairseq(repository, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_FAIRSEQ)
    environment = {"OMP_NUM_THREADS": 1, "PYTHONPATH": tmp_path}
    done = programs.run(sys.executable, "-m", "lightconv_plugin", "doctor", cwd=repository, **environment)
    assert "warning  fairseq: not installed: the operators work, the models are not available\n" in done.stdout
    assert "pip install '.[fairseq]' in a checkout of lightconv-plugin" in done.stdout
    assert "everything works, with " in done.stdout.splitlines()[-1]
    assert "model self-check" not in done.stdout


def test_without_fairseq_the_operators_are_fine(no_fairseq, capsys):
    assert main.main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is True
    assert said["fairseq"] == {"available": False}
    assert len(said["self_check"]) >= 4


def test_what_is_wrong_has_a_remedy_and_status_1(no_fairseq, monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(backends, "_decided", {})
    monkeypatch.setenv("LIGHTCONV_BACKEND", "cuda")
    assert main.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "failure  backend for cuda tensors: LIGHTCONV_BACKEND=cuda: the CUDA kernels cannot be used" in out
    assert "         -> correct or unset LIGHTCONV_BACKEND\n" in out
    assert out.endswith("something is wrong: see the lines marked failure\n")


# ------------------------------------------------------------------------------------------------ backends


def decided(monkeypatch, **values):
    monkeypatch.setattr(backends, "_decided", {"cpu": backends.Decision(**values)})
    return checks.examine()


def test_the_backend_in_use_is_told(no_fairseq, monkeypatch, tmp_path):
    about = {"built": "2026-01-02", "capability": "AVX2", "seconds": 20, "flags": ["-O3", "-x"]}
    (tmp_path / "build.json").write_text(json.dumps(about))
    report = decided(monkeypatch, backend="cpu", library=tmp_path / "a.so")
    detail = statuses(report, checks.OK)["backend for cpu tensors"].detail
    assert detail == f"cpu, compiled 2026-01-02 for AVX2 in 20 s: {tmp_path}/a.so"
    assert statuses(report, checks.INFO)["flags of the cpu kernels"].detail == "-O3 -x"
    assert report.values["backends"]["cpu"] == {"backend": "cpu", "library": f"{tmp_path}/a.so", **about}


@pytest.mark.parametrize("remedy", ["apt install g++", ""])
def test_kernels_for_fewer_instructions_are_a_warning(no_fairseq, monkeypatch, tmp_path, remedy):
    error = NativeError("cannot load b.so: invalid ELF header; nor compile it: no C++ compiler", remedy)
    report = decided(monkeypatch, backend="cpu", library=tmp_path / "a.so", error=error)
    finding = statuses(report, checks.WARNING)["backend for cpu tensors"]
    assert finding.detail.startswith("cpu, compiled ") and finding.remedy == (remedy or checks.REPORT_IT) and report.ok
    assert finding.detail.endswith(f"{tmp_path}/a.so; those for this CPU, which are faster, fail: {error.cause}")


def test_a_reference_that_was_asked_for_is_fine(no_fairseq, monkeypatch):
    report = decided(monkeypatch, backend="reference", reason="LIGHTCONV_BACKEND=reference")
    assert report.ok and report.values["backends"]["cpu"] == {"backend": "reference"}
    assert "LIGHTCONV_BACKEND=reference" in statuses(report, checks.INFO)["backend for cpu tensors"].detail
    assert report.values["against_reference"] == {}


def test_a_missing_compiler_is_a_warning_with_a_remedy(no_fairseq, monkeypatch):
    error = NativeError("no C++ compiler was found", "apt install g++")
    report = decided(monkeypatch, backend="reference", reason="r", error=error)
    finding = statuses(report, checks.WARNING)["backend for cpu tensors"]
    assert finding.detail == "reference: no C++ compiler was found" and finding.remedy == "apt install g++"
    assert report.ok


def test_kernels_that_do_not_compile_are_a_failure(no_fairseq, monkeypatch, tmp_path):
    error = NativeError("a.cpp:1: error: x", log=tmp_path / "log")
    report = decided(monkeypatch, backend="reference", reason="r", error=error)
    finding = statuses(report, checks.FAILURE)["backend for cpu tensors"]
    assert finding.detail == f"reference: a.cpp:1: error: x (log: {tmp_path}/log)"
    assert finding.remedy == checks.REPORT_IT
    assert "lightconv on cpu, float32" in report.values["self_check"]


@pytest.mark.parametrize(
    ("value", "said"), [("rubbish", "must be one of auto, cpu, cuda, reference"), ("cuda", "sees no CUDA device")]
)
def test_a_backend_that_cannot_be_had(value, said, monkeypatch):
    if value == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(backends, "_decided", {})
    monkeypatch.setenv("LIGHTCONV_BACKEND", value)
    report = checks.examine()
    failures = statuses(report, checks.FAILURE)
    (finding,) = failures.values()  # and nothing follows from it
    assert said in finding.detail and finding.remedy == "correct or unset LIGHTCONV_BACKEND"
    assert report.values["self_check"] == {}


@pytest.mark.parametrize(
    "name, value, checked",
    [
        ("LIGHTCONV_CPU_ISA", "avx1", False),
        ("LIGHTCONV_KEEP_MALLOC", "yes", False),
        ("LIGHTCONV_PRODUCTS", "mkl", True),
    ],
)
def test_a_mistyped_variable_is_to_be_corrected(name, value, checked, no_fairseq, monkeypatch):
    monkeypatch.setattr(backends, "_decided", {})
    monkeypatch.setattr(products, "onednn_is_faster", products.onednn_is_faster.__wrapped__)
    monkeypatch.setenv(name, value)
    report = checks.examine()
    failures = statuses(report, checks.FAILURE).values()
    assert failures and {finding.remedy for finding in failures} == {f"correct or unset {name}"}
    assert bool(report.values["self_check"]) == checked  # the operators need all variables but that of linear layers


def test_a_patch_that_does_not_exist_is_no_missing_fairseq(monkeypatch):
    compat = pytest.importorskip("lightconv_plugin.compat")
    monkeypatch.setenv("LIGHTCONV_SKIP_PATCHES", "rubbish")
    monkeypatch.setattr(checks, "_patches", lambda report: compat.apply())
    finding = statuses(checks.examine(), checks.FAILURE)["fairseq"]
    assert "there is no patch rubbish" in finding.detail and finding.remedy == "correct or unset LIGHTCONV_SKIP_PATCHES"


# ------------------------------------------------------------------------------------------------ fairseq, models


def test_fairseq_that_does_not_import_is_a_failure(monkeypatch):
    """As 0.12.2 under Python 3.11."""

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "fairseq":
                raise ValueError("mutable default for field common is not allowed")

    monkeypatch.delitem(sys.modules, "fairseq", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    report = checks.examine()
    finding = statuses(report, checks.FAILURE)["fairseq"]
    assert "ValueError: mutable default for field common" in finding.detail
    assert ("fairseq-fixed==0.12.3.1" if sys.version_info >= (3, 11) else "fairseq==0.12.2") in finding.remedy
    assert report.values["fairseq"] == {"available": False}
    assert "lightconv on cpu, float32" in statuses(report, checks.OK)


def test_a_missing_dependency_of_fairseq_is_not_a_missing_fairseq(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "fairseq":
                raise ModuleNotFoundError("No module named 'omegaconf'", name="omegaconf")

    monkeypatch.delitem(sys.modules, "fairseq", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert "omegaconf" in statuses(checks.examine(), checks.FAILURE)["fairseq"].detail


def install(folder, name):
    """What pip leaves of a distribution with the package fairseq."""
    about = folder / f"{name.replace('-', '_')}-0.12.4.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.12.4\n")
    (about / "top_level.txt").write_text("fairseq\nfairseq_cli\n")


def test_two_fairseqs_are_a_failure(no_fairseq, tmp_path, monkeypatch):
    """Whatever they are called: each installs the package fairseq over the other's."""
    for name in ("fairseq-built", "ve-fairseq"):
        install(tmp_path, name)
    monkeypatch.setattr(metadata, "packages_distributions", metadata.packages_distributions.__wrapped__)
    monkeypatch.syspath_prepend(tmp_path)
    report = checks.examine()
    finding = statuses(report, checks.FAILURE)["fairseq"]
    assert "fairseq-built 0.12.4 and " in finding.detail and "ve-fairseq 0.12.4 are installed and o" in finding.detail
    assert re.match("pip uninstall (fairseq )?fairseq-built (fairseq-fixed )?ve-fairseq, then pip ", finding.remedy)
    assert report.values["versions"]["ve-fairseq"] == "0.12.4"


def test_a_fairseq_of_another_name_is_a_warning(tmp_path, monkeypatch):
    pytest.importorskip("fairseq")
    install(tmp_path, "ve-fairseq")
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"fairseq": ["ve-fairseq"]})
    monkeypatch.syspath_prepend(tmp_path)
    report = checks.examine()
    assert statuses(report, checks.OK)["fairseq"].detail.startswith("ve-fairseq 0.12.4 (")
    finding = statuses(report, checks.WARNING)["fairseq distribution"]
    assert finding.detail == "the plugin is not tested with ve-fairseq 0.12.4"
    assert "pip uninstall ve-fairseq, then pip install fairseq" in finding.remedy and report.ok


def test_models_that_are_not_registered_are_a_failure(monkeypatch):
    models = pytest.importorskip("fairseq.models")
    others = {name: model for name, model in models.ARCH_MODEL_REGISTRY.items() if "conv" not in name}
    monkeypatch.setattr(models, "ARCH_MODEL_REGISTRY", others)
    finding = statuses(checks.examine(), checks.FAILURE)["models"]
    assert "not registered by this plugin: lightweightconv, dynamicconv, talkconv" in finding.detail


@pytest.mark.parametrize("error", [0.5, float("nan"), float("inf")], ids=str)
def test_a_model_that_decodes_wrongly_is_a_failure(error, monkeypatch):
    pytest.importorskip("fairseq")
    monkeypatch.setattr(selfcheck, "decoding_error", lambda device: error)
    assert "model self-check" in statuses(checks.examine(), checks.FAILURE)


def test_patches_that_are_left_out_are_a_warning(monkeypatch):
    pytest.importorskip("fairseq")
    monkeypatch.setenv("LIGHTCONV_SKIP_PATCHES", "E")
    report = checks.examine()
    assert statuses(report, checks.WARNING)["skipped patches"].detail == "E"
    assert report.ok


# ------------------------------------------------------------------------------------------------ what is installed


@pytest.mark.parametrize("version, ok", [("2.5.1+cu124", False), ("1.13.1", False), ("2.6.0", True), ("2.13.0", True)])
def test_an_old_torch_is_a_failure(version, ok, no_fairseq, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    report = checks.examine()
    assert report.ok == ok
    assert ("torch" in statuses(report, checks.FAILURE)) == (not ok)


@pytest.mark.parametrize("name", ["sacrebleu", "sacremoses", "sentencepiece", "subword-nmt"])
def test_a_missing_package_is_a_warning(name, no_fairseq, monkeypatch):
    found = metadata.version

    def version(asked):
        if asked == name:
            raise metadata.PackageNotFoundError(asked)
        return found(asked)

    monkeypatch.setattr(metadata, "version", version)
    report = checks.examine()
    assert statuses(report, checks.WARNING)[name].remedy == f"pip install {name}"
    assert report.ok
    assert name not in report.values["versions"]


def test_compilers_are_listed_and_not_required(no_fairseq, monkeypatch, tmp_path):
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'nvcc: NVIDIA (R)'\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    silent = tmp_path / "g++"
    silent.write_text("#!/bin/sh\nexit 3\n")
    compiler.chmod(0o755)
    silent.chmod(0o755)
    foreign = tmp_path / "ninja"  # of another architecture
    foreign.write_bytes(b"\x7fELFgarbage")
    foreign.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    report = checks.examine()
    assert report.values["compilers"] == {
        "g++": f"{silent} (no answer to --version)",
        "nvcc": f"{compiler} (Cuda compilation tools, release 13.0, V13.0.88)",
        "ninja": f"{foreign} (cannot be run: Exec format error)",
    }
    foreign.unlink()
    report = checks.examine()
    assert report.values["compilers"]["ninja"] is None
    assert statuses(report, checks.INFO)["ninja"].detail == "not on PATH"
    assert report.ok
