"""The arithmetic of a row, the table of all rows, and what a protocol may say."""

import json
import shlex
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.data.tasks import TASKS, parse, variant_of
from lightconv_plugin.recipes.reproduce.protocol import (
    load_yaml,
    read_protocol,
    row_digest,
    settings_of,
)
from lightconv_plugin.recipes.reproduce.rows import (
    add_row,
    best_seed,
    read_rows,
    summarise,
    with_earlier_seeds,
    write_row,
)
from lightconv_plugin.recipes.reproduce.table import write_table
from lightconv_plugin.scoring.measuring import Measuring
from tests import ROOT
from tests.recipes.reproduce.reproduction_world import CONFIG, PROTOCOL, task


def run(seed, valid, bleu, sacre=30.0, **changes):
    test = {"bleu_tok": bleu, "sacrebleu": sacre, "chrf": 50.0}
    facts = {"updates": 100, "tokens_per_second": 2000.4, "train_seconds": 90.0, "gpus": [], "threads": 2}
    known = {"seed": seed, "valid": valid, "average": 5, "lenpen": 1.0, "test": test, "parameters": 1234567}
    return known | facts | changes


def row(runs, folder, system, name="task", **changes):
    protocol = read_protocol(folder)
    known = {
        "task": name,
        "system": system,
        "system_title": protocol.title_of(system),
        "title": protocol.title,
        "measure": protocol.measure,
        "test": protocol.test,
        "metric": protocol.metric,
        "by": protocol.by,
        "config": f"{name}/{system}",
        "overrides": [],
        "digest": row_digest(protocol, system, settings_of(CONFIG, [])),
        "runs": runs,
        "summary": summarise(runs, protocol.metric),
        "signatures": ["tok:13a", "nc:6"],
        "versions": [{"torch": "2.13.0", "commit": None}],
    }
    return known | changes


def test_the_best_seed_is_best_on_valid_not_on_test():
    runs = [run(1, 30.0, 28.0), run(2, 31.0, 27.0), run(3, 31.0, 29.0)]
    found = summarise(runs, "bleu")
    assert found["best_seed"] == 2, "the first of equals"
    assert found["test_of_best_seed"]["bleu_tok"] == 27.0
    assert found["test"]["bleu_tok"] == {"mean": 28.0, "sd": 1.0}
    assert found["valid"]["mean"] == pytest.approx(92 / 3)
    assert best_seed(runs, "perplexity")["seed"] == 1, "the lowest perplexity is the best"


TABLE = """\

## A task

tokenised BLEU; test: newstest. Configurations: `configs/task`.

The systems differ in the mixer alone.

| system         |   seeds |        valid |         test |   best on valid |   paper |   average \
|   lenpen |    sacreBLEU |        chrF2 |   parameters |   updates |
|:---------------|--------:|-------------:|-------------:|----------------:|--------:|----------:\
|---------:|-------------:|-------------:|-------------:|----------:|
| LightConv*     |       1 |        29.00 |        28.00 |           28.00 |    34.8 |         5 \
|      0.6 |        30.00 |        50.00 |    1,234,567 |       100 |
| DynamicConv    |       2 | 30.50 ± 0.71 | 29.00 ± 1.41 |           30.00 |    35.2 |     5, 10 \
|        1 | 31.00 ± 1.41 | 50.00 ± 0.00 |    1,234,567 |       100 |
| self-attention |       – |            – |            – |               – |    34.4 |         – \
|        – |            – |            – |            – |         – |

```sh
lightconv reproduce task/lightweightconv --seeds 1
lightconv reproduce task/dynamicconv --seeds 1 2
lightconv reproduce task/transformer --seeds 1 2 3  # not run
```

- paper: Wu et al. 2019, Pay Less Attention with Lightweight and Dynamic Convolutions.
- signature: `tok:13a`
- signature: `nc:6`
- training of LightConv: seed 1: 2,000 tokens/s, 1.5 min (8 × A GPU).
- training of DynamicConv: seed 1: 2,000 tokens/s, 1.5 min (2 threads).
- versions: torch 2.12.0, commit abc (LightConv).
- versions: torch 2.13.0 (DynamicConv).
"""


