"""`lightconv prepare cnndm` on miniatures of the very form of the stories' archives and of the lists of addresses."""

import hashlib
import json
import random
import re
import signal

import pytest

from lightconv_plugin.errors import CorpusError
from lightconv_plugin.recipes.data.cnndm import EXPECTED, RECIPE, parse_story, places, spool_stories, write_parts
from tests.recipes.conftest import ROOT, check_recipes
from tests.recipes.data.archive_server import serve, write_tar
from tests.recipes.data.miniatures import files_of, no_leftovers
from tests.recipes.data.preparations import prepare, stop_at

SIZES = {"train": 60, "val": 8, "test": 7}
NOUNS = "minister police city court company film storm team doctor school".split()
TINY = (
    *("+model.encoder_embed_dim=16", "+model.decoder_embed_dim=16", "+model.encoder_ffn_embed_dim=16"),
    *("+model.decoder_ffn_embed_dim=16", "+model.encoder_layers=2", "+model.decoder_layers=2"),
    *("+model.encoder_attention_heads=4", "+model.decoder_attention_heads=4", "+model.encoder_kernel_size_list=[3,7]"),
    *("+model.decoder_kernel_size_list=[3,7]", "dataset.max_tokens=1000", "dataset.num_workers=0"),
    *("optimization.update_freq=[1]", "optimization.max_update=3", "model.max_source_positions=40"),
    *("task.max_source_positions=40",),
)


def address(i):
    return f"http://web.archive.org/web/2015id_/http://news.example/{i}.html"


def name(i):
    return hashlib.sha1(address(i).encode()).hexdigest()


def story(i):
    """A story of the published form; those whose number ends with 9 are without an article."""
    draw = random.Random(i)

    def sentence():
        words = " ".join(draw.choices(NOUNS, k=draw.randint(3, 9)))
        return f'The {words} don\'t (it said) "wait" in the U.S.'

    paragraphs = [f"(CNN)A story of {i}. {sentence()} {sentence()}", "A caption without an end", f"{sentence()}\r"]
    article = [] if i % 10 == 9 else paragraphs
    blocks = [*article, *(f"@highlight\n\nNumber {i} , the {draw.choice(NOUNS)} of {j}" for j in range(3))]
    return "\n\n".join(blocks).encode()


def numbers():
    """Part → the numbers of its stories; those of val and test have articles."""
    with_article = [i for i in range(200) if i % 10 != 9]
    return {"train": list(range(SIZES["train"])), "val": with_article[90:98], "test": with_article[100:107]}


def write_all(folder):
    """The five files: CNN's archive has the even stories, the other the odd ones, each in an order of its own."""
    everything = [i for part in numbers().values() for i in part]
    random.Random(4).shuffle(everything)
    for archive, kind, rest in (("cnn_stories.tgz", "cnn", 0), ("dailymail_stories.tgz", "dailymail", 1)):
        stories = {f"{kind}/stories/{name(i)}.story": story(i) for i in everything if i % 2 == rest}
        write_tar(folder / archive, {**stories, f"{kind}/stories/._x.story": b"\xff"})
    for part, members in numbers().items():
        (folder / f"all_{part}.txt").write_text("".join(address(i) + "\n" for i in members))
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("cnndm home")


@pytest.fixture
def data(tmp_path):
    return write_all(tmp_path / "data")


@pytest.fixture(scope="module")
def prepared(home, tmp_path_factory):
    """(the prepared folder, what the second run said): the first, by HTTP, is killed as it binarises."""
    out, mirror = home / "prepared, here", write_all(tmp_path_factory.mktemp("cnndm mirror"))
    with serve(files_of(mirror)) as server:
        arguments = ("--mirror", server.address, "--out", out, "--any-size", "--bpe", "150", "--workers", "2")
        status, _ = stop_at("binarise ...", signal.SIGKILL, home, "cnndm", *arguments)
        assert status == -signal.SIGKILL and not (out / "data-bin").exists()
        said = prepare(home, "cnndm", *arguments)
    return out, said, arguments


def test_a_killed_preparation_is_resumed_and_a_third_run_does_no_work(prepared, home):
    out, said, arguments = prepared
    assert "downloading" not in said and "apply BPE: done before" in said and "binarise: done before" not in said
    assert no_leftovers(out)
    said = prepare(home, "cnndm", *arguments)
    titles = ("stories", "tokenise", "learn 150 BPE merges", "apply BPE", "binarise")
    assert said.splitlines() == [f"{title}: done before" for title in titles]


