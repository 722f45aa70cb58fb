"""Checks what is installed, what the plugin found and patched, and whether its results are correct on this machine.

Every finding is one line; a problem has a remedy. A missing fairseq is not a failure: the operators work without it.
"""

import importlib.util
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata

from lightconv_plugin import allocator
from lightconv_plugin.diagnostics import machine
from lightconv_plugin.errors import how_to_get
from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.paths import package_dir

OLDEST_TORCH = (2, 6)
DISTRIBUTIONS = (
    "lightconv-plugin", "torch", "numpy", "hydra-core", "omegaconf",
    "sacrebleu", "sacremoses", "sentencepiece", "subword-nmt", "ninja",
)  # fmt: skip
OPTIONAL = {
    "sacrebleu": "lightconv score needs it",
    "sacremoses": "lightconv score and data preparation need it",
    "sentencepiece": "data preparation with sentencepiece needs it",
    "subword-nmt": "data preparation with BPE needs it",
}
TESTED_FAIRSEQS = ("fairseq", "fairseq-fixed")
FAMILIES = [mixer.family for mixer in MIXERS.values() if mixer.paper and mixer.family]
REPORT_IT = "please report this with the output of lightconv doctor --json"
_PRODUCTS = "float32 products of linear layers"
OK, INFO, WARNING, FAILURE = "ok", "info", "warning", "failure"


@dataclass(frozen=True)
class Finding:
    """One line of the report: status is ok, info, warning or failure; the last two are problems, with a remedy.

    detail_only: omitted from the short report with one line per area, unless it is a problem.
    """

    status: str
    name: str
    detail: str
    remedy: str = ""
    detail_only: bool = False

    @property
    def problem(self) -> bool:
        return self.status in (WARNING, FAILURE)


@dataclass
class DoctorReport:
    """All findings; `values` holds the machine-readable part, in which an infinite error is None."""

    findings: list[Finding] = field(default_factory=list)
    values: dict = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(finding.status != FAILURE for finding in self.findings)

    def add(self, status: str, name: str, detail: str, remedy: str = "", detail_only: bool = False) -> None:
        self.findings.append(Finding(status, name, detail, remedy, detail_only))

    def attempt(self, name: str, remedy: str, check: Callable[..., None], *args) -> None:
        """Run `check(self, *args)`. An exception becomes a failure with this name; the other checks still run."""
        try:
            check(self, *args)
        except Exception as error:
            said = " ".join(str(error).split())
            self.add(FAILURE, name, f"{type(error).__name__}: {said}", _remedy(said, remedy))

    def lines(self, verbose: bool = True) -> str:
        """The findings and the verdict; without `verbose`, one line per area and every problem."""
        rows = []
        for finding in self.findings:
            if verbose or finding.problem or not finding.detail_only:
                rows.append(f"{finding.status:8} {finding.name}: {finding.detail}")
                if finding.remedy:
                    rows.append(f"{'':8} -> {finding.remedy}")
        warnings = sum(finding.status == WARNING for finding in self.findings)
        if not self.ok:
            rows.append("something is wrong: see the lines marked failure")
        else:
            rows.append(f"everything works{f', with {warnings} warning' + 's' * (warnings > 1) if warnings else ''}")
        return "\n".join(rows)

    def json(self) -> str:
        return json.dumps(
            {"ok": self.ok, **self.values, "findings": [asdict(finding) for finding in self.findings]},
            ensure_ascii=False,
            allow_nan=False,
        )


def _remedy(message: str, otherwise: str) -> str:
    """What to do about an error: change the variable of the environment that its message names, or else `otherwise`."""
    named = [name for name in re.findall("LIGHTCONV_[A-Z_]+", message) if os.environ.get(name)]
    return f"correct or unset {named[0]}" if named else otherwise


def fairseqs() -> dict[str, str]:
    """The versions of the installed distributions that own the package fairseq, by name.

    Besides fairseq and fairseq-fixed there are fairseq-built, ve-fairseq and others; pip installs one over another.
    """
    owners = {*metadata.packages_distributions().get("fairseq", ())}
    return {name: metadata.version(name) for name in sorted(filter(None, owners))}