def test_the_table(tmp_path):
    folder = task(tmp_path / "configs/task", ("lightweightconv", "dynamicconv", "transformer"), systems=...)
    runs = [run(1, 30.0, 28.0), run(2, 31.0, 30.0, 32.0, average=10, tokens_per_second=None)]
    write_row(tmp_path / "results", row(runs, folder, "dynamicconv"))
    old = row([run(1, 29.0, 28.0, lenpen=0.6, gpus=["A GPU"] * 8)], folder, "lightweightconv", digest="another")
    write_row(tmp_path / "results", old | {"versions": [{"torch": "2.12.0", "commit": "abc"}]})
    table = tmp_path / "RESULTS.md"
    text = write_table(tmp_path / "results", table, tmp_path / "configs")
    assert text == table.read_text(encoding="utf-8")
    assert text[text.index("\n## ") :] == TABLE
    head = text[: text.index("\n## ")]
    assert "– means not run" in head and "sample standard deviation" in head and "not measured here" in head
    assert write_table(tmp_path / "results", table, tmp_path / "configs") == text
    write_row(tmp_path / "results", row([run(1, 30.0, 28.0, threads=None)], folder, "dynamicconv"))
    text = write_table(tmp_path / "results", table, tmp_path / "configs")
    assert "training of DynamicConv" not in text, "a speed on nobody knows what"


NOT_RUN = """
## Not run

One command each, such as the one below; costs: `benchmarks/COSTS.md`. The figures are the papers'.

| task   | configurations   | test     | measure        |   LightConv |   DynamicConv |   TaLK \
|   self-attention |     others |
|:-------|:-----------------|:---------|:---------------|------------:|--------------:|-------:\
|-----------------:|-----------:|
| A task | `configs/other`  | newstest | tokenised BLEU |        34.8 |             – |      – \
|                – | tiny: 35.5 |

```sh
lightconv reproduce other/lightweightconv --seeds 1 2 3
```

- paper: Wu et al. 2019, Pay Less Attention with Lightweight and Dynamic Convolutions: LightConv on A task.
- paper: Lioutas & Guo 2020, Time-aware Large Kernel Convolutions: tiny on A task.
"""


def test_the_command_of_a_row_of_other_data(tmp_path):
    folder = task(tmp_path / "configs/task", ("dynamicconv",), systems=...)
    changes = {"overrides": ["task.data=/x/data-bin"], "prepare_options": "--bpe 9"}
    write_row(tmp_path / "results", row([run(1, 30.0, 28.0)], folder, "dynamicconv", **changes))
    text = write_table(tmp_path / "results", tmp_path / "RESULTS.md", tmp_path / "configs")
    options = "--runs DIR '--prepare-options=--bpe 9' task.data=/x/data-bin"
    assert f"\nlightconv reproduce task/dynamicconv --seeds 1 {options}\n" in text and "DynamicConv*" not in text


def test_tasks_that_were_not_run(tmp_path):
    task(tmp_path / "configs/other", ("lightweightconv", "tiny"), systems={"tiny": {"paper": "TaLK"}})
    folder = task(tmp_path / "configs/task", ("dynamicconv",), systems=...)
    write_row(tmp_path / "results", row([run(1, 30.0, 28.0)], folder, "dynamicconv"))
    text = write_table(tmp_path / "results", tmp_path / "RESULTS.md", tmp_path / "configs")
    assert text.count("\n## ") == 2, "what was run comes first"
    assert text[text.index("\n## Not run") :] == NOT_RUN


def test_the_table_of_summaries_and_of_language_models(tmp_path):
    tune = {"average": [1], "lenpen": [2.0], "by": "rougeLsum"}
    folder = task(tmp_path / "configs/sums", metric="rouge", tune=tune, paper="CNN-DailyMail", score=...)
    scores = {"rouge1": 39.0, "rouge2": 16.0, "rougeLsum": 36.0}
    write_row(tmp_path / "results", row([run(1, 35.0, 0) | {"test": scores}], folder, "dynamicconv", "sums"))
    tune = {"average": [1], "by": "perplexity"}
    folder = task(tmp_path / "configs/words", metric="perplexity", tune=tune, paper="WikiText-103", generate=[])
    runs = [run(1, 26.0, 0, lenpen=None) | {"test": {"perplexity": 25.5}}]
    write_row(tmp_path / "results", row(runs, folder, "dynamicconv", "words"))
    text = write_table(tmp_path / "results", tmp_path / "RESULTS.md", tmp_path / "configs")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    sums, words = lines[0], lines[4]
    assert "lenpen" in sums and "sacreBLEU" not in sums and "lenpen" not in words
    assert "39.00 / 16.00 / 36.00" in lines[2] and "39.84/16.25/36.73" in lines[2]
    assert "25.50" in lines[6] and "25.0 |" in lines[6] and "23.3 |" in lines[7]


