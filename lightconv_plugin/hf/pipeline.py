"""pipeline("translation"), which transformers had before version 5."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, Pipeline, pipelines

TASK = "translation"


class TranslationPipeline(Pipeline):
    """Raw text in, {"translation_text": …} out.

        translate = pipeline("translation", model="model")
        translate(["Ein Hund läuft .", "Zwei Hunde ."], batch_size=2, num_beams=5)

    Unknown arguments are passed to `generate`, which refuses those that it does not know, such as version 4's src_lang,
    tgt_lang, clean_up_tokenization_spaces and return_tensors. With truncation=True, a text longer than the model allows
    is truncated.
    """

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False

    def __call__(self, texts: Any, **kwargs: Any) -> Any:
        """A dict for each text of a list; lists for a single text, and if there are several translations."""
        if isinstance(texts, list) and not texts:
            return []
        found = super().__call__(texts, **kwargs)
        if isinstance(texts, list) and all(isinstance(each, list) and len(each) == 1 for each in found):
            return [each[0] for each in found]
        return found

    def _sanitize_parameters(self, truncation: bool | str | None = None, **generate: Any) -> tuple[dict[str, Any], ...]:
        return {} if truncation is None else {"truncation": truncation}, generate, {}

    def preprocess(self, text: str, truncation: bool | str = False) -> Any:  # type: ignore[override]
        if not isinstance(text, str):
            raise ValueError(f"a text must be a str, got {type(text).__name__}")
        return self.tokenizer(text, truncation=truncation, return_tensors="pt")

    def _forward(self, inputs: Any, **generate: Any) -> dict[str, Tensor]:
        found = self.model.generate(**inputs, **generate)
        found = getattr(found, "sequences", found)  # with return_dict_in_generate
        # (texts, translations of each, length): the pipeline divides a batch along the first dimension.
        return {"output_ids": found.unflatten(0, (len(inputs["input_ids"]), -1))}

    def postprocess(self, outputs: dict[str, Tensor]) -> list[dict[str, str]]:  # type: ignore[override]
        texts = self.tokenizer.batch_decode(outputs["output_ids"][0], skip_special_tokens=True)
        return [{"translation_text": text} for text in texts]


def register() -> None:
    """Register it with `pipeline`, if transformers has no such pipeline of its own.

    transformers 5 refuses the task by name for every model, so it is removed from that list. The pipeline also
    works for models from other packages, but it does not have all options of version 4: see TranslationPipeline.
    """
    if TASK not in pipelines.PIPELINE_REGISTRY.get_supported_tasks():
        getattr(pipelines, "REMOVED_TASKS", {}).pop(TASK, None)
        pipelines.PIPELINE_REGISTRY.register_pipeline(TASK, TranslationPipeline, pt_model=AutoModelForSeq2SeqLM)
        # By this attribute, `save_pretrained` would take it for code of the model, and copy this file beside it.
        del TranslationPipeline._registered_impl
