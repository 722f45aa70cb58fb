"""The parts of `lightconv report` that need no training: folders, scores, samples, pictures, escaping."""

import base64
import io
import json
import os
from argparse import Namespace

import numpy as np
import pytest
import torch

from lightconv_plugin.errors import InputError

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: report)")

from lightconv_plugin.report import loading, plots, runs, scores, translate
from lightconv_plugin.report.kernels import Layer
from lightconv_plugin.scoring import paper
from tests.records.test_fairseq_log import Writer

# ------------------------------------------------------------------------------------------------ folders


def test_runs_are_told_apart_by_as_little_of_the_path_as_it_takes(tmp_path):
    folders = [tmp_path / name for name in ("a/one", "b/one", "b/two")]
    assert runs.names_of(folders) == ["a/one", "b/one", "b/two"]
    assert runs.names_of(folders[1:]) == ["one", "two"]
    with pytest.raises(InputError, match="given twice"):
        runs.names_of([folders[0], folders[0]])


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.touch(), "is a file"),
        (lambda path: path.mkdir(), "neither checkpoints"),
    ],
    ids=["missing", "file", "empty"],
)
def test_a_folder_that_is_none_of_a_training_is_refused(make, said, tmp_path):
    make(tmp_path / "run")
    with pytest.raises(InputError, match=f"run.*{said}"):
        runs.check_folder(tmp_path / "run")


@pytest.mark.parametrize(
    "names, chosen",
    [
        (["checkpoint1.pt", "checkpoint10.pt", "checkpoint9.pt"], "checkpoint10.pt"),
        (["checkpoint_2_80.pt", "checkpoint_2_100.pt"], "checkpoint_2_100.pt"),
        (["checkpoint9.pt", "checkpoint_last.pt"], "checkpoint_last.pt"),
        (["checkpoint_last.pt", "checkpoint_best.pt"], "checkpoint_best.pt"),
        (["checkpoint_best.pt", "average5.pt", "averages.pt"], "average5.pt"),
        (["model.pt"], "model.pt"),
        ([], None),
    ],
)
def test_which_checkpoint_is_looked_into(names, chosen, tmp_path):
    for name in names:
        (tmp_path / name).touch()
    found = runs.choose_checkpoint(tmp_path)
    assert (found and found.name) == chosen


def test_links_to_nowhere_are_passed_over(tmp_path):
    """The target of an average may be deleted to save disk space."""
    for name in ("average5.pt", "checkpoint_best.pt", "checkpoint3.pt", "other.pt", "a.test.gen", "a.test.score"):
        (tmp_path / name).symlink_to("nowhere")
    assert runs.choose_checkpoint(tmp_path) is None
    run = runs.read_run(tmp_path, "run")
    assert not run.scores and not run.translations and "There is no checkpoint" in " ".join(run.problems)
    (tmp_path / "checkpoint_last.pt").touch()
    assert runs.choose_checkpoint(tmp_path).name == "checkpoint_last.pt"


def test_settings_of_a_checkpoint_of_stock_fairseq():
    """Its lightconv keeps the model's options as a Namespace."""
    model = Namespace(arch="lightconv_iwslt_de_en", encoder_layers=1, encoder_conv_type="dynamic", decoder_layers=None)
    settings = runs.TrainingSettings.read({"model": model, "task": {"source_lang": "de", "target_lang": "en"}})
    assert settings.architecture == "lightconv_iwslt_de_en" and settings.pair == ("de", "en")
    assert settings.mixers == {"encoder": ["dynamic"]}


def test_a_model_whose_pretrained_embeddings_have_gone_is_loaded(tmp_path):
    pytest.importorskip("fairseq")
    from tests.generation import translation_toys as toys

    path = toys.make_checkpoint(tmp_path / "m.pt", toys.make_corpus(tmp_path / "corpus"))
    table = loading.open_model(toys.with_embedding_files(path), None).model.encoder.embed_tokens.weight
    assert torch.equal(table, torch.load(path, weights_only=False)["model"]["encoder.embed_tokens.weight"])


def test_a_training_with_the_fast_task_is_opened_without_languages_and_without_its_search(tmp_path):
    """fairseq does not save the languages that it infers. Graphs need a GPU, and the shortlist may be gone."""
    pytest.importorskip("fairseq")
    from tests.generation import translation_toys as toys

    data = toys.make_corpus(tmp_path / "corpus")
    (data / "train.de-en.de.idx").touch()
    search = {"generation_dtype": "float16", "generation_cuda_graphs": True, "generation_shortlist": "gone.txt"}
    task = {"_name": "translation_fast", "source_lang": None, "target_lang": None, **search}
    opened = loading.open_model(toys.make_checkpoint(tmp_path / "m.pt", data, task=task), None)
    assert opened.missing == "" and (opened.task.cfg.source_lang, opened.task.cfg.target_lang) == ("de", "en")
    options = opened.task.build_generator([opened.model], Namespace(beam=2)).options
    assert (options.dtype, options.cuda_graphs) == ("float32", None)


