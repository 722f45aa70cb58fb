"""A German–English corpus written by a small synchronous grammar, to try a translation system on without any download.

All sentences are different. The words follow Zipf's law, so that the training text has its rare words and the test text
some that were never seen. The same seed gives the same text.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from lightconv_plugin.recipes.demo import lexicon as lexicon
from lightconv_plugin.recipes.demo.lexicon import Noun, Verb
from lightconv_plugin.recipes.demo.phrases import MODALS, NP, SINGULAR_ONLY, Clause, Place, Relative, sentence
from lightconv_plugin.recipes.steps import Steps

T = TypeVar("T")
LIVING = ("person", "animal")
SPLITS = ("test", "valid", "train")  # drawn in this order: a longer training text leaves the others as they are


class Grammar:
    """Draws sentence pairs from one random generator."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"grammar {seed}")
        self._weights: dict[int, list[float]] = {}

    def zipf(self, items: Sequence[T]) -> T:
        """An item with probability proportional to 1 / (rank + 2)."""
        weights = self._weights.setdefault(
            len(items), list(itertools.accumulate(1 / (rank + 2) for rank in range(1, len(items) + 1)))
        )
        return self.random.choices(items, cum_weights=weights)[0]

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    # Noun phrases

    def noun(self, kinds: Sequence[str]) -> tuple[str, Noun]:
        kind = self.random.choice(kinds)
        compounds = [pair for pair in lexicon.COMPOUNDS if pair[0] == kind]
        if self.chance(0.3 * len(compounds) / (len(compounds) + 60)):
            return self.random.choice(compounds)
        return kind, self.zipf(lexicon.NOUNS[kind])

    def np(self, kinds: Sequence[str], relative: float = 0.0, owner: float = 0.05) -> NP:
        """A noun phrase of one of these kinds; `relative` and `owner` are probabilities of what may follow the noun.

        Without an owner (in owners themselves, and in places) there is no number either: German has no genitive for it.
        """
        kind, noun = self.noun(kinds)
        if kind == "person" and self.chance(0.15):
            return NP(name=self.zipf(lexicon.NAMES))
        det = self.zipf(("the", "a", "my", "this", "his", "our", "every", "her"))
        plural = det not in SINGULAR_ONLY and self.chance(0.3)
        phrase = NP(noun=noun, det=det, plural=plural)
        if plural and owner and self.chance(0.35):
            count = 1 + self.zipf(range(1, 99))
            phrase = replace(phrase, count=count, det=phrase.det if self.chance(0.3) else "")
        adjectives = lexicon.ADJECTIVES[kind]
        if self.chance(0.35):
            first = self.zipf(adjectives)
            second = self.zipf(adjectives)
            both = self.chance(0.15) and first != second
            phrase = replace(phrase, adjectives=(first, second) if both else (first,))
        if phrase.det and self.chance(owner):
            owner_phrase = self.np(("person",), owner=0.0)
            return phrase if owner_phrase.name else replace(phrase, det="the", plural=plural, owner=owner_phrase)
        if kind not in ("place", "surface") and self.chance(relative):
            return replace(phrase, relative=self.relative(kind))
        if relative and self.chance(0.08):
            return replace(phrase, other=self.np((kind,), owner=0.0))
        return phrase

    def subject(self, relative: float = 0.15) -> NP:
        if self.chance(0.2):
            return NP(pronoun=self.zipf(("m", "f", "1sg", "1pl", "3pl")), plural=False)
        return self.np(("person", "person", "animal"), relative=relative)

    def object(self, kinds: Sequence[str], relative: float, subject: NP) -> NP:
        if set(kinds) & set(LIVING) and self.chance(0.12):
            pronouns = ("m", "f", "3pl") if subject.pronoun in ("1sg", "1pl") else ("m", "f", "1sg", "1pl", "3pl")
            return NP(pronoun=self.zipf(pronouns))
        return self.np(kinds, relative=relative)

    def relative(self, kind: str) -> Relative:
        living = kind in LIVING
        fitting = [verb for verb in lexicon.VERBS if kind in verb.objects and verb.takes not in ("-", "into", "both")]
        if living and (not fitting or self.chance(0.5)):
            return Relative(self.clause(simple=True, subject=NP(pronoun="m")), "subj", living)
        verb = self.zipf(fitting)
        clause = self.clause(verb=verb, simple=True)
        gap = verb.takes if verb.takes in ("acc", "dat") else "prep"
        return Relative(replace(clause, **{gap: None}), gap, living)

    def place(self, verb: Verb) -> Place:
        inside, on = ("place",), ("surface",)
        if verb.takes == "into":
            if self.chance(0.7):
                return Place("into", "in", self.np(inside, owner=0.0), "acc")
            return Place("onto", "auf", self.np(on, owner=0.0), "acc")
        choice = self.zipf(("in", "on", "behind", "next to", "under", "in front of"))
        if choice == "in":
            return Place("in", "in", self.np(inside, owner=0.0))
        if choice == "on":
            return Place("on", "auf", self.np(on, owner=0.0))
        preposition = {"behind": "hinter", "next to": "neben", "under": "unter", "in front of": "vor"}[choice]
        return Place(choice, preposition, self.np(("surface", "place", "openable"), owner=0.0))

    # Clauses

    def clause(self, verb: Verb | None = None, simple: bool = False, subject: NP | None = None) -> Clause:
        """Any clause but the copula's; `simple` for those inside others: no relative clauses, fewer adverbials."""
        relative = 0.0 if simple else 0.2
        verb = verb or self.verb()
        subject = subject or self.subject(relative)
        tense = self.random.choices(("present", "perfect", "modal"), (0.5, 0.25, 0.25))[0]
        if tense == "modal":
            tense = self.zipf(tuple(MODALS))
        clause = Clause(subject, verb, tense, negated=self.chance(0.15))
        if verb.takes == "both":
            clause = replace(
                clause, acc=self.np(verb.objects, relative), dat=self.object(("person",), relative, subject)
            )
        elif verb.takes not in ("-", "into"):
            complement = verb.takes if verb.takes in ("acc", "dat") else "prep"
            clause = replace(clause, **{complement: self.object(verb.objects, relative, subject)})
        if verb.takes == "into" or self.chance(0.1 if simple else 0.3):
            clause = replace(clause, place=self.place(verb))
        if self.chance(0.1 if simple else 0.35):
            clause = replace(clause, time=self.zipf(lexicon.FUTURE_TIMES if tense == "will" else lexicon.TIMES))
        if verb.takes == "acc" and tense == "present" and not clause.acc.pronoun and self.chance(0.12) and not simple:
            clause = replace(clause, tense="passive")
        return clause

    def verb(self) -> Verb:
        takes = self.random.choices(("acc", "dat", "both", "-", "into", "+"), (0.42, 0.12, 0.12, 0.14, 0.1, 0.1))[0]
        return self.zipf([v for v in lexicon.VERBS if v.takes == takes or (takes == "+" and "+" in v.takes)])

    def copula(self) -> Clause:
        kind = self.zipf(("person", "tool", "animal", "place", "text", "clothing"))
        subject = self.np((kind,), relative=0.25)
        return Clause(
            subject, lexicon.VERBS[0], negated=self.chance(0.2), predicate=self.zipf(lexicon.ADJECTIVES[kind])
        )

    def with_extra(self) -> Clause:
        """… says that …; … tries to …"""
        base = Clause(self.subject(), lexicon.VERBS[0], self.zipf(("present", "perfect")), negated=self.chance(0.1))
        if self.chance(0.6):
            inner = self.clause(simple=True) if self.chance(0.8) else self.copula()
            extra = ["that", *inner.en()], [",", "dass", *inner.de_final()]
            return replace(base, verb=self.zipf(lexicon.CLAUSE_VERBS), extra=extra)
        inner = replace(self.clause(simple=True), tense="present", negated=False)
        extra = inner.en_infinitive(), [",", *inner.de_infinitive()]
        return replace(base, verb=self.zipf(lexicon.INFINITIVE_VERBS), extra=extra)

    # Sentences

    def pair(self) -> tuple[str, str]:
        """One English and one German sentence."""
        kind = self.random.choices(
            ("plain", "copula", "extra", "sub last", "sub first", "question", "why", "but"),
            (0.36, 0.08, 0.14, 0.12, 0.12, 0.07, 0.04, 0.07),
        )[0]
        if kind == "copula":
            clause = self.copula()
            return sentence(clause.en(), "."), sentence(clause.de_main(), ".")
        if kind == "extra":
            clause = self.with_extra()
            return sentence(clause.en(), "."), sentence(clause.de_main(), ".")
        if kind in ("question", "why"):
            clause = self.clause(simple=self.chance(0.5))
            en, de = ([], []) if kind == "question" else (["why"], ["warum"])
            return sentence([*en, *clause.en_question()], "?"), sentence([*de, *clause.de_main("clause")], "?")
        if kind == "plain":
            en, de = self.main(self.clause())
            return sentence(en, "."), sentence(de, ".")
        first, second = self.clause(simple=True), self.clause(simple=True)
        if kind == "but":
            return (
                sentence([*first.en(), ",", "but", *second.en()], "."),
                sentence([*first.de_main(), ",", "aber", *second.de_main()], "."),
            )
        en, de = self.zipf(lexicon.SUBORDINATORS)
        if kind == "sub last":
            return (
                sentence([*first.en(), en, *second.en()], "."),
                sentence([*first.de_main(), ",", de, *second.de_final()], "."),
            )
        return (
            sentence([en, *second.en(), ",", *first.en()], "."),
            sentence([de, *second.de_final(), ",", *first.de_main("clause")], "."),
        )

    def main(self, clause: Clause) -> tuple[list[str], list[str]]:
        """A main clause, at times with its time or place in front: then the German verb moves, nothing in English."""
        if clause.time and self.chance(0.5):
            return [*clause.time[0].split(), *clause.en(time=False)], clause.de_main("time")
        if clause.place and clause.verb.takes != "into" and clause.tense != "passive" and self.chance(0.3):
            bare = replace(clause, place=None)
            return [*clause.place.en(), *bare.en()], clause.de_main("place")
        return clause.en(), clause.de_main()


def pairs(seed: int) -> Iterator[tuple[str, str]]:
    """Different sentence pairs (English, German) without end."""
    grammar, seen = Grammar(seed), set()
    while True:
        en, de = grammar.pair()
        if en not in seen:
            seen.add(en)
            yield en, de


def write_corpus(out: Path, seed: int, sizes: dict[str, int]) -> None:
    """`train.en`, `train.de`, … in `out`, drawn from one stream of different sentences: none is in two parts."""
    here = Path(__file__).resolve().parent

    def make(*outputs: Path) -> None:
        stream, paths = pairs(seed), iter(outputs)
        for split in SPLITS:
            rows = list(itertools.islice(stream, sizes[split]))
            for side in (0, 1):
                next(paths).write_text("".join(row[side] + "\n" for row in rows), encoding="utf-8")

    with Steps(out) as steps:
        steps.run(
            "corpus",
            f"grammar corpus, seed {seed}, {sizes['train']} sentence pairs",
            make,
            inputs=sorted(here / name for name in ("corpus.py", "german.py", "lexicon.py", "phrases.py")),
            outputs=[out / f"{split}.{lang}" for split in SPLITS for lang in ("en", "de")],
            params={"seed": seed, "sizes": sizes},
        )