def test_systems_come_in_the_order_of_their_protocol(tmp_path):
    """The papers' own come first, as everywhere; a row that the protocol no longer has comes last."""
    systems = {"whole": {"paper": None}, "half": {"paper": None}}
    folder = task(tmp_path / "configs/task", ("whole", "half", "transformer", "former"), systems=systems)
    for name in ("former", "half", "whole", "transformer"):
        written = row([run(1, 30.0, 28.0)], folder, "half") | {"system": name, "system_title": name}
        write_row(tmp_path / "results", written)
    text = write_table(tmp_path / "results", tmp_path / "RESULTS.md", tmp_path / "configs")
    shown = [line.split("|")[1].strip().rstrip("*") for line in text.splitlines() if line.startswith("|")][2:]
    assert shown == ["self-attention", "whole", "half", "former"]


def test_a_table_of_your_own_tasks(tmp_path):
    """Each row by the configuration that it names: two tasks, one of them with the name of a published one."""
    published, places = task(tmp_path / "configs/task"), {}
    for name in ("task", "other"):
        folder = task(tmp_path / "mine" / name, ("dynamicconv", "talkconv"), title=f"My {name}", measure="my BLEU")
        places[name] = folder
        written = row([run(1, 30.0, 28.0)], folder, "dynamicconv", name, config=f"{folder}/dynamicconv.yaml")
        write_row(tmp_path / "results", written)
    text = write_table(tmp_path / "results", tmp_path / "RESULTS.md", tmp_path / "configs", not_run=False)
    for name, folder in places.items():
        assert f"## My {name}\n\nmy BLEU; test: newstest. Configurations: `{folder}`." in text
        assert f"lightconv reproduce {folder}/dynamicconv.yaml --seeds 1 --runs DIR\n" in text
        assert f"lightconv reproduce {folder}/talkconv.yaml --seeds 1 2 3 --runs DIR  # not run\n" in text
    assert "DynamicConv*" not in text and "Not run" not in text

    write_row(tmp_path / "results", row([run(1, 30.0, 28.0)], published, "talkconv"))
    text = write_table(tmp_path / "results", tmp_path / "RESULTS.md", tmp_path / "configs", not_run=False)
    assert "## A task" in text and "*" not in text.split("\n## ", 1)[1]

    for damaged in ("a: [1", ""):
        (places["other"] / "dynamicconv.yaml").write_text(damaged)
        text = write_table(tmp_path / "results", tmp_path / "RESULTS.md", tmp_path / "configs", not_run=False)
        assert "## My other" in text and text.count("DynamicConv*") == 1

    (places["other"] / "protocol.yaml").write_text("gone: wrong\n")
    text = write_table(tmp_path / "results", tmp_path / "RESULTS.md", tmp_path / "configs", not_run=False)
    assert "## My other" in text and text.count("DynamicConv*") == 1


def test_the_miniature_is_not_among_the_results(tmp_path):
    task(tmp_path / "configs/smoke")
    assert "## " not in write_table(tmp_path / "results", tmp_path / "RESULTS.md", tmp_path / "configs")


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not a row of lightconv reproduce (JSONDecodeError"),
        ("[]", "is not a row of lightconv reproduce (TypeError"),
        ('{"task": "a"}', "is not a row of lightconv reproduce (KeyError: 'system')"),
        ('{"task": "a", "system": "b"}', "has the row of a/b, which belongs in"),
    ],
)
def test_a_file_that_is_no_row(tmp_path, content, message):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/b.json").write_text(content)
    with pytest.raises(InputError) as error:
        read_rows(tmp_path)
    assert message in str(error.value) and str(tmp_path / "x/b.json") in str(error.value)


def test_a_protocol(tmp_path):
    protocol = read_protocol(task(tmp_path / "task"))
    assert protocol.prepare == "x --bpe 100"
    assert protocol.generate_of("dynamicconv") == ["--beam", "5"]
    assert protocol.generate_of("talkconv") == ["--beam", "5", "--beam", "4"]
    assert (protocol.tune.average, protocol.tune.lenpen, protocol.tune.grid) == ((1, 5), (0.6, 1.0), False)
    assert protocol.measuring() == Measuring(compound_split=True)
    assert protocol.published("dynamicconv")[0] == {"bleu": "35.2"}
    assert list(protocol.systems) == ["dynamicconv", "talkconv"]