def test_what_a_folder_lacks_becomes_its_problems(tmp_path):
    log = Writer().head().inner(20, 9).head().inner(30, 8)
    (tmp_path / "train.log").write_text("\n".join([*log.lines, log.lines[-1][:90]]))
    (tmp_path / "a.test.score").write_text("no score\n")
    (tmp_path / "a.test.gen").write_text("S-0\thallo\nT-0\thello\nH-0\t-1\thello\n")
    run = runs.read_run(tmp_path, "run")
    told = " ".join(run.problems)
    assert "2 trainings" in told and "ended at update 20" in told
    assert "1 truncated lines of statistics" in told
    assert "There is no checkpoint" in told
    assert "a.test.score has no known score" in told
    assert "is cut off" in told
    assert run.training.updates == 30


@pytest.mark.parametrize("options", [{}, {"decoder_conv_type": "talk"}], ids=["", "changed"])
def test_settings_of_a_configuration_file_are_completed(options, tmp_path):
    (tmp_path / "hydra" / ".hydra").mkdir(parents=True)
    model = {"_name": "lightweightconv_iwslt_de_en", "encoder_layers": 2, **options}
    content = {"model": model, "task": {"data": "x", "source_lang": "de", "target_lang": "en"}}
    (tmp_path / "hydra" / ".hydra" / "config.yaml").write_text(json.dumps(content))  # JSON is YAML
    (tmp_path / "train.log").write_text("")
    settings = runs.read_run(tmp_path, "run").settings
    decoder = options.get("decoder_conv_type", "lightweight")
    assert settings.mixers == {"encoder": ["lightweight"] * 2, "decoder": [decoder] * 6}
    assert settings.model["encoder_embed_dim"] == 512


def test_every_row_of_the_ablation_has_a_configuration_that_is_known_for_it(repository):
    yaml = pytest.importorskip("yaml")
    files = sorted((repository / "configs" / "wmt16_en_de" / "ablation").glob("*.yaml"))
    rows = []
    for path in files:
        settings = runs.with_defaults(runs.TrainingSettings.read(yaml.safe_load(path.read_text(encoding="utf-8"))))
        mixers = [kind for kinds in settings.mixers.values() for kind in kinds]
        rows.append(paper.ablation_row(mixers, settings.model))
    assert set(rows) - {None} == set(paper.ABLATION)


# ------------------------------------------------------------------------------------------------ scores

TEXT = """\
BLEU4 = 38.81, 72.1/48.4/34.8/24.7 (BP=0.933, ratio=0.935, syslen=12, reflen=13)  tokenised, lower-cased, 9 sentences
sacreBLEU = 38.83  nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:2.6.0
chrF2 = 62.85  nrefs:1|case:lc|eff:yes|nc:6|nw:0|space:no|version:2.6.0
parameters = 2,493,440
"""
ROUGE = """\
ROUGE-1 = 39.52 (P=40.00, R=41.00, 95% interval 39.10-39.90)
ROUGE-2 = 15.97 (P=40.00, R=41.00, 95% interval 39.10-39.90)
ROUGE-L = 30.00 (P=40.00, R=41.00, 95% interval 39.10-39.90)
ROUGE-Lsum = 36.51 (P=40.00, R=41.00, 95% interval 39.10-39.90)
F1 of 11490 summaries  rouge-score|stem:porter|sentence-end:.|version:0.1.2
"""
EVAL = """\
2026-11-20 10:00:00 | INFO | fairseq_cli.eval_lm | Evaluated 1,234 tokens in 0.1s (9999.99 tokens/s)
2026-11-20 10:00:00 | INFO | fairseq_cli.eval_lm | Loss (base 2): 4.5000, Perplexity: 22.63
"""


