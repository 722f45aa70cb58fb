"""`lightconv report` from beginning to end on miniature trainings of several mixers, and its page in a browser."""

import html
import json
import logging
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: report)")

import lightconv_plugin.report
from lightconv_plugin.cli import main
from lightconv_plugin.report import assemble
from tests import fairseq_cli, programs
from tests.report.test_report_page import Tags

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LANGUAGE_MODEL = (
    "--task language_modeling --arch dynamicconv_lm --decoder-embed-dim 16 --decoder-ffn-embed-dim 24"
    " --decoder-layers 3 --decoder-attention-heads 4 --decoder-kernel-size-list 3,5,9 --tokens-per-sample 32"
    " --sample-break-mode none"
    " --decoder-conv-type dynamic,window_attention,depthwise --optimizer adam --lr 1e-3 --max-tokens 128 --cpu"
    " --log-format simple --log-interval 1 --num-workers 0 --criterion cross_entropy --max-update 4"
    " --no-epoch-checkpoints"
).split()


@pytest.fixture(scope="module")
def trained(toy_data, tmp_path_factory):
    """Two miniature trainings: a translation model of five mixers (log in JSON) and a language model of three."""
    folder = tmp_path_factory.mktemp("report")
    hybrid, language, plain = folder / "hy brid", folder / "language", toy_data.parent / "english"
    mixers = ["--encoder-conv-type=talk,dynamic", "--decoder-conv-type=lightweight,attention"]
    options = [*fairseq_cli.SIZE, *fairseq_cli.RECIPE, *mixers, "--max-epoch=2", "--save-dir", hybrid, "--seed=7"]
    log = fairseq_cli.run("train", toy_data, "--user-dir", fairseq_cli.USER_DIR, "--arch=dynamicconv", *options)
    (hybrid / "train.log").write_text(log)
    log = fairseq_cli.run("train", plain, "--user-dir", fairseq_cli.USER_DIR, *LANGUAGE_MODEL, "--save-dir", language)
    (language / "train.log").write_text(log)
    scored = "Evaluated 256 tokens in 0.1s (2560.00 tokens/s)\nLoss (base 2): 3.0000, Perplexity: 8.00\n"
    (language / "checkpoint_best.test.ppl").write_text(scored)
    return SimpleNamespace(folder=folder, data=toy_data, plain=plain, hybrid=hybrid, language=language)


@pytest.fixture(scope="module")
def page(trained):
    """The page about both."""
    output = trained.folder / "report.html"
    figure = ["--figure", trained.folder / "kernels.png"]
    assert report(trained.hybrid, trained.language, "-o", output, "--sentences", 3, *figure) == 0
    return output.read_text(encoding="utf-8")


def report(*arguments) -> int:
    return main.main(["report", *map(str, arguments)])


def moved(run, target, data):
    """A copy of a run whose checkpoint says that its data are at `data`."""
    target.mkdir()
    state = torch.load(run / "checkpoint_last.pt", weights_only=False)
    state["cfg"]["task"]["data"] = str(data)
    torch.save(state, target / "checkpoint_last.pt")
    return target


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_says_what_was_trained(page, trained):
    text = Tags(page).text
    names = ["hy brid", "language", "dynamicconv_lm", "de → en", str(trained.data), "checkpoint_best.pt", "train 60"]
    mixers = ["encoder: talk, dynamic", "decoder: lightweight, attention", "dynamic, window_attention, depthwise"]
    for word in names + mixers:
        assert word in text, word
    log = (trained.hybrid / "train.log").read_text()
    assert re.search(r"num\. shared model params: ([\d,]+)", log)[1] in text
    assert Tags(page).open == []


def test_the_page_shows_the_kernels_of_every_layer(page):
    labels = [value for name, value in Tags(page).attributes if name == "aria-label" and value]
    encoder = next(label for label in labels if label.startswith("Kernels of the encoder of hy brid"))
    assert "Layer 1, talk, L = 3, R = 3: median reach" in encoder
    assert "Layer 2, dynamic, K = 7: strongest" in encoder
    decoder = next(label for label in labels if label.startswith("Kernels of the decoder of hy brid"))
    assert "Layer 1, lightweight, K = 3: strongest" in decoder
    assert "Layer 2, attention: strongest" in decoder
    language = next(label for label in labels if label.startswith("Kernels of the decoder of language"))
    for kind in ("dynamic, K = 3", "attention, window 5", "depthwise, K = 9"):
        assert f", {kind}: strongest" in language
    over_time = [label for label in labels if "mean over heads" in label]
    assert len(over_time) == 2 * (3 + 2), "two sentences, every layer whose kernels depend on the text"


