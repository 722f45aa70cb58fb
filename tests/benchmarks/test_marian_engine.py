"""benchmarks.marian_engine: Marian's parameters compute what fairseq's Transformer computes, and so does Marian."""

import re
from argparse import Namespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("fairseq")

from fairseq.models.transformer import TransformerModel, base_architecture

from benchmarks import marian_engine, systems
from benchmarks.report import BenchmarkError
from benchmarks.searches import FAIRSEQ, SearchSettings, TorchSearch, collate

CPU = torch.device("cpu")
WORDS, CHANNELS, INNER, POSITIONS = 96, 64, 128, 4096
SIDE = {"embed_dim": CHANNELS, "ffn_embed_dim": INNER, "layers": 2, "attention_heads": 4}
SIZES = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIDE.items()}
LENGTHS = (7, 4, 1, 9, 2)
FIRST = {
    side: f"TransformerBatch{side.capitalize()}->{side}->positionEmbedding->embeddings"
    for side in ("encoder", "decoder")
}


@pytest.fixture(scope="module")
def words():
    return systems.dictionary(WORDS)


def build(words, **options):
    """A Transformer with random biases and layer norms, too, whose hypotheses differ clearly in their scores."""
    torch.manual_seed(9)
    arguments = Namespace(**{**SIZES, "max_source_positions": 64, "max_target_positions": 64, **options})
    base_architecture(arguments)
    model = TransformerModel.build_model(arguments, systems.task(words)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 5)
        for layer in model.decoder.layers:  # else a model with shared embeddings repeats a word
            layer.fc1.weight.mul_(3)
            layer.fc2.weight.mul_(3)
    return model


@pytest.fixture(scope="module")
def batch(words):
    torch.manual_seed(1)
    return [[*torch.randint(words.nspecial, WORDS, (length,)).tolist(), words.eos()] for length in LENGTHS]


def log_probabilities(model, source, target):
    """Of each target word, by fairseq."""
    goal = torch.tensor(target)
    net_input = collate([source], model.encoder.padding_idx, CPU)
    with torch.no_grad():
        before = torch.tensor([[model.decoder.dictionary.eos(), *target[:-1]]])
        output = model(**net_input, prev_output_tokens=before)
        return model.get_normalized_probs(output, log_probs=True)[0].gather(1, goal.unsqueeze(1)).squeeze(1)


# ------------------------------------------------------------------------------------------------ parameters


def shapes(output):
    found = {}
    for side in ("encoder", "decoder"):
        found |= {f"{side}_Wemb": (WORDS, CHANNELS), FIRST[side]: (POSITIONS, CHANNELS)}
        for number in (1, 2):
            layer = f"{side}_l{number}"
            for block in ("self", "context")[: 1 + (side == "decoder")]:
                for letter in "qkvo":
                    found[f"{layer}_{block}_W{letter}"] = (CHANNELS, CHANNELS)
                    found[f"{layer}_{block}_b{letter}"] = (1, CHANNELS)
                found |= {f"{layer}_{block}_Wo_ln_{what}": (1, CHANNELS) for what in ("scale", "bias")}
            found |= {f"{layer}_ffn_W1": (CHANNELS, INNER), f"{layer}_ffn_b1": (1, INNER)}
            found |= {f"{layer}_ffn_W2": (INNER, CHANNELS), f"{layer}_ffn_b2": (1, CHANNELS)}
            found |= {f"{layer}_ffn_ffn_ln_{what}": (1, CHANNELS) for what in ("scale", "bias")}
    outputs = {"Wt": (WORDS, CHANNELS), "W": (CHANNELS, WORDS)}
    return found | ({f"decoder_ff_logit_out_{output}": outputs[output]} if output in outputs else {})


@pytest.mark.parametrize("output", ["Wt", "W", "tied"])
def test_names_and_shapes_are_marians(words, output):
    found = marian_engine.parameters(build(words), output)
    assert {name: array.shape for name, array in found.items()} == shapes(output)
    for array in found.values():
        assert array.dtype == np.float32 and array.flags.c_contiguous