@pytest.mark.parametrize(
    "content, values, detail",
    [
        (TEXT, {"bleu": 38.81, "sacrebleu": 38.83, "chrf": 62.85}, "sacreBLEU nrefs:1|case:lc"),
        (json.dumps({"bleu_tok": 1.5, "sacrebleu": 2, "signature": "s|v", "lowercase": True}),
         {"bleu": 1.5, "sacrebleu": 2}, "lower-cased; sacreBLEU s|v"),
        (ROUGE, {"rouge1": 39.52, "rouge2": 15.97, "rougeL": 30, "rougeLsum": 36.51}, "rouge-score|stem:porter"),
        (json.dumps({"rouge1": 1.0, "rougeLsum": 2.0, "signature": "rouge-score|x"}),
         {"rouge1": 1, "rougeLsum": 2}, "rouge-score|x"),
        (EVAL, {"perplexity": 22.63}, ""),
        ("perplexity = 22.63 (loss 4.5000 bits a token, 1,234 tokens)\n", {"perplexity": 22.63}, ""),
        (json.dumps({"perplexity": 22.5, "loss": 4.5, "tokens_per_sample": 256, "context_window": 128}),
         {"perplexity": 22.5}, "samples of 256 tokens, context window 128"),
        (f"{{'post_process': '@@ '}}\n{EVAL}", {"perplexity": 22.63}, "perplexity per word"),
        ("perplexity = 22.63 (loss 4.5000 bits a word, 1,234 tokens)\n", {"perplexity": 22.63}, "perplexity per word"),
        (json.dumps({"perplexity": 22.5, "sample_break_mode": "eos", "context_window": 0, "unit": "word"}),
         {"perplexity": 22.5}, "samples of whole sentences, context window 0; perplexity per word"),
    ],
    ids=["bleu", "bleu-json", "rouge", "rouge-json", "eval-lm", "perplexity", "perplexity-json",
         "eval-lm-words", "words", "words-json"],
)  # fmt: skip
def test_scores_are_read_as_they_were_written(content, values, detail, tmp_path):
    (tmp_path / "average5.v1.test.score").write_text(content)
    score = scores.read_score(tmp_path / "average5.v1.test.score")
    assert (score.checkpoint, score.subset, score.values) == ("average5.v1", "test", values)
    assert detail in "; ".join(score.details)


def test_what_lightconv_score_prints_is_understood(tmp_path, capsys):
    from tests.scoring.corpora import PLAIN, as_json, write

    sides = ["--sys", write(tmp_path / "sys", PLAIN), "--ref", write(tmp_path / "ref", PLAIN[::-1])]
    path = tmp_path / "checkpoint_best.valid.score"
    printed = as_json(capsys, *sides, "--detok", "none", "--output", path)
    score = scores.read_score(path)
    assert score.values == {"bleu": printed["bleu_tok"], "sacrebleu": printed["sacrebleu"], "chrf": printed["chrf"]}


def test_results_older_than_their_checkpoint_are_pointed_out(tmp_path):
    """As after another `average` under the same name."""
    (tmp_path / "average5.test.score").write_text(TEXT)
    (tmp_path / "average5.test.gen").write_text(GEN)
    (tmp_path / "average5.pt").touch()
    (tmp_path / "average5.valid.score").write_text(TEXT)
    for number, name in enumerate(("average5.test.gen", "average5.test.score", "average5.pt", "average5.valid.score")):
        os.utime(tmp_path / name, (number, number))
    run = runs.read_run(tmp_path, "run")
    older = [problem for problem in run.problems if " is older than " in problem]
    assert older == [
        f"average5.test.{kind} is older than average5.pt: it may be of an earlier checkpoint of that name."
        for kind in ("score", "gen")
    ]
    assert {score.subset for score in run.scores} == {"test", "valid"}


NOTHING_SCORED = EVAL.replace("1,234", "0").replace("4.5000", "0.0000").replace("22.63", "1.00")
FAULTY = ["nothing\n", '{"a": 1}\n', '{"bleu_tok": 1', "\xff", NOTHING_SCORED, EVAL.splitlines()[0], EVAL * 2]


@pytest.mark.parametrize("content", FAULTY, ids=repr)
def test_a_file_without_scores_is_named(content, tmp_path):
    (tmp_path / "a.test.score").write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=r"a\.test\.score"):
        scores.read_score(tmp_path / "a.test.score")


GEN = """\
S-1\tguten @@ morgen
T-1\tgood mor@@ ning
H-1\t-0.1\tgood eve@@ ning
D-1\t-0.1\tgood eve@@ ning
S-0\thallo
T-0\thello
H-0\t-0.2\thello
D-0\t-0.2\thello
Generate test with beam=5: BLEU4 = 12.50, 1/1/1/1 (BP=1, ratio=1, syslen=1, reflen=1)
2026-11-20 10:00:00 | INFO | fairseq_cli.generate | messages of the other stream, joined behind
"""


