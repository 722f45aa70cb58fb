"""Pairs of the training text that are held out as validation or test text."""

import errno

import pytest

from lightconv_plugin.errors import CorpusError
from lightconv_plugin.recipes.data.pairs import PairWriter, hold_out
from tests.recipes.data.preparations import lines


def write_pairs(folder, pairs):
    paths = [folder / "train.a", folder / "train.b"]
    for side, path in enumerate(paths):
        path.write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
    return paths


def test_of_several_translations_the_first_is_held_out(tmp_path):
    """The published rows of Tatoeba depend on it: 5.5 % of its sources have several."""

    def held_out(pairs):
        train, test = ([tmp_path / f"{part}.{side}" for side in "st"] for part in ("train", "test"))
        for path, side in zip(train, zip(*pairs, strict=True), strict=True):
            path.write_text("".join(f"{line}\n" for line in side))
        hold_out(train, {"test": test}, {"test": 3}, 1)
        return list(zip(*(lines(path) for path in test), strict=True))

    pairs = [(f"source {i % 6}", f"target {i}") for i in range(18)]
    first, last = held_out(pairs), held_out(pairs[::-1])
    assert [source for source, _ in first] == [source for source, _ in last]
    assert set(first) <= set(pairs[:6]) and set(last) <= set(pairs[12:])


def test_the_seed_and_not_the_order_of_the_text_decides_what_is_held_out(tmp_path):
    pairs = [(f"s{i}", f"t{i}") for i in range(40)] + [("", "t"), ("s", " "), ("s1", "another t1")]
    found = []
    for order, seed in ((pairs, 7), (pairs[20:40] + pairs[:20] + pairs[40:], 7), (pairs, 8)):
        train = write_pairs(tmp_path, order)
        outputs = {split: [tmp_path / f"{split}.{side}" for side in "ab"] for split in ("valid", "test")}
        assert hold_out(train, outputs, {"valid": 3, "test": 30}, seed)[1] == 43
        found.append([path.read_text() for both in outputs.values() for path in both])
        assert not {"", " "} & set(lines(outputs["test"][0]) + lines(outputs["test"][1]))
    assert found[0] == found[1] != found[2]


def test_two_parts_share_no_sentence_even_in_other_letters(tmp_path):
    pairs = [pair for i in range(40) for pair in ((f"source {i}", f"a {i}"), (f"Source {i}", f"b {i}"))]
    pairs += [(f"x {i}", "One Target" if i % 2 else "one target") for i in range(10)]
    outputs = {split: [tmp_path / f"{split}.{side}" for side in "ab"] for split in ("valid", "test")}
    for seed in range(5):
        train = write_pairs(tmp_path, pairs)
        hold_out(train, outputs, {"valid": 15, "test": 15}, seed, (str.lower, str.lower))
        for side in (0, 1):
            valid, test, rest = (
                {line.lower() for line in lines(path)}
                for path in (outputs["valid"][side], outputs["test"][side], train[side])
            )
            assert not valid & test and not rest & (valid | test)
            assert side == 1 or len(valid) == len(test) == 15
        assert len(lines(outputs["test"][0])) == len(lines(outputs["valid"][0])) == 15


@pytest.mark.parametrize("size", [40, 41], ids=["nothing-left", "too-few"])
def test_more_held_out_than_there_is(tmp_path, size):
    train = write_pairs(tmp_path, [(f"s{i}", f"t{i}") for i in range(40)])
    outputs = {"test": [tmp_path / "test.a", tmp_path / "test.b"]}
    with pytest.raises(CorpusError, match=f"cannot hold out {size} pairs: the training text has 40"):
        hold_out(train, outputs, {"test": size}, seed=1)
    assert len(lines(train[0])) == 40 and len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_leaves_no_half_of_a_text(tmp_path, monkeypatch):
    train = write_pairs(tmp_path, [(f"s{i}", f"t{i}") for i in range(40)])

    def full(writer, pair):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PairWriter, "write", full)
    with pytest.raises(OSError, match="No space"):
        hold_out(train, {"test": [tmp_path / "test.a", tmp_path / "test.b"]}, {"test": 2}, seed=1)
    assert len(lines(train[0])) == 40 and len(list(tmp_path.iterdir())) == 2