def test_the_parts_are_in_the_order_of_the_lists(prepared):
    out, *_ = prepared
    for part, members in numbers().items():
        part = {"val": "valid"}.get(part, part)
        article = (out / f"raw/{part}.article").read_text().splitlines()
        summary = (out / f"raw/{part}.summary").read_text().splitlines()
        members = [i for i in members if i % 10 != 9]
        assert [int(re.match(r"\(CNN\)A story of (\d+)\.", line)[1]) for line in article] == members
        assert [int(re.match(r"Number (\d+) ,", line)[1]) for line in summary] == members


def test_text_is_tokenised_lower_cased_and_encoded(prepared):
    out, *_ = prepared
    article = (out / "tok/train.article").read_text().splitlines()
    assert article[3].startswith("( cnn ) a story of 3 . the ") and " a caption without an end . the " in article[3]
    assert article[3].endswith('" in the u.s.') and 'don \'t ( it said ) " wait " in' in article[3]
    summary = (out / "tok/test.summary").read_text().splitlines()[0]
    assert re.fullmatch(r"(number \d+ , the \w+ of \d \. ?){3}", summary)
    encoded = (out / "bpe/test.summary").read_text().splitlines()[0]
    assert "@@ " in encoded and encoded.replace("@@ ", "") == summary
    about = json.loads((out / "corpus.json").read_text())
    assert (about["src"], about["tgt"], about["lowercase"], about["bpe"]) == ("article", "summary", True, 150)
    check_recipes(out)


def test_one_dictionary_for_both_sides(prepared):
    data = prepared[0] / "data-bin"
    assert (data / "dict.article.txt").read_bytes() == (data / "dict.summary.txt").read_bytes()
    kinds = {
        f"{part}.article-summary.{side}.idx" for part in ("train", "valid", "test") for side in ("article", "summary")
    }
    assert {path.name for path in data.glob("*.idx")} == kinds
    log = (prepared[0] / "preprocess.log").read_text()
    assert "bpe/train.article: 54 sents" in log and "bpe/test.summary: 7 sents" in log


def test_a_summariser_trains_on_it_and_is_scored(prepared, run_script, tmp_path):
    data = prepared[0] / "data-bin"
    overrides = (f"task.data={data}", f"checkpoint.save_dir={tmp_path / 'run'}", *TINY)
    run_script("train.sh", ROOT / "configs/cnndm/dynamicconv.yaml", *overrides)
    generate = (f"@{ROOT / 'configs/cnndm/generate.args'}", "--max-source-positions", "40", "--beam", "2")
    lengths = ("--min-len", "2", "--max-len-b", "8", "--cpu", "--json")
    done = run_script("evaluate.sh", data, tmp_path / "run/checkpoint_last.pt", *generate, *lengths)
    report = json.loads(done.stdout)
    assert report["n"] == 7 and 0 <= report["rouge1"] <= 100


def refused(home, data, out, *options):
    """The last line of a run that must fail, and leave no text under its final name."""
    said = prepare(home, "cnndm", "--data", data, "--out", out, "--workers", "1", *options, status=2)
    assert not list(out.rglob("*.article")) and not list(out.rglob("stories.tmp"))
    return said.splitlines()[-1]


