"""`lightconv tune`: scores are those of fairseq-generate with `lightconv score`; the search's order; refusals."""

import json
import os
import re

import pytest
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from lightconv_plugin.cli import main
from lightconv_plugin.recipes.tuning import Setting, plainest, search
from lightconv_plugin.scoring.generate_log import Generated

pytest.importorskip("fairseq")

from tests.fairseq_cli import USER_DIR, run

# Beam search with these: a small vocabulary, short sentences.
SEARCH = ["--beam", "2", "--max-len-b", "8", "--cpu"]


@pytest.fixture
def data(toy_data):
    return toy_data


@pytest.fixture
def save_dir(toy_training, tmp_path):
    """A folder of its own with links to the four epochs."""
    folder = tmp_path / "save dir"
    folder.mkdir()
    for path in toy_training.glob("checkpoint[0-9]*.pt"):
        (folder / path.name).hardlink_to(path)
    return folder


def tune(*arguments):
    return main.main(["tune", *map(str, arguments)])


def as_json(capsys, *arguments):
    capsys.readouterr()
    before, rest = arguments, ()
    if "--" in arguments:
        at = arguments.index("--")
        before, rest = arguments[:at], arguments[at:]
    assert tune(*before, "--json", *rest) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    capsys.readouterr()
    assert tune(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()[-1]


def fairseq_generate(data, checkpoint, lenpen, file):
    """The log of fairseq-generate in a process of its own, in a file."""
    log = run(
        *("generate", data, "--user-dir", USER_DIR, "--path", checkpoint, "--gen-subset", "valid"),
        *("--lenpen", lenpen, "--remove-bpe", *SEARCH),
    )
    file.write_text(log, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def log_of_the_last(toy_data, toy_training, tmp_path_factory):
    """What fairseq-generate says with the last checkpoint, which is the mean of one."""
    return fairseq_generate(toy_data, toy_training / "checkpoint4.pt", 1, tmp_path_factory.mktemp("log") / "gen.out")


def scores_of(capsys, log, *options):
    capsys.readouterr()
    assert main.main(["score", "--gen", str(log), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def hypotheses(log):
    return {int(m[1]): m[2] for m in re.finditer(r"^H-(\d+)\t\S+\t(.*)$", log, re.M)}


def test_the_score_is_that_of_fairseq_generate_and_lightconv_score(data, save_dir, tmp_path, capsys):
    from lightconv_plugin.generation.fairseq_generate import generate

    got = as_json(
        capsys, data, save_dir, "--average", 1, 3, "--lenpen", 0, 1, 2, "--by", "chrf", "--output", tmp_path / "result",
        "--", *SEARCH,
    )  # fmt: skip
    assert json.loads((tmp_path / "result").read_text()) == got
    assert (got["metric"], got["subset"], got["lang"]) == ("chrf", "valid", "en")
    assert got["search"] == "the plugin's own search"
    assert [name for name in ("average1.pt", "average3.pt") if (save_dir / name).is_file()] == [
        "average1.pt",
        "average3.pt",
    ]
    assert got["checkpoint"] == str(save_dir / f"average{got['average']}.pt")
    assert {(t["average"], t["lenpen"]) for t in got["tried"]} == {
        (1, 1), (3, 1), (got["average"], 0), (got["average"], 2)
    }  # fmt: skip
    scores = [setting["score"] for setting in got["tried"]]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) > 2 and got["score"] == scores[0] > 0
    setting = got["tried"][-1]
    checkpoint = save_dir / f"average{setting['average']}.pt"
    log = fairseq_generate(data, checkpoint, setting["lenpen"], tmp_path / "gen.out")
    assert setting["score"] == scores_of(capsys, log, "--lang", "en")["chrf"]
    here = generate(data, checkpoint, "valid", [*SEARCH, "--lenpen", str(setting["lenpen"])])
    assert dict(enumerate(here.hypotheses)) == hypotheses(log.read_text())
    assert len(here.hypotheses) == 12


@pytest.mark.parametrize(
    "by, options",
    [
        ("bleu_tok", ["--lowercase", "--compound-split"]),
        ("sacrebleu", []),
        ("rouge1", ["--metric", "rouge", "--no-stem"]),
    ],
)
def test_every_measure_is_that_of_lightconv_score(by, options, data, save_dir, log_of_the_last, capsys):
    given = [option for option in options if option not in ("--metric", "rouge")]
    got = as_json(capsys, data, save_dir, "--by", by, *given, "--", *SEARCH, "--generation-dtype", "float32")
    lang = [] if "rouge" in options else ["--lang", "en"]
    assert got["score"] == scores_of(capsys, log_of_the_last, *lang, *options)[by]
    assert got["tried"] == [{"average": 1, "lenpen": 1.0, "score": got["score"]}]


# ------------------------------------------------------------------------------------------------ the search


def scored(table):
    calls = []

    def score(number, lenpen):
        calls.append((number, lenpen))
        return table[number, lenpen]

    return score, calls


TABLE = {(1, 0.8): 9, (1, 1.0): 5, (1, 1.4): 4, (5, 0.8): 6, (5, 1.0): 7, (5, 1.4): 8}


def test_the_number_is_chosen_at_the_penalty_nearest_1_then_the_penalty():
    score, calls = scored(TABLE)
    tried = search([1, 5], [1.4, 0.8, 1.0], score)
    assert calls == [(1, 1.0), (5, 1.0), (5, 0.8), (5, 1.4)]
    assert [(t.average, t.lenpen, t.score) for t in tried] == [(5, 1.4, 8), (5, 1.0, 7), (5, 0.8, 6), (1, 1.0, 5)]


def test_the_grid_tries_every_pair_once():
    score, calls = scored(TABLE)
    best = search([1, 5], [0.8, 1.0, 1.4], score, grid=True)[0]
    assert sorted(calls) == sorted(TABLE)
    assert (best.average, best.lenpen) == (1, 0.8)


def test_of_equal_scores_fewer_checkpoints_and_the_penalty_nearest_1_win():
    score, _ = scored(dict.fromkeys(TABLE, 7))
    assert [(t.average, t.lenpen) for t in search([5, 1], [1.4, 0.8, 1.0], score)] == [
        (1, 1.0), (1, 0.8), (1, 1.4), (5, 1.0)
    ]  # fmt: skip


def test_the_plainest_of_what_is_as_good():
    """Only penalties of the best number of checkpoints; the best itself if nothing else is as good."""
    tried = [Setting(5, 1.8, 30.0), Setting(5, 1.4, 29.9), Setting(1, 1.0, 29.8), Setting(5, 1.0, 28.0)]
    assert plainest(tried, lambda one, best: best.score - one.score < 0.5) == Setting(5, 1.4, 29.9)
    assert plainest(tried, lambda one, best: True) == Setting(5, 1.0, 28.0)
    assert plainest(tried, lambda one, best: False) == tried[0]


def test_within_the_error_of_the_best(data, save_dir, capsys, monkeypatch):
    """The p-value is sacreBLEU's. 1.8 is the best by chance, 1 as good, 0.6 worse."""
    references = [f"the {n} quick brown foxes jump over {n + 1} lazy dogs" for n in range(60)]
    errors = {0.6: 40, 1.0: 4, 1.8: 3}  # sentences with a wrong word

    def generated(data, checkpoint, subset, options):
        wrong = errors[float(options[-1])]
        lines = [line.replace("lazy", "old") if n < wrong else line for n, line in enumerate(references)]
        return Generated(lines, references, False, None, None)

    monkeypatch.setattr("lightconv_plugin.recipes.tuning.fairseq_generate.generate", generated)
    arguments = [data, save_dir, "--lenpen", 0.6, 1, 1.8]
    assert as_json(capsys, *arguments)["lenpen"] == 1.8
    plain = as_json(capsys, *arguments, "--within", 0.05)
    assert plain["lenpen"] == 1 and plain["score"] < plain["tried"][0]["score"]
    sides = {penalty: generated(None, None, None, [penalty]).hypotheses for penalty in errors}
    results = PairedTest(
        [("best", sides[1.8]), ("plain", sides[1.0])], {"bleu": BLEU(tokenize="none")}, [references], "bs", 1000
    )()[1]
    assert plain["p_value"] == results["BLEU"][1].p_value
    assert as_json(capsys, *arguments, "--within", 0.9)["lenpen"] == 1.8
    tune(*arguments, "--within", 0.05)
    assert "chosen (not worse than the best with p < 0.05: p = 0." in capsys.readouterr().out


def test_lower_is_better_for_perplexity():
    score, _ = scored({(1, None): 30.0, (5, None): 20.0, (10, None): 20.0})
    assert search([1, 10, 5], [None], score, lower=True)[0].average == 5


# ------------------------------------------------------------------------------------------------ averages


def test_an_average_is_kept_while_its_checkpoints_are_the_same(data, save_dir, capsys):
    from lightconv_plugin.checkpoints.averaging import average_once, checkpoints_in_order

    files = checkpoints_in_order(save_dir)
    assert [path.name for path in files] == [f"checkpoint{n}.pt" for n in (4, 3, 2, 1)]
    output = save_dir / "average2.pt"
    assert average_once(files[:2], output, force=True)
    first = output.read_bytes(), output.stat().st_mtime_ns
    assert not average_once(files[:2], output, force=True)
    assert (output.read_bytes(), output.stat().st_mtime_ns) == first
    assert average_once(files[1:3], output, force=True)  # others
    assert average_once(files[:2], output, force=True)
    moment = files[0].stat()
    os.utime(files[0], ns=(moment.st_atime_ns, moment.st_mtime_ns + 1))
    assert average_once(files[:2], output, force=True)  # written since
    output.write_bytes(first[0][:1000])
    assert average_once(files[:2], output, force=True)  # cut off
    assert not average_once(files[:2], output, force=True)


def test_without_epochs_the_last_by_updates_count(toy_training, tmp_path):
    from lightconv_plugin.checkpoints.averaging import checkpoints_in_order

    for name in ("checkpoint_1_50.pt", "checkpoint_2_100.pt", "checkpoint_last.pt", "average1.pt"):
        (tmp_path / name).hardlink_to(toy_training / "checkpoint1.pt")
    assert [path.name for path in checkpoints_in_order(tmp_path)] == ["checkpoint_2_100.pt", "checkpoint_1_50.pt"]


def test_numbers_without_enough_checkpoints_are_left_out_on_demand(data, save_dir, capsys):
    said = refused(capsys, data, save_dir, "--average", 1, 5, "--", *SEARCH)
    assert "--average 5: " in said and "has only 4 checkpoints" in said
    assert not list(save_dir.glob("average*"))
    said = refused(capsys, data, save_dir, "--average", 9, 5, "--skip-missing")
    assert "has only 4 checkpoints" in said
    assert tune(data, save_dir, "--average", 1, 5, "--skip-missing", "--json", "--", *SEARCH) == 0
    out, err = capsys.readouterr()
    assert [setting["average"] for setting in json.loads(out)["tried"]] == [1]
    assert "the average of 5 is left out: there are only 4 checkpoints" in err


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--subset", "test"], "--subset test: settings chosen on a test set"),
        (["--subset", "dev"], "has no subset dev; it has test, train, valid"),
        (["--average", "2", "2"], "--average has a value twice: 2 2"),
        (["--lenpen", "1", "1.0"], "--lenpen has a value twice: 1 1"),
        (["--lang", "xx"], "--lang: Moses has no rules for the language 'xx'"),
        (["--no-stem"], "--no-stem is not valid with --by bleu_tok"),
        (["--by", "rougeL", "--lowercase"], "--lowercase is not valid with --by rougeL"),
        (["--by", "perplexity", "--lenpen", "1"], "--lenpen is not valid with --by perplexity"),
        (["--by", "perplexity"], "dict.txt is missing"),
        (["--within", "1"], "--within must be 0 to below 1, got 1"),
        (["--within=-0.1"], "--within must be 0 to below 1, got -0.1"),
        (["--by", "rougeL", "--within", "0.05"], "--within must be 0 with rougeL: the test is for bleu_tok"),
        (["--", "--baem", "4"], "in the options for fairseq-generate: unrecognized arguments: --baem 4"),
        (["--", "--lenpen", "4"], "--lenpen is set by this command"),
        (["--", "--path=x"], "--path is set by this command: remove it from the options of fairseq-generate"),
        (["--", "--tokenizer", "moses"], "--detok is missing: the text is from fairseq-generate with --bpe or"),
        (["--", "--max-source-positions", "3", "--cpu"], "fairseq-generate failed for"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(arguments, said, data, save_dir, capsys):
    assert said in refused(capsys, data, save_dir, *arguments)
    assert "--max-source-positions" in arguments or not list(save_dir.glob("average*"))


def test_threads_wait_as_in_the_other_commands(data, save_dir, capsys, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    refused(capsys, data, save_dir, "--subset", "dev")
    assert os.environ["OMP_WAIT_POLICY"] == "passive"


def test_a_language_that_sacrebleu_cannot_score_is_refused_before_any_work(data, save_dir, capsys, monkeypatch):
    def without_mecab(**options):
        raise RuntimeError("please install sacrebleu[ja]")

    monkeypatch.setattr("sacrebleu.metrics.BLEU", without_mecab)
    assert "cannot score language 'ja': please install" in refused(
        capsys, data, save_dir, "--lang", "ja", "--", *SEARCH
    )
    assert not list(save_dir.glob("average*"))


def test_text_without_references_is_refused_before_any_work(data, save_dir, tmp_path, capsys, refusal):
    """As fairseq-preprocess --only-source leaves it."""
    (tmp_path / "source").mkdir()
    for path in data.iterdir():
        if not path.name.startswith("valid.de-en.en."):
            (tmp_path / "source" / path.name).symlink_to(path)
    for by in ("bleu_tok", "rougeL"):
        said = refused(capsys, tmp_path / "source", save_dir, "--by", by, "--", *SEARCH)
        assert f"{tmp_path / 'source'} has no references for valid: binarise its en side too" in said
    said = refusal("evaluate", tmp_path / "source", save_dir / "checkpoint4.pt", "--subset", "valid")
    assert "has no references for valid: binarise its en side too" in said
    assert all(re.fullmatch(r"checkpoint\d\.pt", path.name) for path in save_dir.iterdir())


def test_places_that_are_not_there(data, save_dir, tmp_path, capsys):
    output = tmp_path / "none/file"
    assert f"there is no folder {output.parent}" in refused(capsys, data, save_dir, "--output", output)
    assert "no folder" in refused(capsys, tmp_path / "none", save_dir)
    assert "no folder" in refused(capsys, data, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "has no checkpoints named checkpointEPOCH.pt or" in refused(capsys, data, tmp_path / "empty")


def test_a_test_set_is_tuned_on_only_by_order(data, save_dir, capsys):
    got = as_json(capsys, data, save_dir, "--subset", "test", "--allow-test", "--", *SEARCH)
    assert got["subset"] == "test"
