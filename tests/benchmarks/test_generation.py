"""benchmarks.generation: every search does the work that it is timed for; tables, JSON, errors."""

import json
import mmap
import os

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.data import Dictionary, indexed_dataset
from fairseq.sequence_generator import SequenceGenerator

from benchmarks import generation, isolated, machine, report, searches, systems
from benchmarks.searches import FAIRSEQ, FAST, SearchSettings, TorchSearch
from tests.benchmarks.conftest import ran
from tests.generation import translation_toys as toys

SMALL = systems.sized(systems.PRESETS["iwslt_de_en"], True, None, None)
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("warm_processes")


@pytest.fixture(scope="module")
def words():
    return systems.dictionary(SMALL.vocabulary)


@pytest.fixture(scope="module")
def batch(words):
    (sample,) = systems.random_batches(SMALL, words, 1)
    return sample["net_input"]["src_tokens"].tolist()


# ------------------------------------------------------------------------------------------------ random weights


def test_quick(capsys, tmp_path):
    file = tmp_path / "generation.json"
    names = [f"{systems.DYNAMIC}, int8", systems.TRANSFORMER]
    chosen = ["--systems", *names, "--beam", 3, "--sentences", 1, 2]
    out, _ = ran(generation.main, capsys, "--quick", "--preset", "multi30k_en_de", "--json", file, *chosen)
    content = json.loads(file.read_text(encoding="utf-8"))
    settings = content["settings"]
    assert [(s["beam"], s["sentences"], s["length"]) for s in settings] == [(3, 1, 5), (3, 2, 5)]
    for setting in settings:
        assert list(setting["systems"]) == names
        for name, measured in setting["systems"].items():
            assert measured["sentences_per_s"] == pytest.approx(setting["sentences"] / measured["median_s"])
            assert name in out and report.digits(measured["sentences_per_s"]) in out
            # Some 40,000 parameters in float32 at the least.
            assert measured["peak_bytes"] is None or 150_000 < measured["peak_bytes"] < 300e6


def test_everything_is_measured_unless_it_is_chosen(capsys):
    options = generation.parser().parse_args([])
    candidates = generation._candidates(options, CPU, systems)
    assert {c.model for c in candidates.values()} == set(systems.SYSTEMS)
    dtypes = {c.dtype for c in candidates.values() if c.search == FAST}
    assert dtypes == {"float32", "bfloat16", "int8"}
    options = generation.parser().parse_args(["--dtype", "bfloat16", "--device", "cuda"])
    on_gpu = generation._candidates(options, torch.device("cuda"), systems)
    assert {c.dtype for c in on_gpu.values() if c.search == FAST} == {"float32"}
    assert on_gpu[f"{systems.LIGHT}, CUDA graphs"].graphs and not on_gpu[systems.LIGHT].graphs


@pytest.mark.parametrize("kind", [FAST, FAIRSEQ])
@pytest.mark.parametrize("system", systems.SYSTEMS)
def test_every_translation_has_the_length_that_was_asked_for(system, kind, words, batch):
    if kind == FAST and system in (systems.FAIRSEQ_DYNAMIC, systems.FAIRSEQ_LIGHT):
        pytest.skip("fairseq's own convolutions are not covered by our search, and not measured with it")
    model = systems.build(system, SMALL, systems.task(words), tiny=True)
    search = TorchSearch(kind, model, words, SearchSettings(beam=2, length=9), CPU)
    assert [len(tokens) for tokens in search.translate(batch)] == [8] * len(batch) and not model.training


def test_other_lengths_are_an_error(words, batch, monkeypatch):
    monkeypatch.setattr(
        SequenceGenerator, "generate", lambda self, models, sample: [[{"tokens": torch.zeros(n)}] for n in (5, 4)]
    )
    model = systems.build(systems.LIGHT, SMALL, systems.task(words), tiny=True)
    search = TorchSearch(FAIRSEQ, model, words, SearchSettings(beam=2, length=5), CPU)
    with pytest.raises(report.BenchmarkError, match=r"5 tokens were asked for, got lengths \[4, 5\]"):
        search.translate(batch[:2])


def test_both_searches_of_one_model_find_the_same(words, batch):
    found = []
    for kind in (FAST, FAIRSEQ):
        model = systems.build(systems.TRANSFORMER, SMALL, systems.task(words), tiny=True)
        found.append(TorchSearch(kind, model, words, SearchSettings(beam=3, length=9), CPU).translate(batch))
    assert found[0] == found[1]


