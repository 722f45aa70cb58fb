"""--task translation_fast in fairseq's own commands."""

import contextlib
import re
from argparse import Namespace

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import FairseqTask

from lightconv_plugin.generation import FastGenerator, batch_search
from lightconv_plugin.generation import generator as generator_module
from lightconv_plugin.generation.task import TranslationFastConfig, TranslationFastTask
from tests import fairseq_cli, programs
from tests.generation import toys
from tests.models.language_model_toys import build_lm, scramble
from tests.models.toys import dictionary
from tests.warm_python import warm_python


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(data-bin, checkpoint of a hybrid trained with --task translation, what the training printed)."""
    folder = tmp_path_factory.mktemp("fast")
    data = fairseq_cli.binarise(folder)
    types = ["--decoder-conv-type", "dynamic,attention"]
    log = fairseq_cli.run(
        *["train", data, "--user-dir", fairseq_cli.USER_DIR, "--arch", "dynamicconv", *fairseq_cli.SIZE, *types],
        *[*fairseq_cli.RECIPE, "--lr", "1e-2", "--max-update", "100", "--save-dir", folder, "--no-epoch-checkpoints"],
        *["--task", "translation_fast", "--eval-bleu", "--eval-bleu-args", '{"beam": 2, "max_len_b": 12}'],
        *["--validate-interval", "8"],
    )
    return data, folder / "checkpoint_last.pt", log


def lines(output: str, kinds: str = "HDP") -> list[str]:
    return sorted(line for line in output.splitlines() if re.match(f"[{kinds}]-[0-9]+\t", line))


def generate(trained, *arguments, command: str = "generate", **options) -> str:
    data, checkpoint, _ = trained
    common = [data, "--path", checkpoint, "--user-dir", fairseq_cli.USER_DIR, "--cpu"]
    return fairseq_cli.run(command, *common, "--max-len-b", "20", *arguments, **options)


def test_generate_writes_the_same_hypotheses(trained):
    options = ["--batch-size", "5", "--beam", "4", "--nbest", "3", "--num-workers", "0", "--prefix-size", "1"]
    expected = generate(trained, *options)
    found = generate(trained, *options, "--task", "translation_fast")
    assert len(lines(expected)) == 3 * 3 * 12
    assert [line.split("\t")[::2] for line in lines(found, "HD")] == [
        line.split("\t")[::2] for line in lines(expected, "HD")
    ]
    for kind in "HDP":
        for ours, theirs in zip(lines(found, kind), lines(expected, kind), strict=True):
            numbers = [[float(number) for number in line.split("\t")[1].split()] for line in (ours, theirs)]
            assert numbers[0] == pytest.approx(numbers[1], abs=2e-4)
    assert "falling back to fairseq's generator" not in found
    assert re.search("Generate test .*BLEU.*", found)[0] == re.search("Generate test .*BLEU.*", expected)[0]


def test_interactive_in_eight_bits(trained):
    text = "ich sieht den Hund\nnicht oft\n"
    options = ["--source-lang", "de", "--target-lang", "en", "--task", "translation_fast"]
    output = generate(trained, *options, "--generation-dtype", "int8", command="interactive", stdin=text)
    assert len(lines(output, "H")) == 2


def test_validation_translates_with_the_weights_of_the_day(trained):
    """One generator serves a training's validations; BLEU must not stay that of the first."""
    scores = re.findall(r'"valid_bleu": "([0-9.]+)"', trained[2])
    assert len(scores) > 2
    assert len(set(scores)) > 1