def marians_log_probabilities(given, output, source, target):
    """Of each target word, as Marian computes them from its parameters."""
    get = {name: torch.from_numpy(array) for name, array in given.items()}

    def norm(x, name):
        return F.layer_norm(x, (CHANNELS,), get[f"{name}_ln_scale"][0], get[f"{name}_ln_bias"][0], 1e-6)

    def attention(x, seen, name, causal=False):
        q, k, v = (
            (values @ get[f"{name}_W{letter}"] + get[f"{name}_b{letter}"]).view(len(values), 4, -1).transpose(0, 1)
            for letter, values in (("q", x), ("k", seen), ("v", seen))
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(0, 1).flatten(1)
        return norm(found @ get[f"{name}_Wo"] + get[f"{name}_bo"] + x, f"{name}_Wo")

    def stack(x, side, context=None):
        x = x + get[FIRST[side]][: len(x)]
        for layer in (f"{side}_l1", f"{side}_l2"):
            x = attention(x, x, f"{layer}_self", causal=context is not None)
            if context is not None:
                x = attention(x, context, f"{layer}_context")
            inner = (x @ get[f"{layer}_ffn_W1"] + get[f"{layer}_ffn_b1"]).relu()
            x = norm(inner @ get[f"{layer}_ffn_W2"] + get[f"{layer}_ffn_b2"] + x, f"{layer}_ffn_ffn")
        return x

    context = stack(get["encoder_Wemb"][source], "encoder")
    shifted = torch.cat([torch.zeros(1, CHANNELS), get["decoder_Wemb"][target[:-1]]])
    last = {"tied": get["decoder_Wemb"]} | {
        name[-2:].strip("_"): value for name, value in get.items() if "logit" in name
    }
    weight = last[output].t() if output == "W" else last[output]
    logits = stack(shifted, "decoder", context) @ weight.t()
    return logits.log_softmax(1).gather(1, torch.tensor(target).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize(
    ("output", "options"),
    [
        ("Wt", {}),
        ("W", {"share_decoder_input_output_embed": True}),
        ("tied", {"share_all_embeddings": True}),
        ("tied", {"share_decoder_input_output_embed": True, "no_scale_embedding": True}),
    ],
)
def test_the_parameters_compute_the_same(words, batch, output, options):
    model = build(words, **options)
    found = marian_engine.parameters(model, output)
    for source, target in zip(batch, batch[::-1], strict=True):
        expected = log_probabilities(model, source, target)
        actual = marians_log_probabilities(found, output, source, target)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "listed", "options", "problem"),
    [
        ("float32", False, {"decoder_normalize_before": True}, "layer norms before the blocks"),
        ("float32", False, {"activation_fn": "gelu"}, "another activation than ReLU"),
        ("float32", False, {"encoder_learned_pos": True}, "no sinusoidal positions"),
        ("float32", False, {"no_token_positional_embeddings": True}, "no sinusoidal positions"),
        ("float32", False, {"layernorm_embedding": True}, "a layer norm of the embeddings"),
        ("float32", False, {"decoder_attention_heads": 2}, "several numbers of heads"),
        ("float32", False, {"decoder_output_dim": 32}, "more than a matrix as output layer"),
        ("int8", False, {"encoder_ffn_embed_dim": 96}, "sizes that are not multiples of 64"),
        ("int8", True, {}, "an output layer of its own"),
    ],
)
def test_other_models_are_refused(words, tmp_path, kind, listed, options, problem):
    table = tmp_path / "table.txt" if listed else None
    with pytest.raises(BenchmarkError, match=f"Marian cannot run this model: it has {problem}"):
        marian_engine.save(build(words, **options), words, words, tmp_path / "model", kind, table)


@pytest.mark.parametrize(
    ("more", "problem"), [(1, "target words that are not a multiple of 8"), (8, "an output layer of its own")]
)
def test_int8_needs_whole_groups_of_words(tmp_path, more, problem):
    words = systems.dictionary(WORDS + more)
    with pytest.raises(BenchmarkError, match=re.escape(problem)):
        marian_engine.save(build(words), words, words, tmp_path / "model", "int8")


def test_a_table_allows_the_same_words(words, tmp_path):
    table = tmp_path / "lists.txt"
    table.write_text("w1 w2 0.5\n10\u00a0000 w2 0.25\nw3 NULL 1\n", encoding="utf-8")
    written = marian_engine.lexical_table(table, tmp_path / "table.txt", words).read_text(encoding="utf-8")
    assert written == f"</s> {words[WORDS - 1]} 1\nw1 w2 1\n10\u00a0000 w2 1\nw3 </s> 1\n"


def test_lengths_cannot_be_forced(words, tmp_path):
    with pytest.raises(BenchmarkError, match="Marian cannot force the lengths"):
        marian_engine.EngineSearch(tmp_path, words, words, SearchSettings(length=7))


# ------------------------------------------------------------------------------------------------ the engine


@pytest.fixture
def engine(tmp_path):
    """engine(model, beam, kind, shortlist): the model in Marian."""
    pytest.importorskip("pymarian", reason="pymarian is not installed: pip install pymarian (Linux on x86-64)")

    def search(model, beam, kind="float32", shortlist=None):
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        known = model.decoder.dictionary
        marian_engine.save(model, known, known, folder, kind, shortlist)
        return marian_engine.EngineSearch(folder, known, known, SearchSettings(beam, longest=12))

    return search


