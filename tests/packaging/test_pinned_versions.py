"""The versions in scripts/constraints.txt, which scripts/setup.sh installs."""

import itertools

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read pyproject.toml")


def for_python(lines, python):
    requirements = (Requirement(line) for line in lines if line and not line.startswith("#"))
    environment = {"python_version": python, "python_full_version": f"{python}.1", "extra": ""}
    return [r for r in requirements if r.marker is None or r.marker.evaluate(environment)]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_the_project_allows_them(repository, python):
    """Otherwise pip finds no versions that fit both, as it once was on Python 3.10."""
    lines = (repository / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonicalize_name(r.name): next(iter(r.specifier)).version for r in for_python(lines, python)}
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    checked = [r for r in for_python(needed, python) if canonicalize_name(r.name) in pinned]
    assert len(checked) > 20
    for requirement in checked:
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} but {version} is pinned"
