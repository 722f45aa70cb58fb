"""Recipes: what each tokeniser does by them, the way back, and reading what a corpus.json holds."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest

from lightconv_plugin.text import moses
from lightconv_plugin.text.recipe import Recipe, lower

RECIPES = [
    Recipe("moses", "de"),
    Recipe("moses", "en", lowercase="last", plain_apostrophe=True),
    Recipe("moses", "en", lowercase="first", normalise=True, keep_last=True),
    Recipe("moses", "de", aggressive=True, plain_apostrophe=True),
    Recipe("sacremoses", "en", lowercase="last"),
    Recipe("jieba", "zh"),
    Recipe("sudachi", "ja"),
    Recipe("none", ""),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_recipe_survives_json(recipe):
    assert Recipe.of_json(json.loads(json.dumps(recipe.as_json()))) == recipe


@pytest.mark.parametrize(
    "known, said",
    [
        ([], "must be a mapping, got []"),
        ({}, "tokeniser is missing: one of moses, sacremoses, jieba, sudachi, none"),
        ({"tokeniser": "moses"}, "lang is missing: a text"),
        (
            {"tokeniser": "perl", "lang": "de"},
            "tokeniser must be one of moses, sacremoses, jieba, sudachi, none, got 'perl'",
        ),
        ({"tokeniser": "moses", "lang": ""}, "lang must be the code of a language, got ''"),
        ({"tokeniser": "none", "lang": None}, "lang must be"),
        ({"tokeniser": "moses", "lang": "de", "lowercase": True}, "lowercase must be one of '', first, last, got True"),
        ({"tokeniser": "moses", "lang": "de", "normalise": "yes"}, "normalise must be true or false, got 'yes'"),
        ({"tokeniser": "moses", "lang": "de", "casing": 1}, "unknown key casing; known: tokeniser, lang, lowercase"),
    ],
)
def test_anything_else_is_refused(known, said):
    with pytest.raises(ValueError) as raised:
        Recipe.of_json(known)
    assert said in str(raised.value)


HARD = ["It’s “well-known” in the U.S.", "Don't  say\t3,5 %!", "", "Ein A&B-Test ...", "Er kam z.B. am 3. Mai."]


@pytest.mark.parametrize(
    "recipe, equal",
    [
        (Recipe("moses", "en"), moses.tokeniser("en")),
        (Recipe("moses", "de", aggressive=True), moses.tokeniser("de", aggressive=True)),
        (Recipe("moses", "de_AT", aggressive=True), moses.tokeniser("de", aggressive=True)),
        (Recipe("moses", "en", lowercase="last"), lambda line: lower(moses.tokeniser("en")(line))),
        (Recipe("moses", "de", lowercase="first"), lambda line: moses.tokeniser("de")(lower(line))),
        (
            Recipe("moses", "de", lowercase="first", normalise=True, keep_last=True),
            lambda line: moses.tokeniser("de", normalise=True, keep_last=True)(lower(line)),
        ),
        (Recipe("none", "", lowercase="first"), lambda line: " ".join(line.lower().split())),
    ],
    ids=lambda given: str(given) if isinstance(given, Recipe) else "",  # a function's name has its address
)
def test_tokenise(recipe, equal):
    plain = Recipe(**{**vars(recipe), "plain_apostrophe": True})
    for line in HARD:
        assert recipe.tokenise()(line) == equal(line)
        assert plain.tokenise()(line) == equal(line.replace("’", "'"))


@pytest.mark.parametrize("text, expected", [("ΑΣ ΣΑΣ İI ẞ Ǆ", "ασ σασ i̇i ß ǆ"), ("ÄÖÜ", "äöü")])
def test_lower_case(text, expected):
    assert lower(text) == expected
    assert Recipe("moses", "en", lowercase="last").tokenise()(text) == expected


def test_the_order_of_the_steps():
    """Lower-case first, every full stop has a small letter after it and stays with its word."""
    text = "Hier ist Dr. Müller. Und „du.“"
    before, after = (Recipe("moses", "de", normalise=True, lowercase=when).tokenise() for when in ("first", "last"))
    assert before(text) == "hier ist dr. müller. und &quot; du &quot; ."
    assert after(text) == "hier ist dr. müller . und &quot; du &quot; ."


def test_sacremoses_escapes_nothing_and_takes_paragraphs_apart():
    tokenise = Recipe("sacremoses", "en", lowercase="last").tokenise()
    assert tokenise('A "man" & I don\'t.\tYes.') == 'a " man " & i don \'t . yes .'


@pytest.mark.parametrize("name", ["moses", "sacremoses"])
def test_detokenise_is_the_way_back(name):
    lines = ['He said: "Yes, (really)!"', "We don't see Anna's 3,5 % | [there] & then."]
    recipe = Recipe(name, "en")
    assert [recipe.detokenise()(recipe.tokenise()(line)) for line in lines] == [lines[0], lines[1].replace("5 %", "5%")]


@pytest.mark.parametrize(
    "lang, line",
    [
        ("hi", "मैं हिन्दी में लिखता हूँ, विद्यालय पृथ्वी ज़्यादा पढ़ना लड़की सिर्फ़ एक"),
        ("bn", "বাংলাদেশের ক্ষুদ্র উৎসব"),
        ("ta", "தமிழ் மக்கள் நாட்டில் வென்றனர்."),
        ("de", "Die A\u0308pfel fu\u0308r Mu\u0308nchens CAFE\u0301, FU\u0308R Rene\u0301 Meier ❤\ufe0f so."),
    ],
)
def test_combining_marks_return_to_their_words(lang, line):
    recipe = Recipe("moses", lang)
    assert recipe.detokenise()(recipe.tokenise()(line)) == line


def test_what_only_tokenising_took_apart_is_joined():
    recipe = Recipe("moses", "en", aggressive=True)
    assert recipe.detokenise()(recipe.tokenise()("state-of-the-art A-B.")) == "state-of-the-art A-B."
    assert Recipe("none", "").detokenise()("a , b") == "a , b"


def test_chinese():
    pytest.importorskip("jieba")
    recipe = Recipe("jieba", "zh")
    tokens = recipe.tokenise()("联合国大会今天讨论了 GPU 机器翻译。")
    assert tokens.split() == ["联合国大会", "今天", "讨论", "了", "GPU", "机器翻译", "。"]
    assert recipe.detokenise()(tokens) == "联合国大会今天讨论了 GPU 机器翻译。"


@pytest.mark.parametrize(
    "line",
    [
        "他说：“你好……”巴拉克·奥巴马花了 50,000 元，COVID-19，Café，Zürich",
        "我住在 New York。——是的，‘好’。",
        "增长 3.5%，10:30 开始，2019-2020 年，使用 GPT-4 和 Python 3 模型",
    ],
)
def test_spaces_that_jieba_puts_around_punctuation_are_removed(line):
    pytest.importorskip("jieba")
    recipe = Recipe("jieba", "zh")
    assert recipe.detokenise()(recipe.tokenise()(line)) == line


def test_japanese():
    pytest.importorskip("sudachipy")
    recipe = Recipe("sudachi", "ja")
    tokens = recipe.tokenise()("1420年、GPU と\u3000画聖 を学んだ。")
    assert tokens.split() == ["1420", "年", "、", "GPU", "と", "画聖", "を", "学ん", "だ", "。"]
    assert recipe.detokenise()(tokens) == "1420年、GPUと画聖を学んだ。"
    assert len(recipe.tokenise()("雪舟は画家。" * 9000).split()) > 30_000, "longer than the library takes at once"
    assert recipe.tokenise()("") == "" and recipe.tokenise()("New York 3.5 %").split() == ["New", "York", "3.5", "%"]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_threads_share_a_tokeniser(recipe):
    for module in {"jieba": ["jieba"], "sudachi": ["sudachipy"]}.get(recipe.tokeniser, []):
        pytest.importorskip(module)
    tokenise, line = recipe.tokenise(), "1420年、GPU と画聖 を学んだ。 It isn't ’so’. " * 100
    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(tokenise, [line] * 12)) == {tokenise(line)}


@pytest.mark.parametrize(
    "name, module, packages",
    [
        ("jieba", "jieba", "jieba"),
        ("sudachi", "sudachipy", "sudachipy sudachidict-core"),
        ("sudachi", "sudachidict_core", "sudachipy sudachidict-core"),
    ],
)
def test_a_missing_segmenter_is_named(name, module, packages, monkeypatch):
    for other in {"jieba", "sudachipy", "sudachidict_core"} - {module}:
        monkeypatch.setitem(sys.modules, other, ModuleType(other))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RuntimeError, match=rf"{module}, which is not installed: pip install {packages}$"):
        Recipe(name, "xx").tokenise()


@pytest.mark.parametrize("name", ["moses", "sacremoses"])
@pytest.mark.parametrize("way", ["tokenise", "detokenise"])
def test_languages_without_rules_are_refused(name, way):
    with pytest.raises(ValueError, match="no rules for the language 'xx'; it has as, bn"):
        getattr(Recipe(name, "xx"), way)()