class Failing:
    """Fails where `when` says: in its process, not here."""

    def __init__(self, when):
        self.when = when

    def __call__(self):
        if self.when == "building":
            raise ValueError("no such model")
        self.parameters = 3
        return self

    def translate(self, batch):
        if self.when == "dying":
            os._exit(4)
        raise report.BenchmarkError("other lengths")


@pytest.mark.parametrize(
    ("when", "said"),
    [("building", "ValueError: no such model"), ("translating", "other lengths"), ("dying", "ended with status 4")],
)
def test_what_fails_in_a_process_is_told(when, said):
    place = isolated.Isolated(Failing(when), threads=1)
    with pytest.raises(report.BenchmarkError, match=said):
        assert place.parameters() == 3
        place.translate([[[5, 2]]])
    place.close()
    assert not place._process.is_alive()


class Hungry:
    """Holds 256 MiB for a moment while it is built, and as many as a sentence has tokens for each translation."""

    parameters = None

    def __call__(self):
        self.translate([range(256)])
        return self

    def translate(self, batch):
        with mmap.mmap(-1, len(batch[0]) << 20) as memory:  # malloc might keep what is freed
            for page in range(0, len(memory), mmap.PAGESIZE):
                memory[page] = 1
        return [[]]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's high-water mark")
def test_a_peak_is_of_the_translations_since_it_was_forgotten():
    place = isolated.Isolated(Hungry(), threads=1)
    place.parameters()
    peaks = [place.peak_bytes()]
    for size in (96, 1):
        place.forget_peak()
        place.translate([[range(size)]])
        peaks.append(place.peak_bytes())
    place.close()
    assert [round(peak / 2**20, -1) // 64 for peak in peaks] == [4, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--length 1", "--length must be at least 2, got 1"),
        ("--dtype float16", "--dtype float16 needs --device cuda"),
        ("--systems x", "--systems: allowed are 'DynamicConv (ours)'"),
        ("--data x", "--data and --path go together"),
        ("--path a=b", "--data and --path go together"),
        ("--data x --path a=b --length 7", "--length is for random weights"),
        ("--data x --path a=b --beam 1 5", "one of each with --data"),
        ("--data x --path a=nowhere.pt", "no such file: nowhere.pt"),
        ("--data x --path a", "NAME=CHECKPOINT, each name once, got 'a'"),
    ],
)
def test_refuses(capsys, arguments, message):
    out, error = ran(generation.main, capsys, "--quick", *arguments.split(), status=2)
    assert not out and message in error


# ------------------------------------------------------------------------------------------------ CTranslate2


def test_ctranslate2_runs_the_same_model(words, batch, tmp_path):
    pytest.importorskip("ctranslate2")
    from benchmarks import ctranslate2_peer

    def build():
        return systems.build(systems.TRANSFORMER, SMALL, systems.task(words), tiny=True)

    settings = SearchSettings(beam=2, length=7)
    for kind in searches.kinds("float32"):
        folder = ctranslate2_peer.save(build(), words, words, tmp_path / kind, kind)
        search = ctranslate2_peer.EngineSearch(folder, words, words, settings, CPU, kind)
        assert [len(tokens) for tokens in search.translate(batch)] == [7] * len(batch)
        assert len(search.translate(batch[:1])) == 1
        if kind == "float32":
            ctranslate2_peer.check(search, build(), batch, batch[::-1])
            other = build()
            torch.nn.init.normal_(other.decoder.layers[0].fc1.weight)
            with pytest.raises(report.BenchmarkError, match="CTranslate2 computes another model"):
                ctranslate2_peer.check(search, other, batch, batch[::-1])


def test_ctranslate2_is_measured_without_the_model_that_it_was_converted_from(words, batch, tmp_path, monkeypatch):
    pytest.importorskip("ctranslate2")
    candidate = searches.Candidate(systems.TRANSFORMER, searches.CTRANSLATE2, "int8")
    saved = generation._saved(candidate, SMALL, True, tmp_path, batch, batch)
    monkeypatch.setattr(systems, "build", None)
    search = generation.Job(candidate, SMALL, SearchSettings(beam=2, length=7), "float32", "cpu", True, saved)()
    assert [len(tokens) for tokens in search.translate(batch)] == [7] * len(batch)