def test_whose_figure_stands_beside_a_system(tmp_path):
    """The published TaLK for summaries is the deep one."""
    systems = {"talkconv": {"paper": None}, "talkconv_deep": {"paper": "TaLK", "title": "TaLK, deep"}}
    folder = task(tmp_path / "task", ("talkconv", "talkconv_deep"), systems=systems)
    protocol = read_protocol(folder)
    assert protocol.published("talkconv") == ({}, "")
    assert protocol.published("talkconv_deep")[0] == {"bleu": "35.5"}
    assert protocol.title_of("talkconv_deep") == "TaLK, deep" and protocol.title_of("talkconv") == "TaLK"


def tuning(**changes):
    return PROTOCOL["tune"] | changes


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"beam": 5}, "unknown key beam; known: prepare, metric"),
        ({"systems": {"talkconv": {"beam": 4}}}, "unknown key systems.talkconv.beam; known: title, generate, paper"),
        ({"prepare": ...}, "prepare is missing: a text"),
        ({"tune": ...}, "tune is missing: a mapping"),
        ({"metric": "meteor"}, "metric must be one of bleu, rouge, perplexity, got 'meteor'"),
        ({"generate": "--beam 5"}, "generate must be a list, each item a text or a whole number or a number, got '--b"),
        ({"tune": [1]}, "tune must be a mapping, got [1]"),
        ({"tune": tuning(average=[])}, "tune.average must be a list of different positive whole numbers, got []"),
        ({"tune": tuning(average=[0])}, "tune.average must be a list of different positive whole numbers, got [0]"),
        ({"tune": tuning(average=[1, 1])}, "tune.average must be a list of different positive whole numbers"),
        ({"tune": tuning(average=[True])}, "tune.average must be a list, each item a whole number, got [True]"),
        ({"tune": tuning(lenpen=[])}, "tune.lenpen must be a list of different numbers, got []"),
        ({"tune": tuning(by="rouge1")}, "tune.by must be one of bleu_tok, sacrebleu, chrf, got 'rouge1'"),
        ({"tune": tuning(by="perplexity"), "metric": "perplexity"}, "tune.lenpen must be an empty list"),
        ({"tune": tuning(grid="yes")}, "tune.grid must be true or false, got 'yes'"),
        ({"measure": ""}, "measure must be a text, got ''"),
        ({"paper": "IWSLT"}, "paper must be null or one of WMT16 En-De,"),
        (
            {"systems": {"talkconv": {"paper": "Talk"}}},
            "systems.talkconv.paper must be null or one of 'LightConv', ",
        ),
        ({"systems": {"big": {}}}, "systems.big has no configuration"),
        ({"systems": {"talkconv": 4}}, "systems.talkconv must be a mapping, got 4"),
    ],
)
def test_a_protocol_that_cannot_be_followed(tmp_path, changes, message):
    folder = task(tmp_path / "task", **changes)
    with pytest.raises(InputError) as error:
        read_protocol(folder)
    assert str(error.value).startswith(f"{folder / 'protocol.yaml'}: ") and message in str(error.value)


@pytest.mark.parametrize("text", ["a: [", "- a", ""], ids=["no-yaml", "a-list", "empty"])
def test_a_protocol_that_is_none(tmp_path, text):
    (tmp_path / "protocol.yaml").write_text(text)
    with pytest.raises(InputError, match=r"protocol\.yaml"):
        read_protocol(tmp_path)


def test_every_protocol_of_the_project_is_valid():
    folders = sorted(path.parent for path in (ROOT / "configs").rglob("protocol.yaml"))
    assert ROOT / "configs/smoke" in folders
    for folder in folders:
        task, *options = shlex.split(read_protocol(folder).prepare)
        args = parse(task, options)
        own = options[options.index("--out") + 1] if "--out" in options else None
        corpus = own or TASKS[task].out.format(variant=variant_of(task, args))
        # What students are trained on is made of it, by `lightconv distill`.
        prepared = f"{corpus}_distilled/data-bin" if folder.name == "student" else f"{corpus}/data-bin"
        for system in read_protocol(folder).systems:
            config = load_yaml(folder / f"{system}.yaml")["task"]
            assert config["data"] == prepared
            if task == "parallel":
                assert (config["source_lang"], config["target_lang"]) == (args.src, args.tgt)


def test_a_row_is_written_whole(tmp_path):
    known = row([run(1, 1.0, 2.0)], task(tmp_path / "configs/task"), "dynamicconv")
    path = write_row(tmp_path / "results", known)
    assert json.loads(path.read_text(encoding="utf-8")) == known
    assert [p.name for p in path.parent.iterdir()] == ["dynamicconv.json"]
    assert read_rows(tmp_path / "results") == {"task": {"dynamicconv": known}}


