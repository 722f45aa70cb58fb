"""moses.py against recorded outputs of Moses' Perl scripts (mosesdecoder 3445289), runs of white space made one space.

To record: `printf '%s\n' TEXT | perl tokenizer.perl -q -l LANG`, normalize-punctuation.perl -l LANG, and so on.
"""

import random

import pytest

from lightconv_plugin.text import moses

TOKENISED = [
    ("en", "He lives in the U.S.", "He lives in the U.S ."),
    ("en", "The U.S. is big, No. 5 too, no. It is.", "The U.S. is big , No. 5 too , no . It is ."),
    ("en", "Mr. Smith isn't at 5 p.m. on Nov. 3rd.", "Mr. Smith isn &apos;t at 5 p.m. on Nov. 3rd ."),
    (
        "en",
        "'tis the dogs' bone' 'and it's John's 1990's 'quote.'",
        "&apos;tis the dogs &apos; bone &apos; &apos; and it &apos;s John &apos;s 1990 &apos;s &apos; quote . &apos;",
    ),
    ("en", "5' '6 and a' 'b", "5 &apos; &apos;6 and a &apos; &apos; b"),
    ("en", "wait... what?.. no....'s", "wait ... what ? .. no .... &apos; s"),
    ("en", "A,B,C 5,300 ,5 x,5 5,x 7,", "A , B , C 5,300 , 5 x , 5 5 , x 7 ,"),
    ("en", ",5 starts", ",5 starts"),
    (
        "en",
        'a&b <i>|x|</i> [1] "q" `w`',
        "a &amp; b &lt; i &gt; &#124; x &#124; &lt; / i &gt; &#91; 1 &#93; &quot; q &quot; `w`",
    ),
    ("en", "state-of-the-art x- -y 3-4", "state-of-the-art x- -y 3-4"),
    ("en", "中文 and 日本 no\xa0break\u2028here\ttab", "中文 and 日本 no break here tab"),
    ("en", "a\x01b\x1cc d \x02 e", "abc d e"),
    ("en", "don't-know o'clock x'.", "don &apos;t-know o &apos;clock x &apos; ."),
    ("en", "etc.) and (etc.) lower etc., Upper vs. 3", "etc . ) and ( etc . ) lower etc . , Upper vs. 3"),
    ("en", "👍 x́ ½ Ⅷ ª ⓐ \u200b\xad", "👍 x ́ ½ Ⅷ ª ⓐ \u200b \xad"),
    ("en", "...", "..."),
    ("en", ".", "."),
    ("en", "pp. 3 pp. x Pp. Big", "pp. 3 pp. x Pp . Big"),
    (
        "de",
        "Er sagt's z.B. am 3. Mai usw. Und Dr. Müller, Nr. 5.",
        "Er sagt &apos; s z.B. am 3. Mai usw. Und Dr. Müller , Nr. 5 .",
    ),
    ("de", "Das ist's. Und 'so' geht es.", "Das ist &apos; s. Und &apos; so &apos; geht es ."),
    ("de", "St. Pauli hat 3,5 Mio. Euro", "St. Pauli hat 3,5 Mio. Euro"),
    (
        "fr",
        "L'eau d'Evian, c'est 5 % d'aujourd'hui' 'x",
        "L&apos; eau d&apos; Evian , c&apos; est 5 % d&apos; aujourd&apos; hui &apos; &apos; x",
    ),
    ("fi", "USA:n 20:een EU:ssa S: a :b 12:30 X:Y", "USA:n 20:een EU:ssa S : a :b 12 : 30 X : Y"),
    ("sv", "USA:s Ö. Nu kl. 5", "USA:s Ö . Nu kl. 5"),
    ("so", "ma'aan 'a b' ku'", "ma&apos;aan &apos; a b &apos; ku&apos;"),
    ("it", "all' alba l'a dell'Arch. Bo es. Uno", "all &apos; alba l&apos; a dell&apos; Arch . Bo es . Uno"),
    ("zh", "你好，世界。5,000 No. 3", "你好 ， 世界 。 5,000 No. 3"),
    ("es", "gr. Uno Sr. Pérez, pág. 5", "gr . Uno Sr. Pérez , pág. 5"),
]
AGGRESSIVE = [
    ("en", "state-of-the-art x- -y 3-4 a--b é-ß", "state @-@ of @-@ the @-@ art x- -y 3 @-@ 4 a--b é @-@ ß"),
    ("de", "T-Shirt E-Mail-Adresse - 5-6", "T @-@ Shirt E @-@ Mail @-@ Adresse - 5 @-@ 6"),
]
BEFORE_2018 = [
    ("en", "He lives in the U.S.", "He lives in the U.S."),
    (
        "de",
        "Er sagt's z.B. am 3. Mai usw. Und Dr. Müller, Nr. 5.",
        "Er sagt &apos; s z.B. am 3. Mai usw. Und Dr. Müller , Nr. 5.",
    ),
]
NORMALISED = [
    ("en", 'He said "yes". And "no", "x"...', 'He said "yes." And "no," "x..."'),
    ("en", "It’s ‘so’ “good” – really—yes… ´´ ''", 'It\'s \'so" "good" - really - yes... " " '),
    ("en", "( a ) , (b) . 5 % : ; x ;", " (a), (b). 5%:; x;"),
    ("en", "« a » «b»  two  5\xa0000 nº\xa05 \xa0% 3\xa0cm,\xa0x", '" a " "b" two 5.000 nº 5 % 3 cm, x'),
    ("en", "`a' ``b''", "'a' \" b \" "),
    ("de", "Er sagte: „Ja.“", 'Er sagte: "Ja".'),
    ("de", "Er sagte: „Ja.“ Und „nein“, „so“.", 'Er sagte: "Ja". Und "nein", "so".'),
    ("de", '"a," sagt er "b." <i> ."<', '"a", sagt er "b". <i> ."<'),
    ("de", "5\xa0000 1. 5 %", "5,000 1. 5%"),
    ("fr", "« Oui » dit-il : « non ! »\xa0?", '" Oui " dit-il: " non ! "?'),
    ("cs", '"a," b ".', '"a," b ".'),
    ("ru", 'он "да," и "нет." x 5\xa06', 'он "да", и "нет". x 5.6'),
    ("fi", '"a," "b." x', '"a", "b". x'),
    ("en", "٣ % 5 ٣\xa0٣", "٣ % 5 ٣\xa0٣"),
    ("en", "a\rb", "ab"),
]
PRINTING = [("a\xadb\u200bc\ufeff\x01\td", "a b c   d"), ("x\ue000y\U000e0001z", "x y z")]


