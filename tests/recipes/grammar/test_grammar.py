"""The grammar writes correct German, the same for the same seed, and keeps its parts apart."""

import itertools
import re

import pytest

from lightconv_plugin.recipes.grammar import german as german
from lightconv_plugin.recipes.grammar import lexicon as lexicon
from lightconv_plugin.recipes.grammar.corpus import Grammar, pairs, write_corpus
from lightconv_plugin.recipes.grammar.phrases import NP, Clause, Place, Relative, english_third, sentence

NOUNS = {noun.de: noun for nouns in lexicon.NOUNS.values() for noun in nouns}
VERBS = {verb.prefix + verb.de: verb for verb in lexicon.VERBS}
ADJECTIVES = {adjective.de: adjective for words in lexicon.ADJECTIVES.values() for adjective in words}


def np(de, det="the", adjectives="", **more):
    return NP(NOUNS[de], det, adjectives=tuple(ADJECTIVES[word] for word in adjectives.split()), **more)


# Written by hand from a German grammar's tables: nominative, accusative, dative, genitive.
@pytest.mark.parametrize(
    "phrase, forms",
    [
        (np("Mann", "the", "alt"), "der alte Mann/den alten Mann/dem alten Mann/des alten Mannes"),
        (np("Mann", "a", "alt"), "ein alter Mann/einen alten Mann/einem alten Mann/eines alten Mannes"),
        (np("Frau", "a", "jung"), "eine junge Frau/eine junge Frau/einer jungen Frau/einer jungen Frau"),
        (np("Kind", "a", "klein"), "ein kleines Kind/ein kleines Kind/einem kleinen Kind/eines kleinen Kindes"),
        (
            np("Kind", "this", "klein"),
            "dieses kleine Kind/dieses kleine Kind/diesem kleinen Kind/dieses kleinen Kindes",
        ),
        (np("Junge", "every"), "jeder Junge/jeden Jungen/jedem Jungen/jedes Jungen"),
        (np("Bär", "his", "müde"), "sein müder Bär/seinen müden Bären/seinem müden Bären/seines müden Bären"),
        (
            np("Haus", "our", "dunkel"),
            "unser dunkles Haus/unser dunkles Haus/unserem dunklen Haus/unseres dunklen Hauses",
        ),
        (np("Uhr", "my", "teuer"), "meine teure Uhr/meine teure Uhr/meiner teuren Uhr/meiner teuren Uhr"),
        (
            np("Hund", "the", "groß", plural=True),
            "die großen Hunde/die großen Hunde/den großen Hunden/der großen Hunde",
        ),
        (np("Buch", "her", plural=True), "ihre Bücher/ihre Bücher/ihren Büchern/ihrer Bücher"),
        (
            np("Zeugnis", "no", "alt"),
            "kein altes Zeugnis/kein altes Zeugnis/keinem alten Zeugnis/keines alten Zeugnisses",
        ),
        (np("Sofa", "the"), "das Sofa/das Sofa/dem Sofa/des Sofas"),
    ],
    ids=lambda value: value.noun.de + "-" + value.det if isinstance(value, NP) else "",
)
def test_declension(phrase, forms):
    assert [" ".join(phrase.de(case)) for case in german.CASES] == forms.split("/")


@pytest.mark.parametrize(
    "case, expected",
    [("nom", "drei kleine Katzen"), ("acc", "drei kleine Katzen"), ("dat", "drei kleinen Katzen")],
    ids=["nom", "acc", "dat"],
)
def test_a_bare_number_takes_strong_endings(case, expected):
    assert " ".join(np("Katze", "", "klein", plural=True, count=3).de(case)) == expected


def test_a_number_after_an_article_takes_weak_endings():
    assert np("Katze", "the", "klein", plural=True, count=21).de("dat") == "den einundzwanzig kleinen Katzen".split()
    assert np("Katze", "the", "klein", plural=True, count=21).en() == "the twenty-one small cats".split()


HE, I = NP(pronoun="m"), NP(pronoun="1sg")
WOMAN, MAN, DOG, BALL = np("Frau"), np("Mann"), np("Hund"), np("Ball", "a", "rot")
IN_GARDEN = Place("in", "in", np("Garten"))

