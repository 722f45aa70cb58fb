"""The words of the German–English grammar, most frequent first: they are in lexicon.toml.

Forms that follow from a rule are in german.py and phrases.py; that file has everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lightconv_plugin.recipes.steps import read_toml

ENGLISH_VOWELS = "aeiou"


@dataclass(frozen=True)
class Noun:
    """German singular, gender, plural; English singular, plural. `weak`: German -n in all cases but the nominative."""

    de: str
    gender: str
    de_plural: str
    en: str
    en_plural: str
    weak: bool = False


@dataclass(frozen=True)
class Verb:
    """`de` is the infinitive without the separable `prefix`; `third` is the present of er/sie/es; `aux` haben or sein.

    `en` is the base form, `en_past` the past participle; `en_rest` is what follows it (look *at*, give *back*).
    `takes` says the complements: `-` none, `acc`, `dat`, `both` (dative and accusative), `into` (a direction), or a
    preposition with its case (`auf+acc`); `objects` the noun classes of the accusative (or only) object.
    """

    de: str
    third: str
    participle: str
    en: str
    en_past: str
    takes: str
    objects: tuple[str, ...]
    prefix: str
    aux: str
    en_rest: str


@dataclass(frozen=True)
class Adjective:
    """`stem` takes the endings; `de` is the form after `sein`."""

    de: str
    stem: str
    en: str


def _rows(table: str) -> list[str]:
    return [row.strip() for row in table.replace("\n", ";").split(";") if row.strip()]


def _plural(word: str) -> str:
    if word.endswith("y") and word[-2] not in ENGLISH_VOWELS:
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh")) else "s")


def _noun(row: str) -> Noun:
    de, gender, plural, en, *rest = row.split()
    en = en.replace("_", " ")
    return Noun(de, gender[0], plural, en, rest[0] if rest else _plural(en), weak=gender.endswith("*"))


def _compounds(firsts: str, heads: str) -> list[tuple[str, Noun]]:
    """(class, compound) for any first part with any head: one word in German, two in English."""
    head_of = {noun.de: (kind, noun) for kind, nouns in NOUNS.items() for noun in nouns}
    compounds = []
    for de, en in map(str.split, _rows(firsts)):
        for kind, noun in (head_of[head] for head in heads.split() if head != de):
            joined = replace(noun, de=de + noun.de.lower(), de_plural=de + noun.de_plural.lower())
            compounds.append((kind, replace(joined, en=f"{en} {noun.en}", en_plural=f"{en} {noun.en_plural}")))
    return compounds


def _verbs(words: str, takes: str, objects: str = "") -> tuple[Verb, ...]:
    return tuple(_verb(row, takes, objects) for row in _rows(words))


def _verb(row: str, takes: str, objects: str) -> Verb:
    words, _, classes = row.partition(":")
    de, third, participle, en, past = words.split()
    prefix, _, base = de.rpartition("|")
    en, _, rest = en.partition("_")
    aux = "sein" if participle.startswith("+") else "haben"
    kinds = tuple((classes or objects).split())
    return Verb(base, third, participle.lstrip("+"), en, past, takes, kinds, prefix, aux, rest.replace("_", " "))


def _adjectives(*tables: str) -> tuple[Adjective, ...]:
    adjectives = []
    for de, en in (row.split() for table in tables for row in _rows(table)):
        word, _, stem = de.partition("/")
        adjectives.append(Adjective(word, stem or word, en))
    return tuple(adjectives)


_WORDS = read_toml(Path(__file__).with_suffix(".toml"))
NOUNS = {kind: tuple(map(_noun, _rows(table))) for kind, table in _WORDS["nouns"].items()}
COMPOUNDS = tuple(compound for table in _WORDS["compounds"] for compound in _compounds(**table))
VERBS = tuple(verb for table in _WORDS["verbs"] for verb in _verbs(**table))
CLAUSE_VERBS = _verbs(**_WORDS["clause_verbs"])
INFINITIVE_VERBS = _verbs(**_WORDS["infinitive_verbs"])
ADJECTIVES = {
    kind: _adjectives(_WORDS["adjectives"]["any"], _WORDS["adjectives"]["living" if living else "thing"])
    for kind in NOUNS
    for living in [kind in ("person", "animal")]
}
TIMES, FUTURE_TIMES, SUBORDINATORS = (
    tuple(map(tuple, _WORDS["phrases"][name])) for name in ("times", "future_times", "subordinators")
)
NAMES = _WORDS["phrases"]["names"].split()

_UNITS_DE = "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn".split()
_UNITS_DE += "sechzehn siebzehn achtzehn neunzehn".split()
_UNITS_EN = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen".split()
_UNITS_EN += "sixteen seventeen eighteen nineteen".split()
_TENS_DE = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()
_TENS_EN = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def number(n: int) -> tuple[str, str]:
    """English and German words of 2 … 99: twenty-one, einundzwanzig."""
    if not 2 <= n <= 99:
        raise ValueError(f"number needs 2 to 99, got {n}")
    if n < 20:
        return _UNITS_EN[n], _UNITS_DE[n]
    tens, unit = divmod(n, 10)
    en, de = _TENS_EN[tens - 2], _TENS_DE[tens - 2]
    return (f"{en}-{_UNITS_EN[unit]}", f"{_UNITS_DE[unit]}und{de}") if unit else (en, de)
