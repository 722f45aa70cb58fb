"""Limits of control groups, from files as the kernel's documentation describes them."""

import os
from types import SimpleNamespace

import pytest
import torch

from lightconv_plugin import cgroups
from lightconv_plugin.diagnostics import machine
from lightconv_plugin.generation import batch_search, native
from lightconv_plugin.generation.beam_search import SearchOptions
from lightconv_plugin.recipes.training import trial


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A function that writes the files of groups, and the line of this process."""
    monkeypatch.setattr(cgroups, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "_OWN", tmp_path / "own")

    def write(own, **files):
        (tmp_path / "own").write_text(own)
        for name, content in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return write


def test_version_2_has_the_least_of_all_groups_above(groups):
    groups(
        "0::/jobs/one\n",
        **{"jobs/one/cpu.max": "max 100000\n", "jobs/cpu.max": "250000 100000\n", "cpu.max": "6400000 100000\n"},
        **{"jobs/one/memory.max": "5000\n", "jobs/one/memory.current": "3000\n"},
        **{"jobs/one/memory.stat": "anon 2000\ninactive_file 700\n", "jobs/memory.max": "max\n"},
        **{"jobs/memory.current": "9000\n"},
    )
    assert (cgroups.cpu_limit(), cgroups.memory_limit(), cgroups.memory_left()) == (3, 5000, 2700)


def test_version_1(groups):
    groups(
        "4:memory:/docker/a\n2:cpu,cpuacct:/docker/a\n0::/\n",
        **{"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"},  # seen as the root
        **{"memory/docker/a/memory.limit_in_bytes": "4000\n", "memory/docker/a/memory.usage_in_bytes": "4500\n"},
        **{"memory/docker/a/memory.stat": "inactive_file 1\ntotal_inactive_file 200\n"},
        **{"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "1\n"},
        **{"memory/memory.stat": "\n"},
    )
    assert (cgroups.cpu_limit(), cgroups.memory_left()) == (1, 0)


@pytest.mark.parametrize(
    "own, files",
    [
        ("", {}),
        ("0::/\n", {}),
        ("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "1\n"}),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}),
    ],
    ids=["nothing", "no-files", "no-limit", "no-quota"],
)
def test_without_limits(groups, own, files):
    groups(own, **files)
    assert cgroups.cpu_limit() is None is cgroups.memory_left()
    assert cgroups.cores() == len(os.sched_getaffinity(0))


def test_limits_count_where_processors_and_memory_do(groups):
    groups(
        "0::/\n",
        **{"cpu.max": "1000 1000\n", "memory.max": "70\n", "memory.current": "30\n", "memory.stat": "anon 1\n"},
    )
    assert (cgroups.cores(), machine.available_memory()) == (1, 40)


def test_trials_of_batches_know_the_limit_of_memory(groups, tmp_path, monkeypatch):
    (tmp_path / "status").write_text("VmRSS:\t 2 kB\n", "ascii")
    monkeypatch.setattr(trial, "STATUS", tmp_path / "status")
    groups("0::/\n", **{"memory.max": "7000\n", "memory.current": "3000\n", "memory.stat": "anon 1\n"})
    host = trial.Host()
    assert host.size == 7000
    assert host.free() == 4000 + 2048


def test_the_search_has_no_more_threads_than_the_quota(groups, monkeypatch):
    """Unless their number is given."""
    groups("0::/\n", **{"cpu.max": "200000 100000\n"})
    used = []
    found = SimpleNamespace(add=lambda *a: None, search=lambda *arguments: used.append(arguments[-1]) or ([],) * 5)
    monkeypatch.setattr(torch, "classes", SimpleNamespace(lightconv=SimpleNamespace(BeamSearch=lambda *a: found)))
    monkeypatch.setattr(native, "in_fairseqs_format", lambda *a: a)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    for threads in (None, 5):
        search = native.NativeSearch([], SearchOptions(pad=1, unk=3, eos=2, threads=threads))
        search.search(torch.ones(1, 1), torch.ones(1), 3)
    assert used == [2, 5]


def test_nor_has_the_search_in_torch(groups, monkeypatch):
    groups("0::/\n", **{"cpu.max": "200000 100000\n"})
    used, before = [], torch.get_num_threads()

    def search(*_, **__):
        return SimpleNamespace(find=lambda: used.append(torch.get_num_threads()))

    monkeypatch.setattr(batch_search, "Search", search)
    torch.set_num_threads(4)
    try:
        for threads in (None, 3):
            options = SearchOptions(pad=1, unk=3, eos=2, threads=threads)
            batch_search.TorchSearch([], options).search(torch.ones(1, 1), torch.ones(1), 3)
        assert (used, torch.get_num_threads()) == ([2, 3], 4)
    finally:
        torch.set_num_threads(before)