def test_builds_the_generator_that_was_asked_for():
    words = dictionary(toys.VOCABULARY)
    task = TranslationFastTask(TranslationFastConfig(generation_dtype="int8"), words, words)
    torch.manual_seed(1)
    models = [toys.ours()]
    generator = task.build_generator(models, Namespace(beam=3, lenpen=0.5, no_repeat_ngram_size=2, unnormalized=True))
    assert (type(generator), generator.options.dtype, generator.beam_size) == (FastGenerator, "int8", 3)
    assert (generator.options.len_penalty, generator.options.no_repeat_ngram_size) == (0.5, 2)
    assert not generator.options.normalize_scores
    assert generator.options.cuda_graphs is None
    aligned = task.build_generator(models, Namespace(print_alignment="hard"))
    assert type(aligned) is SequenceGeneratorWithAlignment
    for option in ({"decoder_cross_attention_conv": "q"}, {"no_cross_attention": True}):
        name = "--" + next(iter(option)).replace("_", "-")
        with pytest.raises(ValueError, match=f"--print-alignment: a model with .*{name}.* has no weights"):
            task.build_generator([*models, toys.ours(**option)], Namespace(print_alignment="hard"))
    assert type(task.build_generator(models, Namespace(), seq_gen_cls=SequenceGenerator)) is SequenceGenerator


def test_the_log_says_that_alignments_are_not_printed_in_the_type_that_was_asked_for(caplog):
    words = dictionary(toys.VOCABULARY)
    task = TranslationFastTask(TranslationFastConfig(generation_dtype="int8"), words, words)
    with caplog.at_level("INFO", logger="lightconv_plugin.generation"):
        task.build_generator([toys.ours()], Namespace(print_alignment="hard"))
    assert "falling back to fairseq's generator, not in int8: --print-alignment is not supported" in caplog.text


def test_references_are_scored_in_the_models_type():
    words = dictionary(toys.VOCABULARY)
    scoring, models = Namespace(score_reference=True), [toys.ours()]
    for dtype in ("float32", "auto"):
        task = TranslationFastTask(TranslationFastConfig(generation_dtype=dtype), words, words)
        assert type(task.build_generator(models, scoring)) is SequenceScorer
    task = TranslationFastTask(TranslationFastConfig(generation_dtype="int8"), words, words)
    with pytest.raises(ValueError, match=r"--score-reference scores in the model's own type, not in .*-dtype int8"):
        task.build_generator(models, scoring)


def test_a_language_model_that_would_be_left_out_is_refused():
    """fairseq-interactive loads none, and references are scored without it; neither says so."""
    words = dictionary(toys.VOCABULARY)
    task, models = TranslationFastTask(TranslationFastConfig(), words, words), [toys.ours()]
    with pytest.raises(ValueError, match="--lm-path: only fairseq-generate loads a language model"):
        task.build_generator(models, Namespace(lm_path="lm.pt"))
    loaded = {"lm_model": scramble(build_lm()), "lm_weight": 0.5}
    assert task.build_generator(models, Namespace(lm_path="lm.pt"), extra_gen_cls_kwargs=loaded).lm_weight == 0.5
    with pytest.raises(ValueError, match="--lm-path and --score-reference exclude each other"):
        task.build_generator(models, Namespace(lm_path="lm.pt", score_reference=True), extra_gen_cls_kwargs=loaded)


def test_fairseq_continues_texts_with_language_models(caplog):
    model, batch = scramble(build_lm()), {"net_input": {"src_tokens": torch.tensor([[4, 5, 6], [7, 8, 9]])}}
    words = model.decoder.dictionary
    with caplog.at_level("INFO", logger=generator_module.__name__):
        found = FastGenerator([model], words, beam_size=2, max_len_b=5).generate([], batch)
    expected = SequenceGenerator([model], words, beam_size=2, max_len_b=5).generate([], batch)
    assert [ranked[0]["tokens"].tolist() for ranked in found] == [ranked[0]["tokens"].tolist() for ranked in expected]
    assert "falling back to fairseq's generator: a language model is not supported" in caplog.text