def installed() -> dict[str, str]:
    """The versions of those DISTRIBUTIONS that are installed, by name."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def examine() -> DoctorReport:
    """Run all checks."""
    report = DoctorReport()
    distributions = fairseqs()
    versions = installed() | distributions
    report.values["versions"] = {"python": platform.python_version(), **versions}
    report.add(INFO, "python", f"{platform.python_version()} ({sys.executable})")
    report.add(INFO, "plugin", f"{versions.get('lightconv-plugin', 'not installed')}, loaded from {package_dir()}")
    report.values["plugin"] = str(package_dir())
    report.attempt("torch", "install a working torch: pip install 'torch>=2.6'", _torch)
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    report.add(INFO, "packages", packages, detail_only=True)
    for name, use in OPTIONAL.items():
        if name not in versions:
            report.add(WARNING, name, f"not installed: {use}", f"pip install {name}")
    _compilers(report)
    report.attempt("machine", REPORT_IT, _machine)
    report.values |= {"backends": {}, "self_check": {}, "against_reference": {}}
    if importlib.util.find_spec("torch") is not None:
        report.attempt("operators", REPORT_IT, _operators)
    report.attempt("fairseq", f"install the one for this Python: {_fairseq_for_this_python()}", _fairseq, distributions)
    return report


def _torch(report: DoctorReport) -> None:
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    report.values["torch"] = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices}
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    report.add(INFO, "torch", f"{torch.__version__}, built {built}; GPUs: {', '.join(devices) or 'none'}")
    number = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if number < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        report.add(FAILURE, "torch", f"{torch.__version__} is too old", f"pip install 'torch>={oldest}'")


def _compilers(report: DoctorReport) -> None:
    """The compilers, which are only needed for kernels that are not compiled yet."""
    compilers: dict[str, str | None] = {}
    for name in ("g++", "nvcc", "ninja"):
        path = shutil.which(name)
        compilers[name] = None
        if path:
            compilers[name] = f"{path} ({_release(path)})"
        report.add(INFO, name, compilers[name] or "not on PATH", detail_only=True)
    report.add(INFO, "compilers", ", ".join(name for name, path in compilers.items() if path) or "none on PATH")
    report.values["compilers"] = compilers


def _release(path: str) -> str:
    """What a compiler says about its version, or why it cannot be run."""
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"cannot be run: {getattr(error, 'strerror', None) or error}"
    said = answer.stdout.strip().splitlines()
    release = [line for line in said if "release" in line] or said[:1] or ["no answer to --version"]
    return release[0].strip()


def _machine(report: DoctorReport) -> None:
    """GPUs that torch cannot use; too little memory or disk space for kernels that are not compiled yet."""
    memory = machine.available_memory()
    if memory is not None:
        report.add(INFO, "memory", f"{memory / (1 << 30):.1f} GiB available")
    if importlib.util.find_spec("torch") is None:
        return
    from lightconv_plugin.ops import artifacts

    if (problem := machine.gpu_problem()) is not None:
        report.add(WARNING, "GPUs", *problem)
    cache = artifacts.cache_folder()
    free, writable = machine.room(cache)
    report.add(INFO, "disk", f"{free / (1 << 30):.1f} GiB free for compiled kernels at {cache}")
    if artifacts.find("cpu") is not None:
        return
    if not writable:
        report.add(WARNING, "kernel cache", f"{cache} is not writable", "set TORCH_EXTENSIONS_DIR")
    elif free < machine.CACHE_ROOM:
        short = f"{free >> 20} MiB free at {cache}, compilation needs {machine.CACHE_ROOM >> 20}"
        report.add(WARNING, "kernel cache", short, "free disk space, or set TORCH_EXTENSIONS_DIR")
    if memory is not None and memory < machine.COMPILER_MEMORY:
        short = f"{memory >> 20} MiB available, compilation needs {machine.COMPILER_MEMORY >> 20}"
        report.add(WARNING, "memory", short, "end other programs, or compile one file at a time: MAX_JOBS=1")


def _fairseq_for_this_python() -> str:
    """The fairseq for this Python: Python 3.10 can import 0.12.2, Python 3.11 cannot."""
    return "fairseq==0.12.2" if sys.version_info < (3, 11) else "fairseq-fixed==0.12.3.1"


def _fairseq(report: DoctorReport, distributions: dict[str, str]) -> None:
    report.values["fairseq"] = {"available": False}
    right = _fairseq_for_this_python()
    named = " and ".join(f"{name} {version}" for name, version in distributions.items())
    if len(distributions) > 1:
        report.add(
            FAILURE,
            "fairseq",
            f"{named} are installed and overwrite each other",
            f"pip uninstall {' '.join(distributions)}, then pip install {right}",
        )
    try:
        import fairseq
    except ModuleNotFoundError as error:
        if error.name != "fairseq":
            raise
        report.add(
            WARNING,
            "fairseq",
            "not installed: the operators work, the models are not available",
            f"{how_to_get('fairseq')} ({right} for this Python), or scripts/setup.sh there",
        )
        return
    report.add(OK, "fairseq", f"{named or fairseq.__version__} ({os.path.dirname(fairseq.__file__)})")
    others = [name for name in distributions if name not in TESTED_FAIRSEQS]
    if len(distributions) == len(others) == 1:
        report.add(
            WARNING,
            "fairseq distribution",
            f"the plugin is not tested with {named}",
            f"if something fails, pip uninstall {others[0]}, then pip install {right}; "
            "the extra [fairseq] of lightconv-plugin would overwrite it",
        )
    _patches(report)
    _models(report)


def _patches(report: DoctorReport) -> None:
    from lightconv_plugin import compat

    applied = compat.applied()
    patches = [[patch.name, patch.reason] for patch in applied]
    report.values["fairseq"] = {"available": True, "patches": patches, "architectures": []}
    report.add(INFO, "patches", f"{len(applied)} applied to fairseq")
    for patch in applied:
        report.add(INFO, f"patch {patch.name}", f"{patch.reason} Versions: {patch.versions}.", detail_only=True)
    if skipped := os.environ.get("LIGHTCONV_SKIP_PATCHES"):
        report.add(WARNING, "skipped patches", skipped, "unset LIGHTCONV_SKIP_PATCHES")


def _models(report: DoctorReport) -> None:
    from fairseq import models

    names = sorted(
        name for name, model in models.ARCH_MODEL_REGISTRY.items() if model.__module__.startswith("lightconv_plugin.")
    )
    report.values["fairseq"]["architectures"] = names
    if missing := [family for family in FAMILIES if family not in names]:
        report.add(
            FAILURE,
            "models",
            f"not registered by this plugin: {', '.join(missing)}",
            "another plugin may have taken these names: remove it, or import lightconv_plugin first",
        )
        return
    report.add(OK, "models", f"{len(names)} architectures registered")
    report.add(INFO, "architectures", ", ".join(names), detail_only=True)
    for device in list(report.values["backends"])[:1]:
        report.attempt("model self-check", REPORT_IT, _decoding, device)


def _decoding(report: DoctorReport, device: str) -> None:
    from lightconv_plugin.diagnostics import selfcheck

    error, tolerance = selfcheck.decoding_error(device=device), 1e-5
    good = error <= tolerance
    report.add(
        OK if good else FAILURE,
        "model self-check",
        f"step-by-step decoding differs from the full pass by up to {error:.1e} (allowed: {tolerance:.0e})",
        "" if good else REPORT_IT,
    )


def _operators(report: DoctorReport) -> None:
    import torch

    from lightconv_plugin.diagnostics import selfcheck
    from lightconv_plugin.ops import artifacts

    forced = os.environ.get("LIGHTCONV_BACKEND")
    kinds = [forced] if forced in artifacts.KINDS else artifacts.KINDS if torch.cuda.is_available() else ["cpu"]
    for kind in kinds:
        if not _backend(report, kind):
            continue
        devices = ["cpu"] if kind == "cpu" else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        types = [torch.float32, torch.bfloat16] + ([torch.float16] if kind == "cuda" else [])
        before = len(report.findings)
        for device in devices:
            for name in selfcheck.OPERATORS:
                for dtype in types:
                    where = f"{name} on {device}, {str(dtype).removeprefix('torch.')}"
                    report.attempt(where, REPORT_IT, _operator, where, name, device, dtype)
        checked = report.findings[before:]
        if not any(finding.problem for finding in checked):
            names = ", ".join(selfcheck.OPERATORS)
            report.add(OK, f"operators on {kind}", f"{len(checked)} self-checks passed ({names})")


def _backend(report: DoctorReport, kind: str) -> bool:
    """Choose the backend for tensors of a kind, compiling it if necessary; returns whether there is one."""
    from lightconv_plugin.ops import artifacts, backends

    name = f"backend for {kind} tensors"
    try:
        decided = backends.decision(kind)
    except (RuntimeError, ValueError) as error:
        known = error.__cause__.remedy if isinstance(error.__cause__, artifacts.NativeError) else ""
        report.add(FAILURE, name, str(error), known or _remedy(str(error), REPORT_IT))
        return False
    report.values["backends"][kind] = {"backend": decided.backend}
    status, failed, remedy = OK, "", ""
    if decided.error is not None:
        # The operators work, only slowly. A problem that only the user can fix is not a failure of this installation.
        status = WARNING if decided.error.remedy or decided.library else FAILURE
        remedy = decided.error.remedy or REPORT_IT
        failed = decided.error.cause + (f" (log: {decided.error.log})" if decided.error.log else "")
    if decided.library is None:
        report.add(status if failed else INFO, name, f"reference: {failed or decided.reason}", remedy)
    else:
        about = artifacts.information(decided.library)
        report.values["backends"][kind] |= {"library": str(decided.library), **about}
        target = about.get("capability") or ";".join(about.get("architectures", []))
        built = f"compiled {about.get('built')} for {target} in {about.get('seconds')} s"
        slower = f"; those for this CPU, which are faster, fail: {failed}" if failed else ""
        report.add(status, name, f"{decided.backend}, {built}: {decided.library}{slower}", remedy)
        report.add(INFO, f"flags of the {kind} kernels", " ".join(about.get("flags", [])), detail_only=True)
        if kind == "cpu":
            report.add(INFO, "allocator", _allocator())
            report.attempt(_PRODUCTS, REPORT_IT, _products)
    return True


def _products(report: DoctorReport) -> None:
    from lightconv_plugin.modules import products

    library = "oneDNN" if products.onednn_is_faster() else "torch's own library"
    report.add(INFO, _PRODUCTS, f"by {library}", detail_only=True)


def _allocator() -> str:
    """The allocator of this process, and the one that a training on the CPU would use."""
    here = allocator.keep_freed_memory().why
    if allocator.preload():
        return f"{here}; `lightconv train` on a CPU preloads tcmalloc"
    advice = allocator.advice()
    return f"{here}; {advice}" if advice else here


def _operator(report: DoctorReport, where: str, name: str, device: str, dtype) -> None:
    import torch

    from lightconv_plugin.diagnostics import selfcheck
    from lightconv_plugin.ops import backends

    place, tolerance = torch.device(device), selfcheck.TOLERANCE[dtype]
    error = selfcheck.operator_error(name, place, dtype)
    report.values["self_check"][where] = error if math.isfinite(error) else None
    detail = f"forward, backward and step differ from float64 by up to {error:.1e}"
    good = error <= tolerance
    if backends.backend(place.type) != "reference":
        error = selfcheck.reference_error(name, place, dtype)
        report.values["against_reference"][where] = error if math.isfinite(error) else None
        detail += f", with all options from the reference by up to {error:.1e}"
        good = good and error <= tolerance
    detail += f" (allowed: {tolerance:.0e})"
    report.add(OK if good else FAILURE, where, detail, "" if good else REPORT_IT, detail_only=True)
