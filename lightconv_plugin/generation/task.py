"""--task translation_fast: fairseq's translation, with FastGenerator wherever it would search.

    fairseq-generate data-bin --path checkpoint.pt --user-dir lightconv_plugin --task translation_fast
    fairseq-interactive … --task translation_fast --generation-dtype int8

It is for checkpoints trained with --task translation, as these have the same data and the same models; trainings may
also run with it, for a quicker --eval-bleu.
"""

import logging
from dataclasses import dataclass, field

from fairseq.dataclass import ChoiceEnum
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from lightconv_plugin.generation.dtypes import CHOICES
from lightconv_plugin.generation.generator import FastGenerator

logger = logging.getLogger(__name__)


@dataclass
class TranslationFastConfig(TranslationConfig):
    """fairseq's options of translation, and the arithmetic of the search."""

    generation_dtype: ChoiceEnum(CHOICES) = field(
        default="float32",
        metadata={
            "help": "arithmetic of the linear layers: float32 is that of the model and gives the results of "
            "--task translation; bfloat16 and int8 are faster where the CPU has instructions for them, and auto "
            "chooses the fastest"
        },
    )
    generation_cuda_graphs: bool = field(
        default=False,
        metadata={"help": "capture the steps of the search in CUDA graphs: for small batches on a GPU"},
    )


@register_task("translation_fast", dataclass=TranslationFastConfig)
class TranslationFastTask(TranslationTask):
    """TranslationTask whose generators are FastGenerators, unless alignments are asked for."""

    def build_generator(self, models, args, seq_gen_cls=None, extra_gen_cls_kwargs=None, **kwargs):
        """fairseq's, with its arguments; `seq_gen_cls` and --print-alignment choose another generator as ever."""
        if seq_gen_cls is None:
            if getattr(args, "print_alignment", None):
                logger.info("falling back to fairseq's generator: --print-alignment is not supported")
            else:
                seq_gen_cls = FastGenerator
                dtype = self.cfg.generation_dtype
                extra_gen_cls_kwargs = {
                    **(extra_gen_cls_kwargs or {}),
                    "dtype": str(getattr(dtype, "value", dtype)),  # an enum member or a string
                    "cuda_graphs": self.cfg.generation_cuda_graphs,
                }
        return super().build_generator(
            models, args, seq_gen_cls=seq_gen_cls, extra_gen_cls_kwargs=extra_gen_cls_kwargs, **kwargs
        )

    def begin_valid_epoch(self, epoch, model):
        """--eval-bleu keeps one generator for a whole training: it has to see what was learned since."""
        super().begin_valid_epoch(epoch, model)
        generator = getattr(self, "sequence_generator", None)
        if isinstance(generator, FastGenerator):
            generator.refresh()
