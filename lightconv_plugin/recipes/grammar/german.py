"""German inflection: articles, adjectives, nouns, verbs, and the contractions of prepositions.

Cases are "nom", "acc", "dat", "gen"; a gender is "m", "f", "n", or "pl" for any plural; a person is "1sg", "3sg", "1pl"
or "3pl". The tables are those of any German grammar (Duden vol. 4, chapters on the article and on the adjective).
"""

from __future__ import annotations

import re

from lightconv_plugin.recipes.grammar.lexicon import Adjective, Noun, Verb

CASES = ("nom", "acc", "dat", "gen")
GENDERS = ("m", "f", "n", "pl")


def _table(rows: str) -> dict[tuple[str, str], str]:
    """Four rows (cases) of four forms (genders); `-` is the empty ending."""
    forms = [row.split() for row in rows.strip().splitlines()]
    return {
        (case, gender): "" if form == "-" else form
        for case, row in zip(CASES, forms, strict=True)
        for gender, form in zip(GENDERS, row, strict=True)
    }


DEFINITE = _table("""
    der die das die
    den die das die
    dem der dem den
    des der des der
""")
# dies-, jed-
DER_WORD = _table("""
    er e es e
    en e es e
    em er em en
    es er es er
""")
# ein, kein, mein, sein, ihr, unser
EIN_WORD = _table("""
    - e - e
    en e - e
    em er em en
    es er es er
""")
WEAK = _table("""
    e e e en
    en e e en
    en en en en
    en en en en
""")
MIXED = _table("""
    er e es en
    en e es en
    en en en en
    en en en en
""")
STRONG = _table("""
    er e es e
    en e es e
    em er em en
    en er en er
""")
# Like the article, except for the genitive and the dative plural.
RELATIVE = DEFINITE | {
    ("dat", "pl"): "denen",
    ("gen", "m"): "dessen",
    ("gen", "n"): "dessen",
    ("gen", "f"): "deren",
    ("gen", "pl"): "deren",
}
EIN_STEMS = ("ein", "kein", "mein", "sein", "ihr", "unser")
DER_STEMS = ("dies", "jed")

# I, we, he, she, they
PRONOUNS = {
    "1sg": {"nom": "ich", "acc": "mich", "dat": "mir"},
    "1pl": {"nom": "wir", "acc": "uns", "dat": "uns"},
    "m": {"nom": "er", "acc": "ihn", "dat": "ihm"},
    "f": {"nom": "sie", "acc": "sie", "dat": "ihr"},
    "3pl": {"nom": "sie", "acc": "sie", "dat": "ihnen"},
}

_IRREGULAR = {
    "haben": ("habe", "hat", "haben"),
    "sein": ("bin", "ist", "sind"),
    "werden": ("werde", "wird", "werden"),
    "können": ("kann", "kann", "können"),
    "müssen": ("muss", "muss", "müssen"),
    "wollen": ("will", "will", "wollen"),
    "dürfen": ("darf", "darf", "dürfen"),
    "sollen": ("soll", "soll", "sollen"),
    "wissen": ("weiß", "weiß", "wissen"),
}
_CONTRACTIONS: dict[tuple[str, ...], str] = {
    ("in", "dem"): "im",
    ("in", "das"): "ins",
    ("an", "dem"): "am",
    ("an", "das"): "ans",
    ("von", "dem"): "vom",
    ("zu", "dem"): "zum",
    ("zu", "der"): "zur",
    ("bei", "dem"): "beim",
}


def determiner(stem: str, case: str, gender: str) -> str:
    """`stem` is "der", one of EIN_STEMS or DER_STEMS, or "" for none."""
    if stem == "der":
        return DEFINITE[case, gender]
    if stem in DER_STEMS:
        return stem + DER_WORD[case, gender]
    if stem in EIN_STEMS:
        if stem == "ein" and gender == "pl":
            raise ValueError("ein has no plural")
        return stem + EIN_WORD[case, gender]
    if stem:
        raise ValueError(f"stem must be der, {', '.join(EIN_STEMS + DER_STEMS)} or empty, got {stem!r}")
    return ""


def adjective(word: Adjective, stem: str, case: str, gender: str) -> str:
    """The attributive form after the determiner `stem`: weak, mixed or strong."""
    endings = MIXED if stem in EIN_STEMS else WEAK if stem else STRONG
    return word.stem + endings[case, gender]


def noun(word: Noun, case: str, plural: bool) -> str:
    if plural:
        return word.de_plural + ("n" if case == "dat" and not word.de_plural.endswith(("n", "s")) else "")
    if word.weak and case != "nom":
        return word.de_plural
    if case == "gen" and word.gender != "f":
        return word.de + _genitive_ending(word)
    return word.de


def _genitive_ending(word: Noun) -> str:
    if word.de.endswith("nis"):
        return "ses"
    syllables = len(re.findall("[aeiouyäöü]+", word.de.lower()))
    loan = word.de_plural == word.de + "s"  # des Schals, des Sofas
    if word.de.endswith(("s", "ß", "x", "z", "sch", "st")) or (syllables == 1 and not loan):
        return "es"
    return "s"


def finite(infinitive: str, third: str, person: str) -> str:
    """Present tense of a verb without its separable prefix."""
    if infinitive in _IRREGULAR:
        first, third, plural = _IRREGULAR[infinitive]
        return {"1sg": first, "3sg": third}.get(person, plural)
    if person == "3sg":
        return third
    if person in ("1pl", "3pl"):
        return infinitive
    if infinitive.endswith("eln"):
        return infinitive[:-3] + "le"
    return infinitive.removesuffix("n" if infinitive.endswith("ern") else "en") + "e"


def zu_infinitive(verb: Verb) -> list[str]:
    """aufzumachen in one word, zu lesen in two."""
    return [f"{verb.prefix}zu{verb.de}"] if verb.prefix else ["zu", verb.de]


def contract(words: list[str]) -> list[str]:
    """in dem → im, and so on, for the first two words."""
    joined = _CONTRACTIONS.get(tuple(words[:2]))
    return [joined, *words[2:]] if joined else words