def test_on_a_gpu_ctranslate2_has_half_precision(monkeypatch):
    monkeypatch.setattr(searches.importlib.util, "find_spec", lambda name: True)
    options = generation.parser().parse_args(["--dtype", "bfloat16", "--device", "cuda"])
    found = generation._candidates(options, torch.device("cuda"), systems)
    assert {c.dtype for c in found.values() if c.search == searches.CTRANSLATE2} == {"bfloat16", "int8_bfloat16"}
    on_cpu = searches.engines(systems.TRANSFORMER, options, CPU)
    assert not on_cpu  # which would compare float32 with bfloat16


@pytest.mark.parametrize("beam", [1, 3])
def test_marian_has_the_transformers_sizes(beam, words, batch):
    pytest.importorskip("transformers")
    from benchmarks import marian_peer

    model = systems.build(systems.TRANSFORMER, SMALL, systems.task(words), tiny=True)
    search = marian_peer.MarianSearch(model, words, SearchSettings(beam=beam, length=7), CPU, torch.float32)
    assert [len(tokens) for tokens in search.translate(batch)] == [6] * len(batch)
    theirs = sum(p.numel() for p in search.model.model.parameters())
    # Marian stores its positions, and the dictionaries are shared there.
    positions = 2 * search.model.config.max_position_embeddings * search.model.config.d_model
    embeddings = len(words) * search.model.config.d_model
    separate = {id(p): p.numel() for p in model.parameters()}
    assert theirs - positions == sum(separate.values()) - embeddings * (len(_matrices(model, len(words))) - 1)


def _matrices(model, size):
    return [p for p in model.parameters() if p.dim() == 2 and len(p) == size]


# ------------------------------------------------------------------------------------------------ trained models


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A corpus whose test set has nine sentences."""
    folder = toys.make_corpus(tmp_path_factory.mktemp("corpus"))
    encode = toys.bpe(folder)
    for lang in ("de", "en"):
        dictionary = Dictionary.load(str(folder / f"dict.{lang}.txt"))
        prefix = str(folder / f"test.de-en.{lang}")
        builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=len(dictionary))
        for line in toys.lines(9, seed=5):
            text = encode(toys.RECIPE.tokenise()(line))
            builder.add_item(dictionary.encode_line(text, add_if_not_exist=False))
        builder.finalize(f"{prefix}.idx")
    return folder


def test_trained_models(capsys, tmp_path, data):
    paths = {
        "DynamicConv": toys.make_checkpoint(tmp_path / "dynamic.pt", data, seed=1),
        "Transformer": toys.make_checkpoint(tmp_path / "transformer.pt", data, "transformer", seed=4),
    }
    file = tmp_path / "translation.json"
    given = [f"{name}={path}" for name, path in paths.items()]
    chosen = ["--systems", "DynamicConv", "DynamicConv, fairseq's search"]
    options = ["--beam", 3, "--sentences", 4, "--latency", 2, "--json", file, *chosen]
    out, _ = ran(generation.main, capsys, "--quick", "--data", data, "--path", *given, *options)
    content = json.loads(file.read_text(encoding="utf-8"))
    assert (content["benchmark"], content["test_sentences"], content["latency_sentences"]) == ("translation", 9, 2)
    found = content["systems"]
    assert set(found) == set(chosen[1:])
    # Batches of the same sentences, and the same rules: the same translations.
    for what in ("tokens", "bleu"):
        assert found["DynamicConv"][what] == found["DynamicConv, fairseq's search"][what]
    for name, measured in found.items():
        assert measured["sentences_per_s"] == pytest.approx(9 / measured["median_s"])
        assert 0 < measured["latency_p50_s"] <= measured["latency_p95_s"]
        assert name in out and 0 <= measured["bleu"] <= 100


def test_checkpoints_and_data_that_do_not_fit(capsys, tmp_path, data):
    path = toys.make_checkpoint(tmp_path / "dynamic.pt", data)
    other = tmp_path / "other"
    other.mkdir()
    for lang in ("de", "en"):
        (other / f"dict.{lang}.txt").write_text("a 1\nb 1\n", encoding="utf-8")
    _, error = ran(generation.main, capsys, "--data", other, "--path", f"a={path}", status=2)
    assert str(path) in error and "the dictionary does not match the checkpoint" in error


def test_dtypes_of_models_are_those_of_the_machine():
    choices = next(a.choices for a in generation.parser()._actions if a.dest == "dtype")
    assert set(choices) <= set(machine.DTYPES)