def rewrite(path, change):
    path.write_text(change(path.read_text()))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (
            lambda data: rewrite(data / "all_val.txt", lambda text: text + address(999) + "\n"),
            rf"1 stories of the lists are not in .*cnn_stories.tgz or .*mail_stories.tgz, the first: {name(999)}.story",
        ),
        (
            lambda data: rewrite(data / "all_val.txt", lambda text: text + address(3) + "\n"),
            r"all_val.txt, line 9: this address is in the lists twice",
        ),
        (
            lambda data: rewrite(data / "all_test.txt", lambda text: "<!DOCTYPE html>\n" + text),
            r"all_test.txt, line 1: expected an address \(http://…\), got '<!DOCTYPE html>'",
        ),
        (lambda data: (data / "all_test.txt").unlink(), r"no file .*all_test.txt"),
        (lambda data: (data / "all_test.txt").write_text(""), r"all_test.txt is empty|all_test.txt is not"),
        (lambda data: (data / "all_test.txt").write_bytes(b"http://\xff\n"), r"all_test.txt is not UTF-8: line 1"),
        (
            lambda data: (data / "cnn_stories.tgz").write_bytes((data / "cnn_stories.tgz").read_bytes()[:-200]),
            r"cnn_stories.tgz is not the expected file: .* cut short",
        ),
        (
            lambda data: write_tar(data / "cnn_stories.tgz", {f"cnn/stories/{name(0)}.story": b"\xff\xfe"}),
            rf"cnn_stories.tgz: cnn/stories/{name(0)}.story is not UTF-8",
        ),
        (
            lambda data: (data / "cnn_stories.tgz").write_bytes((data / "dailymail_stories.tgz").read_bytes()),
            r"dailymail_stories.tgz: the story .* occurs twice",
        ),
    ],
    ids=["missing", "twice", "page", "no-list", "empty", "list-bytes", "cut-short", "story-bytes", "same-archive"],
)
def test_one_clear_line_for_what_is_wrong(home, data, tmp_path, spoil, message):
    spoil(data)
    last = refused(home, data, tmp_path / "out", "--any-size")
    assert re.search("^lightconv prepare: error: ", last) and re.search(message, last), last


def pieces(data, tmp_path):
    """Arguments of write_parts for the files in `data`."""
    archives = [data / "cnn_stories.tgz", data / "dailymail_stories.tgz"]
    lists = {part: data / f"all_{file}.txt" for part, file in (("train", "train"), ("valid", "val"), ("test", "test"))}
    return (
        archives,
        lists,
        {(part, side): tmp_path / f"{part}.{side}" for part in lists for side in ("article", "summary")},
    )


def test_the_published_numbers_of_stories_are_enforced(data, tmp_path):
    archives, lists, outputs = pieces(data, tmp_path)
    with pytest.raises(CorpusError, match=r"train has 54 stories with text, expected 287,113; `any_size` accepts"):
        write_parts(archives, lists, EXPECTED, outputs)
    assert not (tmp_path / "stories.tmp").exists()
    write_parts(archives, lists, {"train": 54, "valid": 8, "test": 7}, outputs)


def test_an_archive_that_ends_inside_a_story_is_named(data, tmp_path):
    archives, lists, _ = pieces(data, tmp_path)
    noise = random.Random(1).randbytes(200_000).hex().encode()  # so that the cut is in the first story
    write_tar(archives[0], {f"cnn/stories/{name(0)}.story": noise})
    archives[0].write_bytes(archives[0].read_bytes()[:100_000])
    with pytest.raises(CorpusError, match=r"cnn_stories.tgz is cut short or damaged"):
        spool_stories(archives, places(lists)[0], tmp_path / "spool")


def test_a_part_without_any_text_is_refused(data, tmp_path):
    archives, lists, outputs = pieces(data, tmp_path)
    lists["test"].write_text(address(9) + "\n")
    lists["train"].write_text(address(1) + "\n")
    with pytest.raises(CorpusError, match=r"all_test.txt: no story of test has text"):
        write_parts(archives, lists, {}, outputs)


@pytest.mark.parametrize("end", list(".!?'`\")\u2019\u201d"))
def test_a_sentence_that_ends_gets_no_full_stop(end):
    assert parse_story(f"Text{end}\n\n@highlight\n\nIt{end}") == ([f"Text{end}"], [f"It{end}"])


def test_a_story_is_taken_apart_as_by_see_et_al():
    text = "One\ttwo \n\n Caption: x\n\n@Highlight\n\nfirst\n\n@highlight\n\nsecond, with \u2028 a line\n\nand more"
    assert parse_story(text) == (["One two .", "Caption: x ."], ["first .", "second, with a line .", "and more ."])
    assert parse_story("@highlight\n\nx") == ([], ["x ."])
    assert parse_story("text") == (["text ."], [])


@pytest.mark.parametrize(
    "raw, tokens",
    [
        ("He left.\tshe said & smiled .", "he left . she said & smiled ."),
        ('It\'s in the U.S. and "done". Next', 'it \'s in the u.s. and " done " . next'),
        ("x\u0085y\u00a0z", "x y z"),
    ],
)
def test_the_tokens(raw, tokens):
    assert RECIPE.tokenise()(raw) == tokens