# The English clause, then German as a main clause, after its time or place, and as a subordinate clause.
SENTENCES = {
    "separable": (
        Clause(WOMAN, VERBS["aufmachen"], acc=np("Tür", "a"), time=("today", "heute")),
        "the woman opens a door today",
        "die Frau macht heute eine Tür auf",
        ("time", "heute macht die Frau eine Tür auf"),
        "die Frau heute eine Tür aufmacht",
    ),
    "separable-perfect": (
        Clause(I, VERBS["einschlafen"], "perfect", place=IN_GARDEN),
        "I have fallen asleep in the garden",
        "ich bin im Garten eingeschlafen",
        ("place", "im Garten bin ich eingeschlafen"),
        "ich im Garten eingeschlafen bin",
    ),
    "ditransitive-modal": (
        Clause(MAN, VERBS["geben"], "can", acc=BALL, dat=np("Kind", "the", "klein")),
        "the man can give a red ball to the small child",
        "der Mann kann dem kleinen Kind einen roten Ball geben",
        ("clause", "kann der Mann dem kleinen Kind einen roten Ball geben"),
        "der Mann dem kleinen Kind einen roten Ball geben kann",
    ),
    "negated-definite": (
        Clause(HE, VERBS["sehen"], acc=DOG, negated=True, place=IN_GARDEN),
        "he does not see the dog in the garden",
        "er sieht den Hund nicht im Garten",
        ("place", "im Garten sieht er den Hund nicht"),
        "er den Hund nicht im Garten sieht",
    ),
    "negated-indefinite": (
        Clause(NP(pronoun="1pl"), VERBS["kaufen"], "perfect", acc=BALL, negated=True),
        "we have not bought a red ball",
        "wir haben keinen roten Ball gekauft",
        ("clause", "haben wir keinen roten Ball gekauft"),
        "wir keinen roten Ball gekauft haben",
    ),
    "dative-verb": (
        Clause(np("Frau", plural=True), VERBS["zuhören"], dat=NP(pronoun="m")),
        "the women listen to him",
        "die Frauen hören ihm zu",
        ("clause", "hören die Frauen ihm zu"),
        "die Frauen ihm zuhören",
    ),
    "prepositional": (
        Clause(MAN, VERBS["warten"], prep=np("Junge", "a")),
        "the man waits for a boy",
        "der Mann wartet auf einen Jungen",
        ("clause", "wartet der Mann auf einen Jungen"),
        "der Mann auf einen Jungen wartet",
    ),
    "direction": (
        Clause(DOG, VERBS["laufen"], "perfect", place=Place("into", "in", np("Haus"), "acc")),
        "the dog has run into the house",
        "der Hund ist ins Haus gelaufen",
        ("clause", "ist der Hund ins Haus gelaufen"),
        "der Hund ins Haus gelaufen ist",
    ),
    "passive": (
        Clause(MAN, VERBS["ansehen"], "passive", acc=np("Bild", plural=True)),
        "the pictures are looked at by the man",
        "die Bilder werden vom Mann angesehen",
        ("clause", "werden die Bilder vom Mann angesehen"),
        "die Bilder vom Mann angesehen werden",
    ),
    "must-not": (
        Clause(I, VERBS["lächeln"], "must", negated=True),
        "I must not smile",
        "ich darf nicht lächeln",
        ("clause", "darf ich nicht lächeln"),
        "ich nicht lächeln darf",
    ),
    "first-person": (
        Clause(I, VERBS["einsammeln"], acc=np("Apfel", plural=True)),
        "I gather the apples",
        "ich sammle die Äpfel ein",
        ("clause", "sammle ich die Äpfel ein"),
        "ich die Äpfel einsammle",
    ),
    "coordinated-subject": (
        Clause(np("Mann", other=np("Frau")), VERBS["schlafen"]),
        "the man and the woman sleep",
        "der Mann und die Frau schlafen",
        ("clause", "schlafen der Mann und die Frau"),
        "der Mann und die Frau schlafen",
    ),
    "copula": (
        Clause(DOG, VERBS["sehen"], predicate=ADJECTIVES["müde"], negated=True),
        "the dog is not tired",
        "der Hund ist nicht müde",
        ("clause", "ist der Hund nicht müde"),
        "der Hund nicht müde ist",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_word_order(name):
    clause, en, main, (fronted, inverted), final = SENTENCES[name]
    assert " ".join(clause.en()) == en
    assert " ".join(clause.de_main()) == main
    assert " ".join(clause.de_main(fronted)) == inverted
    assert " ".join(clause.de_final()) == final


@pytest.mark.parametrize(
    "head, gap, verb, objects, en, de",
    [
        ("Mann", "subj", "ansehen", {"acc": BALL}, "who looks at a red ball", "der einen roten Ball ansieht"),
        ("Mann", "acc", "einladen", {}, "whom the woman invites", "den die Frau einlädt"),
        ("Kind", "dat", "helfen", {}, "whom the woman helps", "dem die Frau hilft"),
        ("Hund", "prep", "warten", {}, "whom the woman waits for", "auf den die Frau wartet"),
        ("Zeitung", "acc", "lesen", {}, "that the woman reads", "die die Frau liest"),
    ],
    ids=["subject", "accusative", "dative", "preposition", "thing"],
)
def test_relative_clauses(head, gap, verb, objects, en, de):
    subject = NP(pronoun="m") if gap == "subj" else WOMAN
    relative = Relative(Clause(subject, VERBS[verb], **objects), gap, living=head != "Zeitung")
    phrase = np(head, relative=relative)
    assert " ".join(phrase.en()).endswith(en)
    assert " ".join(phrase.de("nom")).endswith(f", {de} ,")


def test_relative_pronouns_of_the_dative_plural_are_longer_than_the_article():
    relative = Relative(Clause(WOMAN, VERBS["danken"]), "dat", living=True)
    assert " ".join(np("Freund", plural=True, relative=relative).de("acc")) == "die Freunde , denen die Frau dankt ,"


def test_the_infinitive_takes_zu_between_prefix_and_stem():
    assert Clause(None, VERBS["aufmachen"], acc=np("Tür")).de_infinitive() == ["die", "Tür", "aufzumachen"]
    assert Clause(None, VERBS["lesen"], acc=np("Buch")).de_infinitive() == ["das", "Buch", "zu", "lesen"]


@pytest.mark.parametrize(
    "clause, en",
    [
        (Clause(HE, VERBS["sehen"], acc=DOG), "does he see the dog"),
        (Clause(HE, VERBS["sehen"], "want", acc=DOG), "does he want to see the dog"),
        (Clause(HE, VERBS["sehen"], "perfect", acc=DOG, negated=True), "has he not seen the dog"),
        (Clause(HE, VERBS["sehen"], "can", acc=DOG, negated=True), "can he not see the dog"),
        (Clause(NP(pronoun="3pl"), VERBS["sehen"], acc=DOG, negated=True), "do they not see the dog"),
    ],
    ids=["present", "want", "perfect", "cannot", "negated"],
)
def test_english_questions(clause, en):
    assert " ".join(clause.en_question()) == en


@pytest.mark.parametrize(
    "word, third", [("carry", "carries"), ("go", "goes"), ("wash", "washes"), ("buy", "buys"), ("have", "has")]
)
def test_english_third_person(word, third):
    assert english_third(word) == third


@pytest.mark.parametrize(
    "n, en, de",
    [(2, "two", "zwei"), (17, "seventeen", "siebzehn"), (30, "thirty", "dreißig"), (61, "sixty-one", "einundsechzig")],
)
def test_numbers(n, en, de):
    assert lexicon.number(n) == (en, de)


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="2 to 99, got 100"):
        lexicon.number(100)


def test_commas_are_single_and_never_last():
    assert (
        sentence(["der", "Mann", ",", "der", "lacht", ",", ",", "schläft", ","], ".") == "Der Mann, der lacht, schläft."
    )


def test_english_words_are_unambiguous():
    """One English word, one German word: otherwise no translation could be right every time."""
    compounds = [noun for _, noun in lexicon.COMPOUNDS]
    nouns = [*NOUNS.values(), *compounds]
    for form in ("en", "en_plural"):
        words = [getattr(noun, form) for noun in nouns]
        assert len(words) == len(set(words))
    assert not {noun.en for noun in nouns} & {noun.en_plural for noun in nouns}
    verbs = [(verb.en, verb.en_rest) for verb in lexicon.VERBS]
    assert len(verbs) == len(set(verbs))
    assert len({(a.en) for a in ADJECTIVES.values()}) == len(ADJECTIVES)


def test_participles_and_prefixes_agree():
    """aufgemacht begins with auf, and so does every participle of a separable verb."""
    separable = [verb for verb in (*lexicon.VERBS, *lexicon.INFINITIVE_VERBS) if verb.prefix]
    assert len(separable) >= 25
    for verb in separable:
        assert verb.participle.startswith(verb.prefix), verb


@pytest.fixture(scope="module")
def sample():
    return list(itertools.islice(pairs(3), 4000))


def test_sentences_are_different_and_well_formed(sample):
    assert len({en for en, _ in sample}) == len(sample)
    for en, de in sample:
        for text in (en, de):
            assert re.fullmatch(r"[A-ZÄÖÜ][^.?]*[.?]", text), text
            assert "  " not in text and " ," not in text and ",," not in text
        assert en[-1] == de[-1]
        assert not re.search(r"\ba [aeiou]", en), en
        assert not re.search(r"\ban [^aeiou]", en), en


def test_the_verb_ends_subordinate_clauses(sample):
    """After weil, obwohl, dass … the clause ends in a finite verb; in the main clause it would be second."""
    finite = {"hat", "haben", "habe", "ist", "sind", "bin", "kann", "können", "muss", "müssen", "will", "wollen"}
    finite |= {"darf", "dürfen", "soll", "sollen", "wird", "werden", "werde"}
    for verb in lexicon.VERBS:
        finite |= {verb.prefix + german.finite(verb.de, verb.third, person) for person in ("1sg", "3sg", "3pl")}
    checked = 0
    for _, de in sample:
        if match := re.search(r", (?:weil|obwohl|bevor|während|solange) ([^,]*)\.$", de):
            assert match[1].split()[-1] in finite, de
            checked += 1
    assert checked > 200


def test_every_construction_occurs(sample):
    german_text = "\n".join(de for _, de in sample)
    for pattern in (
        r", dass ",
        r" zu \w+en\.",
        r", d(er|ie|as|en|em) ",
        r"kein",
        r"nicht",
        r"und(zwanzig|dreißig)",
        r"^Warum ",
        r", aber ",
    ):
        assert re.search(pattern, german_text, re.MULTILINE), pattern


def test_the_vocabulary_has_a_long_tail(sample):
    words = [word for _, de in sample for word in re.findall(r"\w+", de)]
    counts = {word: words.count(word) for word in set(words)}
    once = sum(count == 1 for count in counts.values())
    assert once > 0.15 * len(counts)


def test_the_same_seed_gives_the_same_text():
    first, again, other = (list(itertools.islice(pairs(seed), 200)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert Grammar(1).pair() == first[0]


def test_the_parts_are_disjoint_and_a_longer_training_text_keeps_the_others(tmp_path):
    sizes = {"train": 300, "valid": 40, "test": 50}
    write_corpus(tmp_path / "a", 7, sizes)
    write_corpus(tmp_path / "b", 7, sizes | {"train": 400})
    text = {part: (tmp_path / "a" / f"{part}.en").read_text().splitlines() for part in sizes}
    assert {part: len(lines) for part, lines in text.items()} == sizes
    assert len(set().union(*text.values())) == sum(sizes.values())
    for part in sizes:
        assert len((tmp_path / "a" / f"{part}.de").read_text().splitlines()) == sizes[part]
    for name in ("test.en", "test.de", "valid.en", "valid.de"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (tmp_path / "b/train.en").read_text().startswith((tmp_path / "a/train.en").read_text())
