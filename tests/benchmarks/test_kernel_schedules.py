"""benchmarks.kernel_schedules: equal sums, the halving, resuming, and a real training."""

import json
import re
from collections import Counter

import pytest

pytest.importorskip("fairseq")

from benchmarks import kernel_schedules, report
from tests.fairseq_cli import binarise

RISING = ((3, 7, 15, 31), (3, 7, 15, 31))


def test_all_schedules_have_the_sums_of_the_first():
    found = kernel_schedules.schedules(RISING, 60, 1)
    assert found[:3] == [RISING, ((31, 15, 7, 3),) * 2, ((13, 13, 15, 15),) * 2]
    assert len(set(found)) == 60 and found[:20] == kernel_schedules.schedules(RISING, 20, 1)
    assert found != kernel_schedules.schedules(RISING, 60, 2)
    for sizes in (sizes for schedule in found for sizes in schedule):
        assert sum(sizes) == 56 and all(size % 2 and 3 <= size <= 31 for size in sizes)
    drawn = [len({*schedule}) for schedule in found[3:]]
    assert 15 < drawn.count(1) < 45, "about half have the same sizes on both sides"
    assert len({size for schedule in found for sizes in schedule for size in sizes}) > 10


def test_sides_of_their_own():
    first = ((3, 5), (7, 9, 31))
    for encoder, decoder in kernel_schedules.schedules(first, 4, 1):
        assert (len(encoder), sum(encoder), len(decoder), sum(decoder)) == (2, 8, 3, 47)


class Loss(kernel_schedules.Trial):
    """A training whose loss is known."""

    def __init__(self, name, loss, trained):
        self.schedule, self.losses, self.loss, self.trained = ((name,), (name,)), {}, loss, trained

    def train(self, updates):
        self.trained.append((self.name, updates))
        self.losses[updates] = self.loss - updates / 1000


def test_the_better_half_goes_on_to_the_end(capsys):
    trained = []
    trials = [Loss(name, loss, trained) for name, loss in enumerate((5.0, 4.0, 7.0, 3.0, 6.0))]
    kernel_schedules.halve(trials, 100, 450)
    assert trained == [*((str(n), 100) for n in range(5)), ("3", 450), ("1", 450)]
    trained.clear()
    kernel_schedules.halve([Loss(n, n, trained) for n in range(9)], 100, 450)
    assert Counter(updates for _, updates in trained) == {100: 9, 200: 4, 450: 2}
    assert "3: update 450, validation loss 2.550" in capsys.readouterr().out
    order = [trial.name for trial in kernel_schedules.by_loss(trials)]
    assert order == ["3", "1", "0", "4", "2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return binarise(tmp_path_factory.mktemp("data"))


def search(data, folder, *others):
    file = folder.parent / "found.json"
    arguments = ["smoke/dynamicconv", "--data", data, "--folder", folder, "--json", file, *others]
    status = report.run(lambda: kernel_schedules.main([str(argument) for argument in arguments]))
    return status, json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def test_a_training_is_real_and_not_repeated(data, tmp_path, capsys, monkeypatch):
    options = (
        "--schedules",
        1,
        "--updates",
        60,
        "--seed",
        3,
        "--",
        "common.cpu=true",
        "model.share_all_embeddings=false",
    )
    status, content = search(data, tmp_path / "kept", *options)
    said = capsys.readouterr()
    assert status == 0, said.err
    [only] = content["schedules"]
    assert (only["encoder"], only["decoder"]) == ([3, 7], [3, 7])
    loss = only["valid_loss"]["60"]
    assert 0 < loss < 10 and f"3,7: update 60, validation loss {loss:.3f}" in said.out
    records = (tmp_path / "kept/3_7-3_7/records.jsonl").read_text(encoding="utf-8")
    assert re.search(r'"seed": 3\b', records)
    monkeypatch.setattr(kernel_schedules.sys, "executable", "/bin/false")  # nothing can be trained any more
    status, again = search(data, tmp_path / "kept", *options)
    assert status == 0 and again["schedules"] == content["schedules"]
    other = [4 if option == 3 else option for option in options]
    assert search(data, tmp_path / "kept", *other)[0] == 2, "the training of another seed is not taken for this one"
    assert "3_7-3_7 was trained by another command" in capsys.readouterr().err


@pytest.mark.parametrize(
    "others, said",
    [
        (("--schedules", 99, "--updates", 60), "--schedules: only 9 schedules have the sizes' sums, got 99"),
        (("--updates", 61), "--updates 61 is more than the 60 of smoke/dynamicconv"),
        (("--schedules", 1, "--updates", 60), "3,7: training failed (1):\n"),
    ],
)
def test_what_is_wrong_is_said(data, tmp_path, capsys, monkeypatch, others, said):
    monkeypatch.setattr(kernel_schedules.sys, "executable", "/bin/false")
    status, content = search(data, tmp_path / "kept", *others)
    assert status == 2 and content is None
    assert said in capsys.readouterr().err


def test_configurations_without_odd_sizes_of_their_own_are_refused(data, tmp_path, capsys):
    for name, said in (
        (
            "multi30k_en_de/transformer",
            "must have an odd encoder_kernel_size_list entry of at least 3 for each layer, got []",
        ),
        ("no/such", "there is no configuration no/such: "),
    ):
        arguments = [name, "--data", str(data), "--folder", str(tmp_path)]
        assert report.run(lambda arguments=arguments: kernel_schedules.main(arguments)) == 2
        assert said in capsys.readouterr().err