def test_a_log_of_generate_gives_sentences_and_a_score(tmp_path):
    path = tmp_path / "generate-test.txt"
    path.write_text(GEN)
    log = scores.read_translations(path)
    assert log.sources == ["hallo", "guten morgen"]
    assert log.references == ["hello", "good morning"]
    assert log.hypotheses == ["hello", "good evening"]
    assert scores.generated_score(path).values == {"bleu": 12.5}
    assert (log.subset, log.checkpoint) == ("test", "")


# ------------------------------------------------------------------------------------------------ translations


def translated(checkpoint, hypotheses, references=("a b", "c d", "e f"), subset="test"):
    return scores.Translations(checkpoint, subset, [""] * len(references), list(references), list(hypotheses))


def run_with(tmp_path, name, *logs):
    return runs.Run(name, tmp_path, translations=list(logs))


def test_runs_of_one_test_set_are_side_by_side_and_others_apart(tmp_path):
    found = translate.group_logs(
        [
            run_with(tmp_path, "one", translated("x", "123")),
            run_with(tmp_path, "two", translated("y", "456")),
            run_with(tmp_path, "other", translated("z", "78", references=("q", "r"))),
            run_with(tmp_path, "none"),
        ],
        3,
    )
    assert [group.samples[0].hypotheses for group in found] == [{"one": "1", "two": "4"}, {"other": "7"}]
    assert [len(group.samples) for group in found] == [3, 2]


def test_the_test_set_comes_before_the_validation_set(tmp_path):
    run = run_with(tmp_path, "one", translated("a", "123", subset="valid"), translated("a", "456"))
    assert translate.choose_log(run).subset == "test"


@pytest.mark.parametrize("total, number", [(1, 1), (10, 3), (1000, 7), (5, 9)])
def test_sentences_are_evenly_spread(total, number):
    found = loading.spread(total, number)
    assert len(found) == len(set(found)) == min(total, number)
    assert 0 <= found[0] <= found[-1] < total
    steps = np.diff(found)
    assert len(steps) == 0 or steps.max() - steps.min() <= 1


@pytest.mark.parametrize(
    "reference, hypothesis, pieces",
    [
        ("a b c", "a b c", [("a b c", False)]),
        ("a b c", "A x c", [("A", False), ("x", True), ("c", False)]),
        ("a b", "a b b b", [("a b", False), ("b b", True)]),
        ("a b", "", []),
        ("", "x", [("x", True)]),
    ],
)
def test_differences(reference, hypothesis, pieces):
    assert translate.differences(reference, hypothesis) == pieces


# ------------------------------------------------------------------------------------------------ pictures


def image_of(svg: str, number: int = 0) -> np.ndarray:
    """The pixels of a picture's image, (rows, columns, RGBA) from 0 to 1."""
    from PIL import Image

    data = svg.split("data:image/png;base64,")[number + 1].partition('"')[0]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")) / 255


def layer_of(values, **more) -> Layer:
    values = np.asarray(values, dtype=float)
    positions = np.arange(values.shape[1]) - values.shape[1] // 2
    rows = [f"head {i + 1}" for i in range(len(values))]
    return Layer("encoder", 0, "dynamic", rows, positions, values, **more)


def test_the_picture_of_a_kernel_holds_its_values():
    values = np.array([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25], [0.0, 0.0, -0.7]])
    svg = plots.kernels([layer_of(values)], "test")
    pixels = image_of(svg)
    assert pixels.shape[:2] == (3, 3)
    np.testing.assert_allclose(pixels[..., 3], np.abs(values) / 0.7, atol=0.01)
    blue, orange = pixels[0, 2, :3], pixels[2, 2, :3]
    assert blue[2] > blue[0] and orange[0] > orange[2]


def test_the_text_of_a_kernel_says_where_each_head_looks():
    text = plots.describe(layer_of([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]]))
    assert text == "Layer 1, dynamic, K = 3: strongest head 1 at +1; head 2 at -1."


def test_the_density_of_reaches_is_a_histogram():
    reach = (np.array([[0.1, 0.1, 1.9, 2.0]]), np.array([[0.0, 0.6, 0.6, 1.0]]))
    layer = layer_of([[0, 0, 0, 0]], reach=reach, limits=(2, 1))
    edges, density = plots.reach_density(layer, bins=2)
    np.testing.assert_allclose(edges, [-2, -1.5, -1, -0.5, 0, 0.5, 1])
    np.testing.assert_allclose(density, [[0.5, 0, 0, 0.5, 0.25, 0.75]])