@pytest.mark.parametrize("lang, text, expected", TOKENISED)
def test_tokenised_as_by_perl(lang, text, expected):
    assert moses.tokeniser(lang)(text) == expected


@pytest.mark.parametrize("lang, text, expected", AGGRESSIVE)
def test_hyphens(lang, text, expected):
    assert moses.tokeniser(lang, aggressive=True)(text) == expected


@pytest.mark.parametrize("lang, text, expected", BEFORE_2018)
def test_full_stop_at_the_end_as_before_2018(lang, text, expected):
    assert moses.tokeniser(lang, keep_last=True)(text) == expected


@pytest.mark.parametrize("lang, text, expected", NORMALISED)
def test_normalised_as_by_perl(lang, text, expected):
    assert moses._normaliser(lang)(text) == expected


@pytest.mark.parametrize("text, expected", PRINTING)
def test_non_printing_characters(text, expected):
    tokenise = moses.tokeniser("en", remove_non_printing=True)
    assert tokenise(text) == " ".join(expected.split())


def test_what_was_seen_before_changes_nothing(monkeypatch):
    """The tokeniser remembers words: any order of lines, and forgetting in between, gives the same."""
    monkeypatch.setattr(moses, "_CACHED_WORDS", 7)
    lines = [text for lang, text, _ in TOKENISED if lang == "en"]
    expected = {text: tokens for lang, text, tokens in TOKENISED if lang == "en"}
    tokenise, chance = moses.tokeniser("en"), random.Random(3)
    for _ in range(20):
        chance.shuffle(lines)
        assert [tokenise(line) for line in lines] == [expected[line] for line in lines]


def test_lines_joined_from_words_equal_the_rules_on_the_whole_line():
    """The words' memory against the rules applied to whole lines, on lines of hard words in any order."""
    words = (
        "U.S. No. no. 5 5. 5,300 ,5 5, x, 'a b' ' '' 's it's l'eau z.B. Dr. pp. ... a.. ..b (a.) (etc. x-y & a.' ß Ä ٣"
    )
    chance = random.Random(7)
    for lang in ("en", "de", "fr", "fi"):
        tokeniser = moses._Tokeniser(lang)
        for _ in range(400):
            line = " ".join(chance.choices(words.split(), k=chance.randint(1, 7)))
            assert tokeniser(line) == tokeniser._tokens(line)


@pytest.mark.parametrize("lang", ["ca", "tdt"])
def test_languages_with_rules_of_their_own_are_refused(lang):
    with pytest.raises(ValueError, match=f"no tokenising of '{lang}'"):
        moses.tokeniser(lang)


def test_blank_lines_stay_one_line():
    assert [moses.tokeniser("en", normalise=True)(text) for text in ("", " \t ", "\u2028")] == ["", "", ""]
