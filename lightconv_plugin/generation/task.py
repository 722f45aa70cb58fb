"""--task translation_fast: fairseq's translation task, with FastGenerator for the search.

    fairseq-generate data-bin --path checkpoint.pt --user-dir lightconv_plugin --task translation_fast
    fairseq-interactive … --task translation_fast --generation-dtype int8

Use it with checkpoints trained with --task translation: data and models are the same. Training with it is also
possible, for a faster --eval-bleu.

Options of the search, such as --lenpen, are read by fairseq in the `build_generator` that is extended here;
generator.py passes them on as `SearchOptions`.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING

from fairseq.dataclass import ChoiceEnum
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from lightconv_plugin.generation import AUTO, CHOICES

if TYPE_CHECKING:
    from lightconv_plugin.generation.shortlist import Shortlist

logger = logging.getLogger(__name__)


@dataclass
class TranslationFastConfig(TranslationConfig):
    """fairseq's translation options, and those of the fast search."""

    generation_dtype: ChoiceEnum(CHOICES) = field(  # type: ignore[valid-type]  # where fairseq looks for them
        default="float32",
        metadata={
            "help": "arithmetic of the linear layers (bfloat16 and float16 on a GPU: of the whole model): float32 is "
            "the model's own and gives the results of --task translation; bfloat16 and int8 are faster if the CPU has "
            "instructions for them; auto chooses the fastest"
        },
    )
    generation_cuda_graphs: bool = field(
        default=False,
        metadata={
            "help": "on a GPU, capture the steps of the search in CUDA graphs for every batch, in validation too; by "
            "default fairseq-generate does so from the second batch of a size"
        },
    )
    generation_no_cuda_graphs: bool = field(default=False, metadata={"help": "never capture them"})
    generation_shortlist: str = field(
        default="",
        metadata={
            "help": "choose only among the target words that this file, from lightconv shortlist, lists for the source "
            "words of a batch; with options that need fairseq's generator this is an error"
        },
    )


@register_task("translation_fast", dataclass=TranslationFastConfig)
class TranslationFastTask(TranslationTask):
    """TranslationTask whose generators are FastGenerators, unless alignments are requested."""

    _validates = False
    _checked = False

    def build_model(self, *args, **kwargs):
        """Also builds the generator of --eval-bleu. By default it captures no graphs, because weights change."""
        self._validates = True
        try:
            return super().build_model(*args, **kwargs)
        finally:
            self._validates = False

    def build_generator(self, models, args, seq_gen_cls=None, extra_gen_cls_kwargs=None, **kwargs):
        """As in fairseq, with its arguments; `seq_gen_cls` and --print-alignment still choose another generator."""
        dtype = str(getattr(self.cfg.generation_dtype, "value", self.cfg.generation_dtype))  # of an enum, or a string
        if getattr(args, "score_reference", False):
            if self.cfg.generation_shortlist:
                raise ValueError("--generation-shortlist and --score-reference exclude each other")
            if dtype not in ("float32", AUTO):
                raise ValueError(f"--score-reference scores in the model's own type, not in --generation-dtype {dtype}")
        if getattr(args, "lm_path", None):
            if getattr(args, "score_reference", False):
                raise ValueError("--lm-path and --score-reference exclude each other")
            if (extra_gen_cls_kwargs or {}).get("lm_model") is None:
                raise ValueError("--lm-path: only fairseq-generate loads a language model")
        if seq_gen_cls is None:
            from lightconv_plugin.generation.generator import FastGenerator, falling_back  # most trainings never search

            if getattr(args, "print_alignment", None):
                if self.cfg.generation_shortlist:
                    raise ValueError("--generation-shortlist and --print-alignment exclude each other")
                if any(_without_weights(model) for model in models):
                    raise ValueError(
                        "--print-alignment: a model with --decoder-cross-attention-conv or --no-cross-attention has no "
                        "weights to print"
                    )
                logger.info(falling_back("--print-alignment", dtype))
            else:
                seq_gen_cls = FastGenerator
                extra_gen_cls_kwargs = {
                    **(extra_gen_cls_kwargs or {}),
                    "dtype": dtype,
                    "cuda_graphs": self._cuda_graphs(),
                    "shortlist": self._shortlist(getattr(args, "beam", 5)),
                }
        return super().build_generator(
            models, args, seq_gen_cls=seq_gen_cls, extra_gen_cls_kwargs=extra_gen_cls_kwargs, **kwargs
        )

    def _shortlist(self, beam: int) -> "Shortlist | None":
        if not self.cfg.generation_shortlist:
            return None
        from lightconv_plugin.generation.shortlist import read_shortlist

        path = Path(self.cfg.generation_shortlist)
        return read_shortlist(path, self.source_dictionary, self.target_dictionary, beam)

    def _cuda_graphs(self) -> bool | None:
        """As SearchOptions has it."""
        captured, never = self.cfg.generation_cuda_graphs, self.cfg.generation_no_cuda_graphs
        if captured and never:
            raise ValueError("--generation-cuda-graphs and --generation-no-cuda-graphs exclude each other")
        return True if captured else False if never or self._validates else None

    def begin_epoch(self, epoch, model):
        """What the search of --eval-bleu cannot do ends a training before its first update, not at its validation."""
        super().begin_epoch(epoch, model)
        generator = getattr(self, "sequence_generator", None)
        if not self._checked and generator is not None and hasattr(generator, "check"):  # a FastGenerator
            generator.check()
        self._checked = True

    def begin_valid_epoch(self, epoch, model):
        """--eval-bleu keeps one generator for the whole training, so it must reread the weights."""
        super().begin_valid_epoch(epoch, model)
        generator = getattr(self, "sequence_generator", None)
        if generator is not None and hasattr(generator, "refresh"):  # a FastGenerator
            generator.refresh()


def _without_weights(model) -> bool:
    """Whether there is no attention over the encoder, or it returns no weights, which fairseq would print."""
    from lightconv_plugin.models.token_mixers import ConvolvedEncoderAttention

    layers = getattr(model.decoder, "layers", ())
    attentions = (getattr(layer, "encoder_attn", layer) for layer in layers)
    return any(isinstance(attention, (ConvolvedEncoderAttention, NoneType)) for attention in attentions)
