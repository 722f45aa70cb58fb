"""Perplexity: fairseq-eval-lm's log, `lightconv score --metric perplexity`, and `lightconv tune` of language models."""

import json
import re
from argparse import Namespace

import pytest
import torch

from lightconv_plugin.cli import main
from lightconv_plugin.errors import InputError
from lightconv_plugin.generation import fairseq_generate
from lightconv_plugin.recipes.evaluation import measure_perplexity
from lightconv_plugin.scoring import perplexity
from lightconv_plugin.scoring.perplexity import batches, parse_eval_lm_log, positions, samples, task_of
from tests import fairseq_cli
from tests.scoring.corpora import as_json, refused, run, write

LOG = [
    "2026-01-01 00:00:00 | INFO | fairseq_cli.eval_lm | data-bin valid 12 examples",
    "2026-01-01 00:00:00 | INFO | fairseq_cli.eval_lm | Evaluated 1,234 tokens in 0.1s (9999.99 tokens/s)",
    "2026-01-01 00:00:00 | INFO | fairseq_cli.eval_lm | Loss (base 2): 4.5000, Perplexity: 22.63",
]
# As fairseq ends when there was nothing to score.
NOTHING = [
    "2026-01-01 00:00:00 | INFO | fairseq_cli.eval_lm | Evaluated 0 tokens in 0.0s (0.00 tokens/s)",
    "2026-01-01 00:00:00 | INFO | fairseq_cli.eval_lm | Loss (base 2): 0.0000, Perplexity: 1.00",
]