def test_the_reason_of_a_fall_back_is_that_of_the_models_and_said_once(caplog):
    """fairseq-generate adds words of the references to the dictionary, after which no model fits it."""
    model = toys.ours(prepare=scramble, adaptive_softmax_cutoff=[20, 40])
    words = model.decoder.dictionary
    generator = FastGenerator([model], words, beam_size=2, max_len_b=5)
    with caplog.at_level("INFO", logger=generator_module.__name__):
        for word in ("new", "newer", "newest"):
            generator.generate([], toys.batch(2))
            words.add_symbol(word)
    assert [record.getMessage() for record in caplog.records] == [
        "falling back to fairseq's generator: an adaptive softmax (adaptive_softmax_cutoff) is not supported"
    ]


def test_a_training_is_told_before_its_first_update_what_its_search_cannot_do(monkeypatch):
    """The first batch is that of the first validation, after an epoch that nothing has saved."""
    words = dictionary(toys.VOCABULARY)
    monkeypatch.setattr(FairseqTask, "build_model", lambda task, cfg, from_checkpoint: toys.ours())
    graphs = {"generation_cuda_graphs": True}, "`cuda_graphs` needs a GPU, got a model on cpu"
    for options, said in (({}, ""), graphs):
        config = TranslationFastConfig(eval_bleu=True, eval_bleu_args="{}", **options)
        task = TranslationFastTask(config, words, words)
        model = task.build_model(Namespace())
        with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
            task.begin_epoch(1, model)
    task = TranslationFastTask(TranslationFastConfig(), words, words)
    task.begin_epoch(1, task.build_model(Namespace()))  # without --eval-bleu


def test_cuda_graphs_need_a_gpu():
    words = dictionary(toys.VOCABULARY)
    task = TranslationFastTask(TranslationFastConfig(generation_cuda_graphs=True), words, words)
    generator = task.build_generator([toys.ours()], Namespace(beam=2))
    with pytest.raises(ValueError, match="`cuda_graphs` needs a GPU, got a model on cpu"):
        generator.generate([], toys.batch())


def test_cuda_graphs_are_off_during_validation_and_can_be_turned_off(monkeypatch):
    """`task` builds the generator of --eval-bleu with the model, and fairseq-generate's afterwards."""
    words = dictionary(toys.VOCABULARY)
    monkeypatch.setattr(FairseqTask, "build_model", lambda task, cfg, from_checkpoint: toys.ours())
    for options, validating, generating in (
        ({}, False, None),
        ({"generation_cuda_graphs": True}, True, True),
        ({"generation_no_cuda_graphs": True}, False, False),
    ):
        config = TranslationFastConfig(eval_bleu=True, eval_bleu_args="{}", **options)
        task = TranslationFastTask(config, words, words)
        model = task.build_model(Namespace())
        assert task.sequence_generator.options.cuda_graphs is validating
        assert task.build_generator([model], Namespace()).options.cuda_graphs is generating
    task.cfg.generation_cuda_graphs = True
    with pytest.raises(ValueError, match="--generation-cuda-graphs and --generation-no-cuda-graphs exclude"):
        task.build_generator([model], Namespace())


def test_auto_is_resolved_at_the_first_batch(monkeypatch, caplog):
    monkeypatch.setattr(batch_search, "fastest_type", lambda models, device, why: ("int8", f"a test on {device}"))
    generator = FastGenerator([toys.ours().eval()], dictionary(toys.VOCABULARY), dtype="auto", beam_size=2)
    assert generator.options.dtype == "auto"
    with caplog.at_level("INFO", logger=generator_module.__name__):
        found = generator.generate([], toys.batch())
    assert generator.options.dtype == generator._search.options.dtype == "int8" and len(found) == 5
    assert "generation in int8: a test on cpu" in caplog.text


def test_registering_the_task_imports_no_search():
    """A training needs none, unless its validation translates."""
    code = (
        "import sys, fairseq, lightconv_plugin\n"
        "from fairseq.tasks import TASK_REGISTRY\n"
        "assert 'translation_fast' in TASK_REGISTRY\n"
        "print(*sorted(name for name in sys.modules if name.startswith('lightconv_plugin.generation')))"
    )
    done = programs.run(warm_python(), "-c", code)
    assert done.stdout.split() == ["lightconv_plugin.generation", "lightconv_plugin.generation.task"]
