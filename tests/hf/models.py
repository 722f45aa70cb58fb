"""Small random models, and directories as `lightconv export` writes them."""

import torch

from lightconv_plugin.checkpoints.saving import Side, save_exported
from lightconv_plugin.hf import LightConvConfig, LightConvForCausalLM, LightConvForConditionalGeneration
from lightconv_plugin.modules import MIXERS, build_model
from lightconv_plugin.text.recipe import Recipe
from lightconv_plugin.text.sides import TextSide

SMALL = {
    "vocab_size": 29,
    "d_model": 16,
    "ffn_dim": 24,
    "num_heads": 4,
    "encoder_kernel_sizes": (3, 4),
    "decoder_kernel_sizes": (3, 4),
}
STILL = {"dropout": 0.0, "weight_dropout": 0.0, "attention_dropout": 0.0}
ONE_OF_EACH = [*MIXERS, *reversed(MIXERS)]
PAD, EOS = 1, 2


def config(**options) -> LightConvConfig:
    given = {**SMALL, "encoder_layers": 2, "decoder_layers": 2, **options}
    if given.get("is_encoder_decoder") is False:
        for name in ("encoder_layers", "encoder_kernel_sizes"):
            del given[name]
    return LightConvConfig(**given)


def seq2seq(**options) -> LightConvForConditionalGeneration:
    return stirred(LightConvForConditionalGeneration(config(**options)))


def language_model(**options) -> LightConvForCausalLM:
    return stirred(LightConvForCausalLM(config(is_encoder_decoder=False, **options)))


def language_model_in_bands(**options) -> LightConvForCausalLM:
    """With an adaptive input and softmax."""
    known = config(is_encoder_decoder=False, **options).model_config().as_json()
    bands = {"cutoff": [8, 16], "factor": 2.0}
    known["decoder_stack"] |= {
        "share_input_output": False,
        "adaptive_input": bands,
        "adaptive_softmax": {**bands, "tie_weights": True, "tie_proj": True, "dropout": 0.0},
    }
    return stirred(LightConvForCausalLM(LightConvConfig(**known)))


def stirred(model):
    """In evaluation mode, with biases and norms that are not 0 and 1, so that one that is left out shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
        for layer in model.decoder.layers:
            if layer.encoder_attn is not None:
                layer.encoder_attn.v_proj.weight *= 4  # so that the source decides
        for table in {model.get_input_embeddings(), model.decoder.embed_tokens}:
            if hasattr(table, "weight"):
                table.weight *= 2  # flat distributions have many ties
    return model.eval()


def plain(model):
    """The same model without transformers."""
    twin = build_model(model.config.model_config())
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def words(batch: int, length: int, vocabulary: int = SMALL["vocab_size"]) -> torch.Tensor:
    return torch.randint(4, vocabulary, (batch, length))


def padded(tokens: torch.Tensor, count: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` pads on a side of each row, and the attention mask."""
    pads = tokens.new_full((len(tokens), count), PAD)
    tokens = torch.cat([pads, tokens] if side == "left" else [tokens, pads], dim=1)
    return tokens, tokens.ne(PAD).long()


def close(first: torch.Tensor, second: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)


GERMAN = "ein hund läuft durch das gras zwei hunde laufen . , &apos; s@@ t@@ eh@@ en e@@ r".split()
ENGLISH = "a dog runs through the grass two dogs run . , &apos; they stand he &quot; Straße".split()
_WORDS = "ein hund hunde läuft laufen durch das gras zwei".split()  # what merges make whole; "stehen" is not


def _merges() -> str:
    """Merges of subword-nmt by which the words above are one piece each."""
    pairs = []
    for word in _WORDS:
        letters = [*word[:-1], f"{word[-1]}</w>"]
        pairs += [("".join(letters[:i]), letters[i]) for i in range(1, len(letters))]
    pairs += [("e", "h"), ("e", "n</w>")]
    return "".join(["#version: 0.2\n", *(f"{a} {b}\n" for a, b in dict.fromkeys(pairs))])


def dictionary(symbols: list[str]) -> bytes:
    return "".join(f"{symbol} {100 - i}\n" for i, symbol in enumerate(symbols)).encode()


def export_seq2seq(directory, weights: str = "float32", max_target_positions: int = 40, shortlist=None, **options):
    """A translation model of two dictionaries; its directory."""
    merges = directory.parent / f"{directory.name}.merges"
    merges.write_text(_merges())
    model = seq2seq(vocab_size=4 + len(ENGLISH), source_vocab_size=4 + len(GERMAN), **options)
    save_exported(
        directory,
        plain(model),
        source=Side("de", dictionary(GERMAN), TextSide(Recipe("moses", "de", lowercase="last"), "bpe", merges)),
        target=Side("en", dictionary(ENGLISH), TextSide(Recipe("moses", "en"), "words")),
        max_source_positions=40,
        max_target_positions=max_target_positions,
        weights=weights,
        shortlist=shortlist,
    )
    return directory


def export_language_model(directory, weights: str = "float32", tokenizer: str = "none", **options):
    save_exported(
        directory,
        plain(language_model(vocab_size=4 + len(ENGLISH), **options)),
        target=Side(None, dictionary(ENGLISH), TextSide(Recipe(tokenizer, "en"), "words")),
        max_target_positions=50,
        weights=weights,
    )
    return directory