def test_the_numbers_of_a_log(tmp_path, capsys):
    got = as_json(capsys, "--metric", "perplexity", "--log", write(tmp_path / "log", LOG))
    assert got == {"perplexity": 22.63, "loss": 4.5, "tokens": 1234, "unit": "token"}
    assert run("--metric", "perplexity", "--log", tmp_path / "log", "--output", tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert out == "perplexity = 22.63 (loss 4.5000 bits a token, 1,234 tokens)\n"
    assert (tmp_path / "out").read_text() == out


@pytest.mark.parametrize(
    "lines, said",
    [
        (LOG[:2], "is cut off or not from fairseq-eval-lm: it lacks the line 'Loss (base 2)"),
        ([*LOG[:2], LOG[2][:-9]], "is cut off or not from fairseq-eval-lm: it lacks the line 'Loss"),
        ([*LOG[:2], LOG[2][:-3]], "is cut off or not from fairseq-eval-lm: it lacks the line 'Loss"),
        ([LOG[0], LOG[2]], "it lacks the line 'Evaluated … tokens"),
        (["hello"], "it lacks the line 'Evaluated"),
        *((LOG + more, "has the results of several runs") for more in (LOG, LOG[:2], LOG[2:])),
        ([*LOG[:2], LOG[2].replace("22.63", "inf")], "the perplexity is inf: the model gives some word no probability"),
        ([*LOG[:2], LOG[2].replace("22.63", "nan")], "the perplexity is nan"),
        (NOTHING, "no token was scored"),
    ],
    ids="no-result cut-before cut-in-number no-count text twice two-counts two-results inf nan nothing-scored".split(),
)
def test_a_log_that_is_not_whole_is_refused(lines, said, tmp_path, capsys):
    log = write(tmp_path / "log", lines)
    message = refused(capsys, "--metric", "perplexity", "--log", log)
    assert said in message and str(log) in message


def test_the_beginnings_of_samples_are_not_tokens_of_the_text():
    """With --add-bos-token, fairseq counts one <s> for each sample that it scores."""
    config = "INFO | fairseq_cli.eval_lm | {'task': {'_name': 'language_modeling', 'add_bos_token': True}}"
    skipped = "WARNING | fairseq.tasks.fairseq_task | 2 samples have invalid sizes and will be skipped, max_positions=9"
    assert parse_eval_lm_log([config, *LOG], "log").tokens == 1234 - 12
    assert parse_eval_lm_log([config, LOG[0], skipped, *LOG[1:]], "log").tokens == 1234 - 10


def test_a_perplexity_of_joined_bpe_is_per_word(tmp_path, capsys):
    config = "INFO | fairseq_cli.eval_lm | {'common_eval': {'post_process': '@@ ', 'quiet': False}}"
    got = as_json(capsys, "--metric", "perplexity", "--log", write(tmp_path / "log", [config, *LOG]))
    assert got == {"perplexity": 22.63, "loss": 4.5, "tokens": 1234, "unit": "word"}
    assert "(loss 4.5000 bits a word, 1,234 tokens)" in parse_eval_lm_log([config, *LOG], "log").lines()
    alone = config.replace("@@ ", "subword_nmt")  # --remove-bpe, for which fairseq joins nothing
    assert parse_eval_lm_log([alone, *LOG], "log").unit == "token"


def test_options_of_the_other_metrics_are_refused(files, tmp_path, capsys):
    log = write(tmp_path / "log", LOG)
    assert "--metric perplexity needs --log FILE" in refused(capsys, "--metric", "perplexity")
    said = refused(capsys, "--metric", "perplexity", "--log", log, "--lang", "de")
    assert "--lang is not valid with --metric perplexity" in said
    assert "--gen is not valid" in refused(capsys, "--metric", "perplexity", "--log", log, "--gen", log)
    assert "--log is not valid with --metric bleu" in refused(capsys, *files(["a"], ["a"]), "--log", log)


def test_the_task_of_a_checkpoint_of_stock_fairseq():
    """Its lightconv_lm keeps the model's options as a Namespace, the task's as a dictionary."""
    state = {"cfg": {"model": Namespace(max_target_positions=32), "task": {"tokens_per_sample": 64}}}
    assert task_of(state) == {"max_target_positions": 32, "decoder_learned_pos": None, "tokens_per_sample": 64}
    assert task_of({"cfg": None, "args": Namespace(tokens_per_sample=64)}) == {"tokens_per_sample": 64}


@pytest.mark.parametrize(
    "mode, window, expected",
    [
        ("none", 0, ["--max-tokens", 1 << 20]),
        ("none", 96, ["--max-tokens", 1 << 18]),
        ("eos", 0, ["--max-tokens", 1 << 20]),
        ("eos", 96, ["--max-tokens", 1 << 20, "--batch-size", 1 << 13]),
    ],
)
def test_a_batch_has_room_for_the_context(mode, window, expected):
    """2^27 probabilities over 128 words are 2^20 positions, of which the window's are not counted."""
    task = Namespace(tokens_per_sample=128, sample_break_mode=mode)
    assert batches(task, 128, 128, window) == ["--context-window", str(window), *map(str, expected)]
    for longest, wrong in ((128, -1), (128, 128), (64, 64)):
        with pytest.raises(InputError, match=f"`context_window` must be in 0 … {longest - 1}, .* got {wrong}"):
            batches(task, longest, 128, wrong)


def test_a_long_sample_fits_into_a_batch():
    task = Namespace(tokens_per_sample=128, sample_break_mode="complete")
    assert batches(task, 1024, 1 << 27, 64) == ["--context-window", "64", "--max-tokens", "1024", "--batch-size", "1"]
    task.sample_break_mode = "none"
    assert batches(task, 1024, 1 << 27, 64) == ["--context-window", "64", "--max-tokens", "64"]


# ------------------------------------------------------------------------------------------------ on a trained model


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """(data, folder of three epochs) of a language model."""
    pytest.importorskip("fairseq")
    corpus = tmp_path_factory.mktemp("a text")
    fairseq_cli.write_corpus(corpus)
    data, folder = corpus / "data-bin", corpus / "check points"
    parts = [f"--{name}pref={corpus / name}.de" for name in ("train", "valid", "test")]
    fairseq_cli.run("preprocess", "--only-source", *parts, f"--destdir={data}", "--workers=1")
    fairseq_cli.run(
        *("train", data, "--task", "language_modeling", "--user-dir", fairseq_cli.USER_DIR),
        *("--arch", "dynamicconv_lm", "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 24),
        *("--decoder-layers", 2, "--decoder-kernel-size-list", "3,7", "--decoder-attention-heads", 4),
        *("--tokens-per-sample", 20, "--optimizer", "adam", "--lr", 0.01, "--max-tokens", 100, "--cpu"),
        *("--num-workers", 0, "--save-dir", folder, "--max-epoch", 3),
    )
    return data, folder


def test_tuning_a_language_model_is_measuring_each_average(training, tmp_path, capsys):
    data, folder = training
    command = ["tune", data, folder, "--by", "perplexity", "--average", 1, 2, "--json", "--", "--cpu"]
    assert main.main([*map(str, command), "--context-window", "15"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert {(s["average"], s["lenpen"]) for s in got["tried"]} == {(1, None), (2, None)}
    assert got["score"] == min(s["score"] for s in got["tried"])
    assert len({s["score"] for s in got["tried"]}) == 2
    best = folder / f"average{got['average']}.pt"
    assert got["checkpoint"] == str(best)
    # The log that it left says the same, and scripts/perplexity.sh's function the same again.
    log = best.with_suffix(".valid.eval_lm")
    assert as_json(capsys, "--metric", "perplexity", "--log", log)["perplexity"] == got["score"]
    result = measure_perplexity(data, best, "valid", 15, ["--cpu"])
    assert result["perplexity"] == got["score"]
    assert json.loads(best.with_suffix(".valid.ppl").read_text()) == result
    assert (result["context_window"], result["tokens_per_sample"]) == (15, 20)
    assert result["tokens"] == parse_eval_lm_log(log.read_text().splitlines(), log).tokens


def test_options_are_recorded_as_they_were_used(training, tmp_path):
    """Two names that differ after a dot have results of their own."""
    data, folder = training
    for name, length in (("model.v1", 10), ("model.v2", 20)):
        (tmp_path / name).hardlink_to(folder / "checkpoint1.pt")
        options = ["--cpu", "--tokens-per-sample", str(length), "--sample-break-mode", "none"]
        result = measure_perplexity(data, tmp_path / name, "valid", 0, options)
        assert result["tokens_per_sample"] == length
        assert json.loads((tmp_path / f"{name}.valid.ppl").read_text()) == result
    assert (tmp_path / "model.v1.valid.eval_lm").is_file()


@pytest.mark.parametrize("mode", ["eos", "complete"])
def test_sentences_longer_than_a_sample_without_its_context_are_scored(mode, training, tmp_path, monkeypatch):
    """Whatever the batches are, the perplexity is the same, and every token is scored."""
    data, folder = training
    (tmp_path / "model.pt").hardlink_to(folder / "checkpoint1.pt")

    def measured(probabilities):
        monkeypatch.setattr(perplexity, "BATCH_OF_PROBABILITIES", probabilities)
        return measure_perplexity(data, tmp_path / "model.pt", "valid", 17, ["--cpu", "--sample-break-mode", mode])

    few, many = measured(1), measured(1 << 27)
    assert few["perplexity"] == pytest.approx(many["perplexity"], abs=0.011)
    assert few["sample_break_mode"] == mode


@pytest.fixture
def of_lengths(training, tmp_path):
    """Makes tmp_path the data, with lines of so many words as its test set, beside model.pt."""
    from fairseq.data import indexed_dataset

    def make(*lengths: int):
        (tmp_path / "dict.txt").write_bytes((training[0] / "dict.txt").read_bytes())
        builder = indexed_dataset.make_builder(str(tmp_path / "test.bin"), impl="mmap", vocab_size=100)
        for length in lengths:
            builder.add_item(torch.tensor([5] * length + [2]))
        builder.finalize(str(tmp_path / "test.idx"))

    (tmp_path / "model.pt").hardlink_to(training[1] / "checkpoint1.pt")
    return make


def test_skipped_sentences_are_noticed_among_beginnings_of_samples(of_lengths, tmp_path):
    """One sentence of 21 tokens, which the model has no positions for, and an <s> for each of 30 others."""
    of_lengths(*(1,) * 30, 20)
    options = ["--cpu", "--add-bos-token", "--sample-break-mode", "eos"]
    with pytest.raises(InputError, match="scored 60 of the 81 tokens"):
        measure_perplexity(tmp_path, tmp_path / "model.pt", "test", 0, options)


def test_empty_lines_between_documents_are_not_tokens(of_lengths, tmp_path):
    """fairseq leaves them out: documents of one sentence are scored as sentences are."""

    def measured(mode, *lengths):
        of_lengths(*lengths)
        return measure_perplexity(tmp_path, tmp_path / "model.pt", "test", 0, ["--cpu", "--sample-break-mode", mode])

    expected = measured("eos", 3, 5) | {"sample_break_mode": "complete_doc"}
    assert measured("complete_doc", 0, 3, 0, 0, 5, 0) == expected
    with pytest.raises(InputError, match="scored 4 of the 25 tokens"):
        measured("complete_doc", 0, 3, 0, 20)


@pytest.fixture
def pieces(training, tmp_path):
    """(data whose lines are of random pieces, some of which end in "@@", the model, tokens, words with </s>)."""
    from fairseq.data import indexed_dataset

    entries = (training[0] / "dict.txt").read_text().splitlines()
    joined = set(range(4, 4 + len(entries), 3))  # after fairseq's four symbols
    marked = [entry.replace(" ", "@@ " if i + 4 in joined else " ") for i, entry in enumerate(entries)]
    (tmp_path / "dict.txt").write_text("\n".join(marked) + "\n")
    (tmp_path / "model.pt").hardlink_to(training[1] / "checkpoint1.pt")
    generator, tokens, words = torch.Generator().manual_seed(0), 0, 0
    builder = indexed_dataset.make_builder(str(tmp_path / "test.bin"), impl="mmap", vocab_size=100)
    for length in range(1, 19):
        line = torch.randint(4, 4 + len(entries), (length,), generator=generator)
        line[-1] = 5
        builder.add_item(torch.cat([line, torch.tensor([2])]))
        tokens += length + 1
        words += 1 + sum(int(i) not in joined for i in line)
    builder.finalize(str(tmp_path / "test.idx"))
    return tmp_path, tmp_path / "model.pt", tokens, words


@pytest.mark.parametrize(
    "options, window",
    [(["eos"], 0), (["none"], 19), (["none", "--add-bos-token"], 0)],
    ids=["sentences", "cut-after-each-token", "beginnings"],
)
def test_words_that_samples_cut_are_words(options, window, pieces):
    data, model, tokens, words = pieces
    options = ["--cpu", "--sample-break-mode", *options]
    by_token = measure_perplexity(data, model, "test", window, options)
    by_word = measure_perplexity(data, model, "test", window, [*options, "--post-process", "@@ "])
    assert (by_token["tokens"], by_word["tokens"]) == (tokens, tokens)
    assert by_word["loss"] == pytest.approx(by_token["loss"] * tokens / words, abs=1e-4)
    assert by_word["perplexity"] == pytest.approx(2 ** by_word["loss"], rel=1e-4)
    if options[-1] == "eos":  # no sample cuts a word: fairseq's own number
        own = ["--task", "language_modeling", "--tokens-per-sample", "20", *options, "--post-process", "@@ "]
        log = fairseq_generate.eval_lm_log(data, model, "test", own).splitlines()
        assert by_word["loss"] == pytest.approx(parse_eval_lm_log(log, "log").loss, abs=3e-4)


@pytest.mark.parametrize(
    "options, said",
    [
        (["--post-process", "sentencepiece"], "--post-process must be '@@ ' for fairseq-eval-lm, got 'sentencepiece'"),
        (["--remove-bpe", "--output-word-probs"], "--output-word-probs is not valid with --post-process"),
    ],
)
def test_what_is_joined_in_another_way_is_refused(options, said, training):
    with pytest.raises(InputError, match=said):
        measure_perplexity(training[0], training[1] / "checkpoint1.pt", "valid", 0, ["--cpu", *options])


def test_a_perplexity_per_word_says_so(training, tmp_path, capsys):
    (tmp_path / "model.pt").hardlink_to(training[1] / "checkpoint1.pt")
    words = ["perplexity", training[0], tmp_path / "model.pt", "--subset", "valid", "--cpu", "--post-process", "@@ "]
    assert main.main([*map(str, words)]) == 0
    assert re.match(r"valid: perplexity [\d.]+ per word over [\d,]+ tokens, ", capsys.readouterr().out)
    assert json.loads((tmp_path / "model.valid.ppl").read_text())["unit"] == "word"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--subset", "test"], "settings chosen on a test set"),
        (["--subset", "dev"], "dev.idx is missing"),
        (["--lenpen", "1"], "--lenpen is not valid with --by perplexity"),
        (["--", "--context-window", "20"], "`context_window` must be in 0 … 19"),
        (["--", "--context-window", "10", "--tokens-per-sample", "10"], "`context_window` must be in 0 … 9"),
        (["--", "--tokens-per-sample", "0"], "--tokens-per-sample must be at least 1, got 0"),
        (["--", "--cpu", "--context-window", "5", "--num-workers", "2"], "--num-workers must be 0 or 1 with"),
        (
            ["--", "--cpu", "--tokens-per-sample", "9999", "--no-such-option"],
            "in the options for fairseq-eval-lm: unrecognized arguments: --no-such-option",
        ),
        (["--", "--path", "x"], "--path is set by this command: remove it from the options of fairseq-eval-lm"),
    ],
    ids=["test", "subset", "lenpen", "window", "shorter-samples", "no-samples", "workers", "option", "path"],
)
def test_what_tuning_a_language_model_refuses(arguments, said, training, capsys):
    data, folder = training
    assert main.main(["tune", str(data), str(folder), "--by", "perplexity", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_another_checkpoint_is_not_measured_in_place_of_the_one_named(training, capsys):
    data, folder = training
    one, other = (folder / f"checkpoint{number}.pt" for number in (1, 2))
    assert main.main(["perplexity", *map(str, (data, one, "--subset", "valid", "--path", other))]) == 2
    assert "--path is set by this command" in capsys.readouterr().err
    assert not one.with_suffix(".valid.ppl").exists()


def test_a_translation_model_has_no_perplexity_here(training, toy_training, capsys):
    with pytest.raises(InputError, match="is not a language model"):
        measure_perplexity(training[0], toy_training / "checkpoint1.pt", "valid")


def test_a_learned_position_is_the_start_symbols():
    """fairseq counts neither the position nor the <s> that --add-bos-token adds to each sample."""
    task = {"max_target_positions": 512, "tokens_per_sample": 512, "decoder_learned_pos": True}
    assert positions(task) == 512 and positions({**task, "add_bos_token": True}) == 511
    assert positions({**task, "add_bos_token": True, "decoder_learned_pos": False}) == 512


def test_the_samples_are_those_of_the_training():
    task = {"tokens_per_sample": 64, "sample_break_mode": "eos", "output_dictionary_size": -1}
    assert samples(task) == "--task language_modeling --tokens-per-sample 64 --sample-break-mode eos".split()
    task |= {"sample_break_mode": None, "max_target_positions": 32, "output_dictionary_size": 30, "add_bos_token": True}
    expected = "--task language_modeling --tokens-per-sample 32 --sample-break-mode none --output-dictionary-size 30"
    assert samples(task) == [*expected.split(), "--add-bos-token"]