def test_the_figure_is_written_beside_the_page(page, trained):
    assert (trained.folder / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_the_curves_are_described_by_their_numbers(page, trained):
    labels = [value for name, value in Tags(page).attributes if name == "aria-label" and value]
    loss = next(label for label in labels if label.startswith("Loss by update."))
    lines = (trained.hybrid / "train.log").read_text().splitlines()
    last = [json.loads(line[line.index("{") :]) for line in lines if '"valid_loss"' in line][-1]
    assert f"{float(last['valid_loss']):.4g} at {last['valid_num_updates']}" in loss
    assert "language, train:" in loss


def test_scores_and_translations_are_there(page, trained):
    text = Tags(page).text
    assert "perplexity" in text and "8.00" in text
    references = (trained.data.parent / "test.en").read_text().splitlines()
    samples = page.split('<div class="sample">')[1:]
    assert len(samples) == 3
    for sample in samples:
        reference = html.unescape(re.search(r"<dt>reference</dt><dd>(.*?)</dd>", sample)[1])
        assert reference in references
        assert "<dt>hy brid</dt>" in sample and "<dt>language</dt>" not in sample
    assert "beam search, beam 5, with checkpoint_best.pt" in text
    assert "missing or noteworthy" not in text


def test_translations_of_a_search_are_those_of_a_log(trained, tmp_path):
    """fairseq-generate's own log has the same sentences, with an unknown word too, and the same translations."""
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(trained.data, data)
    shutil.copytree(trained.hybrid, run)
    (run / "errors").mkdir()
    for lang, added in (("de", ""), ("en", " unheard")):
        lines = (trained.data.parent / f"test.{lang}").read_text().splitlines()
        (tmp_path / f"test.{lang}").write_text("".join(f"{line}{added}\n" for line in lines))
    fairseq_cli.run(
        *("preprocess", "--source-lang=de", "--target-lang=en", "--testpref", tmp_path / "test", "--destdir", data),
        *("--srcdict", data / "dict.de.txt", "--tgtdict", data / "dict.en.txt"),
    )
    log = fairseq_cli.run(
        "generate", data, "--user-dir", fairseq_cli.USER_DIR, "--path", run / "checkpoint_best.pt",
        *"--beam 5 --max-len-a 2 --max-len-b 20 --cpu --required-batch-size-multiple 1".split(),
    )  # fmt: skip
    (run / "checkpoint_best.test.gen").write_text(log)
    page = tmp_path / "report.html"
    assert report(run, trained.hybrid, "-o", page, "--sentences", 3, "--data-bin", data) == 0
    text = page.read_text(encoding="utf-8")
    assert "the log of checkpoint_best" in text and "BLEU, tokenised" in text
    samples = [dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", part)) for part in text.split('class="sample"')[1:]]
    assert len(samples) == 3
    for sample in samples:
        assert sample["reference"].endswith("&lt;&lt;unk&gt;&gt;")
        assert sample["run"] == sample["hy brid"]


def test_the_page_can_be_published(trained, tmp_path, monkeypatch):
    """It is the same each time, and shows nothing of the folders above the working directory."""
    above = Path(os.path.commonpath([trained.folder, trained.data]))
    monkeypatch.chdir(above)
    pages = [tmp_path / "first.html", tmp_path / "second.html"]
    for path in pages:
        assert report(trained.hybrid, "-o", path, "--sentences", 1) == 0
    first, second = (path.read_text(encoding="utf-8") for path in pages)
    assert first == second
    assert str(trained.data.relative_to(above)) in first and str(above) not in first


# ------------------------------------------------------------------------------------------------ what is missing


def test_without_data_the_kernels_that_need_none_are_shown_and_the_rest_is_said(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = moved(trained.hybrid, tmp_path / "run", tmp_path / "gone")
    assert report(run, "-o", tmp_path / "report.html") == 0
    text = Tags((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "No kernels of attention, dynamic, talk, which depend on the text: the binarised data are" in text.text
    assert "No translations" in text.text and "No learning curve" in text.text
    assert "there is no folder gone" in text.text and str(tmp_path) not in text.text
    labels = " ".join(value for name, value in text.attributes if name == "aria-label" and value)
    assert "Layer 1, lightweight, K = 3: strongest" in labels
    assert "Layer 1, talk, L = 3, R = 3: not known without data" in labels


def test_a_multilingual_model_is_shown_in_its_first_direction(trained, tmp_path):
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    for path in trained.data.iterdir():
        shutil.copy(path, data)
    for path in sorted(data.glob("*.de-en.*")):  # the other direction, of the same text
        shutil.copy(path, data / path.name.replace(".de-en.", ".en-de."))
    words = sorted(
        {line.split()[0] for lang in ("de", "en") for line in (data / f"dict.{lang}.txt").read_text().splitlines()}
    )
    for lang in ("de", "en"):
        (data / f"dict.{lang}.txt").write_text("".join(f"{word} 1\n" for word in words))
    task = ["--task=translation_multi_simple_epoch", "--lang-pairs=de-en,en-de", "--decoder-langtok", "--max-update=2"]
    options = [*fairseq_cli.SIZE, *fairseq_cli.RECIPE, *task, "--save-dir", run]
    log = fairseq_cli.run("train", data, "--user-dir", fairseq_cli.USER_DIR, "--arch=dynamicconv", *options)
    run.joinpath("train.log").write_text(log)
    assert report(run, "-o", tmp_path / "report.html") == 0
    text = Tags((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert "missing or noteworthy" not in text
    assert "__en__" in text and "beam search, beam 5" in text


def test_data_bin_takes_the_place_of_what_the_checkpoint_names(trained, tmp_path):
    run = moved(trained.language, tmp_path / "run", tmp_path / "gone")
    for data, missing in ((trained.plain, False), (tmp_path, True)):
        assert report(run, "-o", tmp_path / "report.html", "--data-bin", data, "--force") == 0
        text = Tags((tmp_path / "report.html").read_text(encoding="utf-8")).text
        assert ("does not hold the run's binarised data: no dict.txt" in text) == missing
        assert ("No kernels of dynamic, window_attention" in text) == missing


def test_a_test_set_without_references_leaves_the_validation_set(trained, tmp_path):
    """As fairseq-preprocess --only-source writes it."""
    shutil.copytree(trained.data, tmp_path / "data")
    for path in (tmp_path / "data").glob("test.de-en.en.*"):
        path.unlink()
    assert report(trained.hybrid, "-o", tmp_path / "report.html", "--data-bin", tmp_path / "data") == 0
    text = Tags((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert "missing or noteworthy" not in text
    assert "sentences of valid" in text and "beam search, beam 5" in text


def test_data_of_another_vocabulary_are_refused_on_the_page(trained, tmp_path):
    shutil.copytree(trained.plain, tmp_path / "data")
    (tmp_path / "data" / "dict.txt").write_text("one 1\n")
    assert report(trained.language, "-o", tmp_path / "report.html", "--data-bin", tmp_path / "data") == 0
    text = Tags((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert "cannot be loaded with the dictionaries of" in text and "dynamicconv_lm" in text


class Harmful:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize("content", ["cut", "harmful", "other"])
def test_a_checkpoint_that_cannot_be_used_does_not_lose_the_page(content, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(trained.hybrid / "train.log", run)
    path = run / "checkpoint_best.pt"
    if content == "cut":
        path.write_bytes((trained.hybrid / "checkpoint_best.pt").read_bytes()[:5000])
    else:
        torch.save({"harmful": {"model": Harmful()}, "other": {"a": 1}}[content], path)
    assert report(run, "-o", tmp_path / "report.html") == 0
    text = Tags((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "The checkpoint cannot be loaded: run/checkpoint_best.pt " in text.text
    assert str(tmp_path) not in text.text
    assert any(value.startswith("Loss by update.") for name, value in text.attributes if name == "aria-label" and value)


def test_a_checkpoint_by_name_that_one_of_the_runs_lacks_is_said(trained, tmp_path):
    other = shutil.copytree(trained.language, tmp_path / "other")
    (other / "checkpoint_best.pt").rename(other / "average9.pt")
    assert report(trained.hybrid, other, "-o", tmp_path / "report.html", "--checkpoint", "average9.pt") == 0
    text = Tags((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert "no such checkpoint" in text and "average9.pt" in text


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["none"], "RUN_DIR: none does not exist"),
        (["."], "is not the folder of a training"),
        (["RUN", "--data-bin", "none"], "--data-bin: there is no folder none"),
        (["RUN", "--checkpoint", "no.pt"], "--checkpoint: no RUN_DIR has a file no.pt"),
        (["RUN", "-o", "none/report.html"], "cannot write none/report.html: there is no folder"),
        (["RUN", "--figure", "none/a.png"], "cannot write none/a.png: there is no folder"),
        (["RUN", "RUN"], "is given twice"),
    ],
    ids=["missing", "empty", "data", "checkpoint", "output", "figure", "twice"],
)
def test_wrong_arguments_are_one_line_and_write_nothing(arguments, said, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.html").write_text("before")
    assert report(*(trained.hybrid if argument == "RUN" else argument for argument in arguments), "--force") == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("lightconv report: error: ") and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "before"


def test_what_libraries_log_is_not_shown(tmp_path, monkeypatch, caplog):
    """fairseq sets the root logger's level to DEBUG when all of its models are imported."""

    def make_report(*_):
        logging.getLogger("fairseq.tasks").info("Please install this")
        return SimpleNamespace(page="", problems=0)

    def kernel_figure(*_):
        logging.getLogger("matplotlib").debug("fonts")
        return b""

    monkeypatch.setattr(assemble, "make_report", make_report)
    monkeypatch.setattr(assemble, "kernel_figure", kernel_figure)
    with caplog.at_level(logging.DEBUG):
        assert report("run", "-o", tmp_path / "page.html", "--figure", tmp_path / "kernels.png") == 0
    assert not caplog.records


def test_without_matplotlib_it_says_what_to_install(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("assemble", "page", "plots"):  # to be imported anew
        monkeypatch.delitem(sys.modules, f"lightconv_plugin.report.{name}", raising=False)
        monkeypatch.delattr(lightconv_plugin.report, name, raising=False)
    assert report(trained.hybrid, "-o", tmp_path / "report.html") == 2
    assert "pip install '.[report]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ in a browser

# All of it is done when the page's load event ends: the images made here hold that event up until they are decoded.
PROBE = """<script>
const result = {errors: []};
let pictures = [];
addEventListener("error", e => result.errors.push(String(e.message || e.target.outerHTML)), true);
addEventListener("DOMContentLoaded", () => {
  pictures = [...document.querySelectorAll("svg image")].map(picture => {
    const image = new Image();
    image.src = picture.href.baseVal;
    return image;
  });
});
addEventListener("load", () => {
  document.querySelectorAll("details").forEach(d => d.open = true);
  result.sizes = [...pictures, ...document.images].map(image => image.naturalWidth);
  result.plots = [...document.querySelectorAll("svg.plot")].map(s => s.getBoundingClientRect().width);
  result.inner = innerWidth;
  result.wide = document.documentElement.scrollWidth;
  result.requests = performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:"));
  result.dark = matchMedia("(prefers-color-scheme: dark)").matches;
  result.paper = getComputedStyle(document.body).backgroundColor;
  parent.document.body.dataset.result = JSON.stringify(result);
});
</script>"""
FRAME = '<!DOCTYPE html><body><iframe style="border: 0; width: %dpx; height: 800px" srcdoc="%s"></iframe>'


def in_browser(path, folder, *flags) -> tuple[str, str]:
    """(the DOM after loading, what the browser wrote to its error stream) of a local page."""
    options = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
        " --disable-component-update --disable-sync --enable-logging=stderr --dump-dom"
    ).split()
    done = programs.run(CHROMIUM, *options, *flags, f"--user-data-dir={folder}", path.as_uri())
    return done.stdout, done.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt install chromium)")
def test_the_page_in_a_browser(page, tmp_path):
    """No errors, no requests, every picture drawn, nothing wider than the window, in both colour schemes."""
    # The page's policy forbids scripts: the probe runs in a copy without it.
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    assert policy.search(page)
    copy = policy.sub("", page).replace("<head>", f"<head>{PROBE}")
    seen = {}
    for width, flag in (
        (400, "--blink-settings=preferredColorScheme=0"),
        (1400, "--blink-settings=preferredColorScheme=1"),
    ):
        frame = tmp_path / f"{width}.html"
        frame.write_text(FRAME % (width, html.escape(copy)), encoding="utf-8")
        dom, errors = in_browser(frame, tmp_path / f"profile{width}", "--window-size=1500,900", flag)
        assert "CONSOLE" not in errors, errors
        result = json.loads(html.unescape(re.search(r'data-result="([^"]*)"', dom)[1]))
        assert result["errors"] == [] and result["requests"] == []
        assert result["inner"] == width
        assert result["wide"] <= width, f"{result['wide']} pixels wide in a window of {width}"
        assert len(result["sizes"]) > 20 and min(result["sizes"]) > 0
        assert min(result["plots"]) > 100
        seen[result["dark"]] = result["paper"]
    assert set(seen) == {True, False} and seen[True] != seen[False]

    original = tmp_path / "page.html"
    original.write_text(page, encoding="utf-8")
    dom, errors = in_browser(original, tmp_path / "profile")
    assert "CONSOLE" not in errors, errors
    assert "Sample translations" in dom
