"""Which translation becomes training text: sentence BLEU, limits, repetitions."""

import random

import pytest
import sacrebleu

from lightconv_plugin.recipes.distillation.choosing import Limits, closest_by_bleu, repetitions


def test_the_closest_is_the_one_that_sacrebleu_scores_highest():
    rng = random.Random(5)
    words, closest, first = "a dog runs through the green grass and barks .".split(), closest_by_bleu(), 0
    for _ in range(50):
        reference = " ".join(rng.choices(words, k=rng.randint(1, 9)))
        candidates = [" ".join(rng.choices(words, k=rng.randint(0, 9))) for _ in range(5)]
        scores = [
            sacrebleu.sentence_bleu(candidate, [reference], tokenize="none", use_effective_order=True).score
            for candidate in candidates
        ]
        chosen = closest(candidates, reference)
        assert scores[chosen] == max(scores) and chosen == scores.index(max(scores))
        first += chosen == 0
    assert first < 25
    assert closest(["b a", "a b", "a b"], "a b") == 1


@pytest.mark.parametrize(
    ("text", "times"),
    [("", 1), ("a", 1), ("a b c", 1), ("a a", 2), ("a b c b c b c", 3), ("a a b b b c", 3), ("a b a b a", 2),
     ("x a b c d a b c d a b c d a b c d y", 4), ("a b a c a d", 1)],
)  # fmt: skip
def test_repetitions_in_a_row(text, times):
    assert repetitions(text.split()) == times


@pytest.mark.parametrize(
    ("source", "target", "problem"),
    [
        ("a b", "", "empty"),
        ("", "a", "empty"),
        ("a b", "c </s> d", "symbol"),
        ("a b", "<pad>", "symbol"),
        ("a b", "c d e f", None),
        ("a b", "c d e f g", "ratio"),
        ("a b c d e", "c d", "ratio"),
        ("a b c", "d d d e", None),
        ("a b c", "d d d d", "loop"),
        ("a a a a", "d d d d", None),
        ("a a a a", "d d d d d", "loop"),
        ("a b c d e f g h", "a b a b a b a b", "loop"),
    ],
)
def test_which_pairs_are_dropped(source, target, problem):
    assert Limits(max_ratio=2, max_repeats=3).problem(source.split(), target.split()) == problem