def test_a_decoder_has_no_reach_to_the_right():
    reach = (np.array([[0.0, 3.0]]), np.zeros((1, 2)))
    edges, density = plots.reach_density(layer_of([[0]], reach=reach, limits=(3, 0)), bins=1)
    np.testing.assert_allclose(edges, [-3, -2, -1, 0])
    np.testing.assert_allclose(density, [[0.5, 0, 0.5]])


def test_a_series_leaves_out_what_is_not_finite_or_not_logged():
    from lightconv_plugin.records.trainings import Record

    records = [
        Record(1, 1, {"loss": 2.0}),
        Record(2, 1, {"loss": float("nan")}),
        Record(3, 1, {}),
        Record(4, 1, {"loss": 1.0}),
    ]
    assert plots.series(records, "loss") == ([1, 4], [2.0, 1.0])


def test_pictures_have_colours_of_the_page_and_ids_of_their_own():
    one, two = (plots.kernels([layer_of(np.eye(3))], "test") for _ in range(2))
    for svg in (one, two):
        assert "currentColor" in svg and "var(--grid)" in svg
        assert not any(colour in svg for colour in ("#010203", "#030201"))
    ids = [{part.partition('"')[0] for part in svg.split(' id="')[1:]} for svg in (one, two)]
    assert ids[0] and not ids[0] & ids[1]


def test_words_that_look_like_ids_are_shown_as_they_are():
    layer = layer_of(np.eye(3), maps=[np.tril(np.full((3, 3, 3), 0.5))])
    svg = plots.time_map(layer, 0, ['id="q"', 'href="#a"', "url(#z)"], "test")
    for word in ('id="q"', 'href="#a"', "url(#z)"):
        assert f">{word}<" in svg


def test_a_figure_of_several_models_stands_on_any_background():
    from PIL import Image

    over_time = layer_of(np.eye(3), maps=[np.tril(np.full((3, 3, 3), 0.5))])
    columns = [("one", [layer_of(np.eye(4)), layer_of(np.ones((2, 5)))], []), ("two", [over_time], ["a", "$b$", "c"])]
    png = Image.open(io.BytesIO(plots.kernel_figure(columns, "png"))).convert("RGBA")
    pixels = np.asarray(png)
    assert not pixels[[0, 0, -1, -1], [0, -1, 0, -1], 3].any(), "the corners are transparent"
    assert not (pixels[..., 3] == 255)[(pixels[..., :3] < 30).all(-1)].any(), "nothing is black"
    svg = plots.kernel_figure(columns, "svg").decode()
    assert "one" in svg and "$b$" in svg and "#808890" in svg
    assert plots.kernel_figure(columns, "pdf").startswith(b"%PDF")


@pytest.mark.parametrize(
    "form, fonts, missing",
    [("png", (), "日 \ue000"), ("png", ("None", "STIXNonUnicode"), "日"), ("pdf", (), "日 \ue000"), ("svg", (), "")],
)
def test_characters_that_no_font_has_are_said_in_one_line(form, fonts, missing, monkeypatch, capsys, recwarn):
    monkeypatch.setattr(plots, "_FONTS", ("DejaVu Sans", *fonts))
    over_time = layer_of(np.eye(4), maps=[np.tril(np.full((3, 4, 4), 0.25))])
    plots.kernel_figure([("one", [over_time], ["a", "日", "日", "\ue000"])], form)
    said = capsys.readouterr().err
    assert said.startswith(f"no font for {missing}: the .{form} has boxes" if missing else "")
    assert said.count("\n") == bool(missing) and not recwarn.list


def test_a_picture_of_nothing_but_zeros_or_nan_is_drawn():
    for value in (0.0, np.nan):
        pixels = image_of(plots.kernels([layer_of(np.full((3, 3), value))], "test"))
        assert not pixels[..., 3].any()


@pytest.mark.parametrize(
    "model, expected",
    [
        ({"_name": "fconv", "encoder_layers": "[(32, 3)] * 2", "decoder_layers": "[(32, 3)]"}, {}),
        ({"arch": "lightconv", "encoder_layers": 2}, {"encoder": ["dynamic", "dynamic"]}),
        ({"arch": "transformer", "decoder_layers": "1"}, {"decoder": ["attention"]}),
    ],
)
def test_mixers_where_the_number_of_layers_is_known(model, expected):
    """fairseq's fconv has its convolutions as `encoder_layers`, in an expression."""
    assert runs.TrainingSettings(model).mixers == expected