@pytest.fixture
def other_day(tmp_path):
    """(the folder of results, a row there with seeds 1 and 2 by one commit, how to make a row of the same task)."""
    folder = task(tmp_path / "configs/task")

    def made(*runs, **changes):
        return row(list(runs), folder, "dynamicconv", **changes)

    known = made(run(1, 30.0, 28.0), run(2, 31.0, 27.0), versions=[{"commit": "a"}], signatures=["tok:13a"])
    write_row(tmp_path / "results", known)
    return tmp_path / "results", known, made


def test_a_row_grows_by_seeds_of_another_day(other_day):
    results, known, made = other_day
    new = made(run(2, 33.0, 31.0), run(0, 29.0, 30.0), versions=[{"commit": "b"}])
    found = with_earlier_seeds(results, new)
    assert [(one["seed"], one["valid"]) for one in found["runs"]] == [(0, 29.0), (1, 30.0), (2, 33.0)]
    assert found["summary"] == summarise(found["runs"], "bleu") and found["summary"]["best_seed"] == 2
    assert found["versions"] == [{"commit": "a"}, {"commit": "b"}] and found["signatures"] == ["tok:13a", "nc:6"]
    assert {key: found[key] for key in ("digest", "title")} == {key: known[key] for key in ("digest", "title")}


def test_rows_that_end_at_the_same_moment_keep_all_seeds(other_day):
    results, _, made = other_day
    rows = [made(run(seed, 30.0, 28.0)) for seed in range(3, 9)]
    with ThreadPoolExecutor(len(rows)) as pool:
        paths = list(pool.map(lambda one: add_row(results, one), rows))
    assert set(paths) == {results / "task/dynamicconv.json"}
    assert [one["seed"] for one in read_rows(results)["task"]["dynamicconv"]["runs"]] == [*range(1, 9)]


def test_how_the_same_overrides_are_written_does_not_matter(other_day):
    results, known, made = other_day
    write_row(results, known | {"overrides": ["a=0.1", "b=2"]})
    found = with_earlier_seeds(results, made(run(3, 33.0, 31.0), overrides=["++b=2", "a=1e-1"]))
    assert [one["seed"] for one in found["runs"]] == [1, 2, 3]


@pytest.mark.parametrize("change", [{"digest": "other"}, {"config": "task/other"}])
def test_seeds_of_another_configuration_are_replaced(other_day, change):
    results, _, made = other_day
    new = made(run(3, 33.0, 31.0), **change)
    assert with_earlier_seeds(results, new) == new


def test_seeds_of_other_data_are_replaced(other_day):
    """Those from before rows named their data stay."""
    results, _, made = other_day
    write_row(results, made(run(1, 30.0, 28.0), run(2, 31.0, 27.0, data="a"), run(4, 31.0, 27.0, data="b")))
    found = with_earlier_seeds(results, made(run(3, 33.0, 31.0, data="a")))
    assert [one["seed"] for one in found["runs"]] == [1, 2, 3]
    found = with_earlier_seeds(results, made(run(3, 33.0, 31.0, data="a", references="r")))
    assert [one["seed"] for one in found["runs"]] == [1, 2, 3], "those from before rows named their references"
    write_row(results, found)
    found = with_earlier_seeds(results, made(run(4, 33.0, 31.0, data="a", references="s")))
    assert [one["seed"] for one in found["runs"]] == [1, 2, 4]


CONFLICT = "<<<<<<< HEAD\n{}\n=======\n{}\n>>>>>>> theirs\n"


@pytest.mark.parametrize("content", ["", CONFLICT, "[1]", "{}", '{"task": "task", "system": "dynamicconv"}'])
def test_a_damaged_row_is_not_replaced(other_day, content):
    """Its seeds may be of another machine."""
    results, _, made = other_day
    path = results / "task/dynamicconv.json"
    path.write_text(content)
    with pytest.raises(InputError, match=f"{path} is not a row of lightconv reproduce"):
        add_row(results, made(run(3, 33.0, 31.0)))
    assert path.read_text() == content


def test_every_seed_anew_leaves_nothing_of_the_former_row(other_day):
    results, _, made = other_day
    new = made(run(2, 33.0, 31.0), run(1, 29.0, 30.0), versions=[{"commit": "b"}])
    assert with_earlier_seeds(results, new) == new
