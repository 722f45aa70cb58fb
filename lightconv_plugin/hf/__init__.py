"""The models for Hugging Face's transformers, which can load an exported directory as a model directory.

import lightconv_plugin.hf                                    # registers the classes
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained("model")
"""

from lightconv_plugin.errors import how_to_get

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    message = f"lightconv_plugin.hf needs transformers: {how_to_get('hf')}"
    raise ModuleNotFoundError(message, name="transformers") from error
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 5):
    raise ImportError(f"lightconv_plugin.hf needs transformers 5.5 or later, got {transformers.__version__}")

from lightconv_plugin.hf.speech import hide_broken_torchaudio

hide_broken_torchaudio()

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from lightconv_plugin.hf import pipeline  # noqa: E402
from lightconv_plugin.hf.cache import LightConvCache  # noqa: E402
from lightconv_plugin.hf.config import LightConvConfig  # noqa: E402
from lightconv_plugin.hf.modeling import LightConvForCausalLM, LightConvForConditionalGeneration  # noqa: E402
from lightconv_plugin.hf.tokenizer import LightConvTokenizer  # noqa: E402

AutoConfig.register(LightConvConfig.model_type, LightConvConfig, exist_ok=True)
AutoModelForSeq2SeqLM.register(LightConvConfig, LightConvForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(LightConvConfig, LightConvForCausalLM, exist_ok=True)
AutoTokenizer.register(LightConvConfig, LightConvTokenizer, exist_ok=True)
# With label smoothing, the Trainer computes the loss itself, and shifts the labels only for classes named here.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LightConvConfig.model_type] = LightConvForCausalLM.__name__
pipeline.register()

__all__ = [
    "LightConvCache",
    "LightConvConfig",
    "LightConvForCausalLM",
    "LightConvForConditionalGeneration",
    "LightConvTokenizer",
]