@pytest.fixture
def all_words(words, tmp_path):
    """A table that allows every word."""
    table = tmp_path / "lists.txt"
    table.write_text("".join(f"{word} NULL 1\n" for word in words.symbols), encoding="utf-8")
    return table


@pytest.mark.parametrize("longest", range(6, 13))
def test_padding_changes_nothing(words, engine, longest):
    torch.manual_seed(longest)
    lengths = (longest, longest // 2, 2)
    batch = [[*torch.randint(words.nspecial, WORDS, (length - 1,)).tolist(), words.eos()] for length in lengths]
    search = engine(build(words), 1)
    alone = [search.translate([sentence])[0] for sentence in batch]
    assert search.translate(batch) == alone and search.translate(batch[::-1]) == alone[::-1]


@pytest.mark.parametrize("options", [{}, {"share_all_embeddings": True}])
def test_marian_translates_as_fairseq_does(words, batch, engine, options):
    model = build(words, **options)
    found = engine(model, 1).scored(batch)
    theirs = TorchSearch(FAIRSEQ, build(words, **options), words, SearchSettings(1, longest=12), CPU).translate(batch)
    assert len(set().union(*theirs)) > 3
    for (tokens, score), other, source in zip(found, theirs, batch, strict=True):
        assert tokens == other
        target = [*tokens, words.eos()][:12]  # the longest translation has no end in Marian
        assert score == pytest.approx(float(log_probabilities(model, source, target).sum()), rel=1e-4, abs=1e-4)


def test_a_beam_has_fairseqs_scores(words, batch, engine):
    model = build(words)
    search = engine(model, 3)
    found = search.scored(batch)
    assert search.translate(batch) == [tokens for tokens, _ in found]
    for (tokens, score), source in zip(found, batch, strict=True):
        target = [*tokens, words.eos()][:12]
        assert score == pytest.approx(float(log_probabilities(model, source, target).sum()), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("beam", [1, 3])
def test_another_model_is_noticed(words, engine, beam):
    search = engine(build(words), beam)
    marian_engine.check(search, build(words))
    other = build(words)
    torch.nn.init.normal_(other.decoder.layers[0].fc1.weight)
    with pytest.raises(BenchmarkError, match="Marian computes another model: a translation has score -"):
        marian_engine.check(search, other)


@pytest.mark.parametrize(("beam", "length"), [(1, 7), (3, 8)])
def test_parts_of_a_batch_are_translated_alike(words, engine, beam, length):
    torch.manual_seed(length)
    batch = [[*sentence, words.eos()] for sentence in torch.randint(words.nspecial, WORDS, (5, length - 1)).tolist()]
    model = build(words)
    expected = engine(model, beam).translate(batch)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert engine(model, beam).translate(batch) == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_a_table_of_all_words_changes_nothing(words, batch, engine, all_words, kind):
    model = build(words, share_all_embeddings=True)
    plain, listed = (engine(model, 1, kind, table).scored(batch) for table in (None, all_words))
    if kind == "float32":
        assert [tokens for tokens, _ in listed] == [tokens for tokens, _ in plain]
    for (tokens, score), source in zip(listed, batch, strict=True):
        target = [*tokens, words.eos()][:12]
        expected = float(log_probabilities(model, source, target).sum())
        assert score == pytest.approx(expected, rel=1e-4 if kind == "float32" else 0.1)


def test_a_table_restricts_the_words(words, batch, engine, tmp_path, monkeypatch):
    monkeypatch.setattr("lightconv_plugin.generation.shortlist._FREQUENT", 0)
    table = tmp_path / "lists.txt"
    listed = [f"w{number}" for number in range(40, 60)]
    table.write_text("".join(f"{word} NULL 1\n" for word in listed), encoding="utf-8")
    found = engine(build(words), 1, shortlist=table).translate(batch)
    # Two times the beam are always allowed, and up to seven are added.
    allowed = {words.index(word) for word in listed} | set(range(words.nspecial + 2 + 7))
    assert set().union(*found) <= allowed and any(len(tokens) > 1 for tokens in found)


@pytest.mark.parametrize("size", [WORDS, WORDS + 8])
def test_int8_is_near(size, batch, engine):
    """Also where Marian's packed output layer would be wrong."""
    words = systems.dictionary(size)
    model = build(words, share_all_embeddings=True)
    for (tokens, score), source in zip(engine(model, 1, "int8").scored(batch), batch, strict=True):
        target = [*tokens, words.eos()][:12]
        expected = float(log_probabilities(model, source, target).sum())
        assert score != expected and score == pytest.approx(expected, rel=0.1)
