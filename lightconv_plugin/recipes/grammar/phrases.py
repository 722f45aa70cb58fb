"""Noun phrases and clauses of the grammar, each in English and in German.

The differences that must be learnt: agreement (gender, number, case), the verb bracket (second position, separable
prefixes, participles and infinitives at the end), verb-final subordinate and relative clauses, inversion after anything
but the subject, and the order of the middle field: pronoun, dative, time, accusative, nicht, place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lightconv_plugin.recipes.grammar import german as german
from lightconv_plugin.recipes.grammar.lexicon import ENGLISH_VOWELS, Adjective, Noun, Verb, number

# Determiners: English singular and plural, German stem.
DETERMINERS = {
    "the": ("the", "the", "der"),
    "a": ("a", "", "ein"),
    "this": ("this", "these", "dies"),
    "every": ("every", "", "jed"),
    "no": ("no", "no", "kein"),
    "my": ("my", "my", "mein"),
    "our": ("our", "our", "unser"),
    "his": ("his", "his", "sein"),
    "her": ("her", "her", "ihr"),
}
SINGULAR_ONLY = ("a", "every")
ENGLISH_PRONOUNS = {
    "1sg": ("I", "me"),
    "1pl": ("we", "us"),
    "m": ("he", "him"),
    "f": ("she", "her"),
    "3pl": ("they", "them"),
}
# English positive, negative; German infinitive. "must not" is not "muss nicht".
MODALS = {
    "can": ("can", "cannot", "können"),
    "must": ("must", "must not", ""),
    "may": ("may", "may not", "dürfen"),
    "should": ("should", "should not", "sollen"),
    "will": ("will", "will not", "werden"),
    "want": ("wants to", "does not want to", "wollen"),
}


@dataclass(frozen=True)
class NP:
    """A noun with its modifiers, a name, or a pronoun (`pronoun` is a key of ENGLISH_PRONOUNS); `other`: … and …"""

    noun: Noun | None = None
    det: str = "the"
    plural: bool = False
    adjectives: tuple[Adjective, ...] = ()
    count: int = 0
    owner: NP | None = None
    relative: Relative | None = None
    name: str = ""
    pronoun: str = ""
    other: NP | None = None

    @property
    def head(self) -> Noun:
        if self.noun is None:
            raise ValueError("a name or a pronoun has no noun")
        return self.noun

    @property
    def gender(self) -> str:
        return "pl" if self.plural else self.head.gender

    @property
    def person(self) -> str:
        if self.pronoun in ("1sg", "1pl", "3pl"):
            return self.pronoun
        return "3pl" if self.plural or self.other else "3sg"

    @property
    def indefinite(self) -> bool:
        return self.noun is not None and self.det == "a" and self.other is None

    def en(self, object: bool = False) -> list[str]:
        if self.other:
            return [*replace(self, other=None).en(), "and", *self.other.en()]
        if self.pronoun:
            return [ENGLISH_PRONOUNS[self.pronoun][object]]
        if self.name:
            return [self.name]
        det = DETERMINERS[self.det][self.plural] if self.det else ""
        words = [number(self.count)[0]] if self.count else []
        words += [adjective.en for adjective in self.adjectives]
        words.append(self.head.en_plural if self.plural else self.head.en)
        if det == "a" and words[0][0] in ENGLISH_VOWELS:
            det = "an"
        words = [det, *words] if det else words
        if self.owner:
            words += ["of", *self.owner.en()]
        if self.relative:
            words += self.relative.en(self)
        return words

    def de(self, case: str) -> list[str]:
        if self.other:
            return [*replace(self, other=None).de(case), "und", *self.other.de(case)]
        if self.pronoun:
            return [german.PRONOUNS[self.pronoun][case]]
        if self.name:
            return [self.name]
        stem = DETERMINERS[self.det][2] if self.det else ""
        words = [number(self.count)[1]] if self.count else []
        words += [german.adjective(adjective, stem, case, self.gender) for adjective in self.adjectives]
        words.append(german.noun(self.head, case, self.plural))
        if stem:
            words.insert(0, german.determiner(stem, case, self.gender))
        if self.owner:
            words += self.owner.de("gen")
        if self.relative:
            words += [",", *self.relative.de(self.gender), ","]
        return words


@dataclass(frozen=True)
class Relative:
    """A relative clause: `clause` without its complement `gap` ("subj", "acc", "dat", "prep"), which is the noun."""

    clause: Clause
    gap: str
    living: bool

    def en(self, head: NP) -> list[str]:
        if self.gap == "subj":
            subject = replace(head, relative=None)
            clause = replace(self.clause, subject=subject)
            return ["who" if self.living else "that", *clause.en()[len(subject.en()) :]]
        return ["whom" if self.living else "that", *self.clause.en()]

    def de(self, gender: str) -> list[str]:
        verb = self.clause.verb
        if self.gap == "subj":
            person = "3pl" if gender == "pl" else "3sg"
            return [german.RELATIVE["nom", gender], *self.clause.de_final(subject=False, person=person)]
        preposition, case = verb.takes.split("+") if self.gap == "prep" else ("", self.gap)
        start = [preposition] if preposition else []
        return [*start, german.RELATIVE[case, gender], *self.clause.de_final()]


@dataclass(frozen=True)
class Place:
    """A preposition with its noun phrase: where (dative) or, with `motion`, whereto (accusative)."""

    en_preposition: str
    de_preposition: str
    np: NP
    case: str = "dat"

    def en(self) -> list[str]:
        return [*self.en_preposition.split(), *self.np.en(object=True)]

    def de(self) -> list[str]:
        return german.contract([self.de_preposition, *self.np.de(self.case)])


@dataclass(frozen=True)
class Clause:
    """A clause in one of the tenses "present", "perfect", "passive" or with a modal of MODALS.

    `acc`, `dat`, `prep` are objects by case (see the verb's `takes`). `time` is a pair (English, German). `place` is a
    location or a direction. `extra` is a subordinate part that follows the verb: a pair of word lists, with the German
    comma. In the passive, the subject is the agent: The ball is seen *by the man*.
    """

    subject: NP
    verb: Verb
    tense: str = "present"
    negated: bool = False
    acc: NP | None = None
    dat: NP | None = None
    prep: NP | None = None
    time: tuple[str, str] | None = None
    place: Place | None = None
    predicate: Adjective | None = None
    extra: tuple[list[str], list[str]] | None = field(default=None)

    def with_object(self, takes: str, np: NP | None) -> Clause:
        """With this object of a verb that takes "acc", "dat", or a preposition with a case."""
        if takes == "acc":
            return replace(self, acc=np)
        return replace(self, dat=np) if takes == "dat" else replace(self, prep=np)

    # English ------------------------------------------------------------------------------------------------------

    def _en_verbs(self, person: str) -> tuple[list[str], list[str]]:
        """The finite auxiliary with `not`, and the rest."""
        third = person == "3sg"
        no = ["not"] if self.negated else []
        be = {"1sg": "am", "3sg": "is"}.get(person, "are")
        if self.predicate:
            return [be, *no], [self.predicate.en]
        if self.tense == "passive":
            return [be, *no], [self.verb.en_past]
        if self.tense == "perfect":
            return ["has" if third else "have", *no], [self.verb.en_past]
        if self.tense in MODALS:
            words = MODALS[self.tense][self.negated].split()
            if self.tense == "want" and not third:
                words = [{"wants": "want", "does": "do"}.get(word, word) for word in words]
            return words, [self.verb.en]
        if self.negated:
            return ["does" if third else "do", "not"], [self.verb.en]
        return [], [english_third(self.verb.en) if third else self.verb.en]

    def _en_rest(self, time: bool) -> list[str]:
        words = self.verb.en_rest.split()
        if self.tense == "passive":
            words += ["by", *self.subject.en(object=True)]
        else:
            for np in (self.acc, self.prep):
                words += np.en(object=True) if np else []
            if self.dat:
                words += ["to", *self.dat.en(object=True)] if self.verb.takes == "both" else self.dat.en(object=True)
        words += self.place.en() if self.place else []
        words += self.time[0].split() if self.time and time else []
        return words + (self.extra[0] if self.extra else [])

    def _en_subject(self) -> NP:
        return self.acc if self.acc and self.tense == "passive" else self.subject

    def en(self, time: bool = True) -> list[str]:
        """The clause in English; `time=False` leaves out the time, because it was put in front."""
        subject = self._en_subject()
        finite, verbs = self._en_verbs(subject.person)
        return [*subject.en(), *finite, *verbs, *self._en_rest(time)]

    def en_infinitive(self) -> list[str]:
        return ["to", self.verb.en, *self._en_rest(True)]

    def en_question(self) -> list[str]:
        subject = self._en_subject()
        finite, verbs = self._en_verbs(subject.person)
        if not finite or finite[0] in ("wants", "want", "do", "does"):
            rest = ["not"] if self.negated else []
            rest += ["want", "to", self.verb.en] if self.tense == "want" else [self.verb.en]
            return ["does" if subject.person == "3sg" else "do", *subject.en(), *rest, *self._en_rest(True)]
        if finite == ["cannot"]:
            finite = ["can", "not"]
        return [finite[0], *subject.en(), *finite[1:], *verbs, *self._en_rest(True)]

    # German -------------------------------------------------------------------------------------------------------

    def _de_verbs(self, person: str) -> tuple[str, list[str], str]:
        """The finite verb, the right bracket, and the prefix that stands alone when the verb is second."""
        verb = self.verb
        if self.predicate:
            return german.finite("sein", "", person), [self.predicate.de], ""
        if self.tense == "passive":
            return german.finite("werden", "", person), [verb.participle], ""
        if self.tense == "perfect":
            return german.finite(verb.aux, "", person), [verb.participle], ""
        if self.tense in MODALS:
            infinitive = MODALS[self.tense][2] or ("dürfen" if self.negated else "müssen")
            return german.finite(infinitive, "", person), [verb.prefix + verb.de], ""
        return german.finite(verb.de, verb.third, person), [], verb.prefix

    def _de_middle(self, subject: list[str], time: bool = True, place: bool = True) -> list[str]:
        acc, no = self.acc, ["nicht"] if self.negated else []
        if self.tense == "passive":
            acc = None
        elif self.negated and acc and acc.indefinite:
            acc, no = replace(acc, det="no"), []
        words = list(subject)
        words += acc.de("acc") if acc and acc.pronoun else []
        words += self.dat.de("dat") if self.dat else []
        words += self.time[1].split() if self.time and time else []
        words += acc.de("acc") if acc and not acc.pronoun else []
        if self.tense == "passive":
            words += german.contract(["von", *self.subject.de("dat")])
        words += no
        if self.prep:
            preposition, case = self.verb.takes.split("+")
            words += german.contract([preposition, *self.prep.de(case)])
        return words + (self.place.de() if self.place and place else [])

    def de_main(self, fronted: str = "") -> list[str]:
        """Verb second; `fronted` is "" (the subject), "time", "place", or "clause": something before the clause."""
        subject = self._en_subject()
        finite, right, prefix = self._de_verbs(subject.person)
        end = right or ([prefix] if prefix else [])
        if not fronted:
            words = [*subject.de("nom"), finite, *self._de_middle([])]
        else:
            first = {"time": (self.time or ("", ""))[1].split(), "place": self.place.de() if self.place else []}
            middle = self._de_middle(subject.de("nom"), time=fronted != "time", place=fronted != "place")
            words = [*first.get(fronted, []), finite, *middle]
        return words + end + (self.extra[1] if self.extra else [])

    def de_final(self, subject: bool = True, person: str = "") -> list[str]:
        """Verb last, as after „dass“ and in relative clauses (those on the subject leave it out)."""
        np = self._en_subject()
        finite, right, prefix = self._de_verbs(person or np.person)
        middle = self._de_middle(np.de("nom") if subject else [])
        return [*middle, *right, prefix + finite, *(self.extra[1] if self.extra else [])]

    def de_infinitive(self) -> list[str]:
        return [*self._de_middle([]), *german.zu_infinitive(self.verb)]


def english_third(word: str) -> str:
    """goes, carries, washes, has"""
    if word == "have":
        return "has"
    if word.endswith("y") and word[-2] not in ENGLISH_VOWELS:
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh", "o")) else "s")


def sentence(words: list[str], end: str) -> str:
    """Words to text: one comma at a time and none at the end, a capital letter, the final mark."""
    kept: list[str] = []
    for word in words:
        if word == "," and (not kept or kept[-1] == ","):
            continue
        kept.append(word)
    if kept[-1] == ",":
        kept.pop()
    text = " ".join(kept).replace(" ,", ",")
    return text[0].upper() + text[1:] + end
