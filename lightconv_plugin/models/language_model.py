"""The language model: the decoder of the encoder-decoders without an encoder."""

from fairseq.models import FairseqLanguageModel
from fairseq.models.transformer import Embedding
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder
from torch import nn

from lightconv_plugin.models.config import Configured
from lightconv_plugin.models.encoder_decoder import MixerDecoder
from lightconv_plugin.models.language_model_config import check_dictionaries, language_model_config
from lightconv_plugin.models.pruning import Prunable
from lightconv_plugin.models.token_mixers import replace_dropout
from lightconv_plugin.modules.linear import replace_linear


class ConvLanguageModel(Configured, Prunable, FairseqLanguageModel):
    """Language models with LightConv, DynamicConv (Wu et al. 2019), TaLK convolutions (Lioutas & Guo 2020) or
    self-attention; layers may use different mixers.

    Pre-norm, without a norm after the last layer. With --decoder-conv-type attention it is equivalent to fairseq's
    `transformer_lm` with --no-decoder-final-norm and has the same parameter names. Architectures and options:
    language_model_config.py. Checkpoints of fairseq's own `lightconv_lm` (all versions) and of TaLK load into it.
    """

    @classmethod
    def build_model(cls, cfg, task):
        """Build the model for the task's dictionaries; raises ValueError naming an invalid option."""
        cfg = language_model_config(cfg, cls.defaults())
        check_dictionaries(cfg, len(task.source_dictionary), len(task.target_dictionary))
        embed_tokens = cls.build_embedding(cfg, task.source_dictionary)
        model = cls(MixerDecoder(cfg, task.target_dictionary, embed_tokens, no_encoder_attn=True))
        replace_dropout(model)
        replace_linear(model)
        learned = cfg.decoder.learned_pos and model.decoder.embed_positions is not None
        if learned and getattr(getattr(task, "args", None), "add_bos_token", False):
            model.decoder.max_target_positions -= 1  # fairseq does not count the <s> of a sample
        return model

    @classmethod
    def build_embedding(cls, cfg, dictionary) -> nn.Module:
        """The input embedding: (B,T) tokens → (B,T,embedding_dim). `cfg` is the result of language_model_config."""
        if cfg.character_embeddings:
            return CharacterTokenEmbedder(
                dictionary,
                cfg.character_filters,
                cfg.character_embedding_dim,
                cfg.decoder.embed_dim,
                cfg.char_embedder_highway_layers,
            )
        if cfg.adaptive_input:
            return AdaptiveInput(
                len(dictionary),
                dictionary.pad(),
                cfg.decoder.input_dim,
                cfg.adaptive_input_factor,
                cfg.decoder.embed_dim,
                cfg.adaptive_input_cutoff,
                cfg.quant_noise.pq,
                cfg.quant_noise.pq_block_size,
            )
        return Embedding(len(dictionary), cfg.decoder.input_dim, dictionary.pad())
