"""README.md of an exported model: a model card for the Hugging Face hub, with known facts only."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

import lightconv_plugin
from lightconv_plugin.checkpoints.exported import SHORTLIST, SearchDefaults, Settings
from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.modules import ModelConfig, StackConfig

_LIBRARY = "lightconv-plugin"


@dataclass(frozen=True)
class Score:
    """A measured score: "BLEU" with sacreBLEU's signature, or "perplexity", and the text it was measured on.

    unit: what a perplexity is per, "token" of the dictionary or "word".
    """

    metric: str
    value: float
    signature: str | None = None
    subset: str | None = None
    unit: str = "token"

    @property
    def per(self) -> str:
        return " per word" if self.unit == "word" else ""


@dataclass(frozen=True)
class ModelCard:
    """Facts for the card that are not in the model.

    data: the corpus. checkpoint: the checkpoint's file name. score: None if it was not measured.
    """

    data: str | None = None
    checkpoint: str | None = None
    score: Score | None = None

    def text(self, name: str, config: ModelConfig, settings: Settings, search: SearchDefaults, parameters: int) -> str:
        """The card of the model in the directory `name`."""
        lines = ["---", *self._front_matter(name, config, settings), "---", "", f"# {name}", ""]
        lines += [_summary(config, settings, parameters), ""]
        lines += ["| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in self._table(config, settings))]
        lines += ["", "## How to use it", "", *_usage(name, config, settings, search)]
        lines += ["", "## Data", "", self.data or "To be written: what the model was trained on.", ""]
        lines += ["## Quality", "", self._quality(settings.weights), ""]
        lines += [
            "## Licence",
            "",
            "To be written: the owner of the model chooses a licence, and names it above too.",
            "",
        ]
        if papers := _papers(config):
            lines += ["## Papers", "", *(f"- {paper}" for paper in papers), ""]
        return "\n".join(lines)

    def _front_matter(self, name: str, config: ModelConfig, settings: Settings) -> list[str]:
        # Text is written as JSON, which is also YAML.
        langs = [settings.source_lang, settings.target_lang]
        task = "text-generation" if config.encoder is None else "translation"
        lines = [f"language: {_yaml([_code(lang) for lang in langs if lang])}"] if settings.source_lang else []
        lines += ["license: other", "license_name: not-chosen-yet", f"library_name: {_LIBRARY}"]
        lines += [f"pipeline_tag: {task}", f"tags: {_yaml([task, 'lightconv', *_kinds(config)])}"]
        if self.score is not None:
            score = self.score
            dataset = {"name": self.data or "unknown", "type": "unknown"}
            if score.subset:
                dataset["split"] = score.subset
            measure = score.signature or score.metric + score.per
            metric = {"type": score.metric.lower(), "value": score.value, "name": measure}
            result = {"task": {"type": task}, "dataset": dataset, "metrics": [metric]}
            lines += ["model-index:", f"- {_yaml({'name': name, 'results': [result]})}"]
        return lines

    def _table(self, config: ModelConfig, settings: Settings) -> list[tuple[str, str]]:
        rows = []
        if config.encoder is not None:
            rows += [("direction", f"{_cell(settings.source_lang)} → {_cell(settings.target_lang)}")]
            rows += [("encoder", _stack(config.encoder))]
        rows += [("decoder", _stack(config.decoder))]
        rows += [("weights", settings.weights)]
        if settings.shortlist:
            rows += [("shortlist", f"`{SHORTLIST}`")]
        if self.checkpoint:
            rows += [("exported from", f"`{_cell(self.checkpoint)}`")]
        return [*rows, ("exported by", f"{_LIBRARY} {lightconv_plugin.__version__}")]

    def _quality(self, weights: str) -> str:
        if self.score is None:
            return "To be written: no score was given."
        score = self.score
        where = f" on {score.subset}" if score.subset else ""
        if score.subset and weights != "float32":  # a file beside the checkpoint has it
            where += f" of the checkpoint, not of these {weights} weights"
        signature = f", sacreBLEU's signature `{score.signature}`" if score.signature else ""
        return f"{score.metric} {score.value:.2f}{score.per}{where}{signature}."


def _summary(config: ModelConfig, settings: Settings, parameters: int) -> str:
    what = "A language model" if config.encoder is None else "A translation model"
    if settings.source_lang is not None:
        what += f" from {_cell(settings.source_lang)} to {_cell(settings.target_lang)}"
    return f"{what} with {parameters:,} parameters."


def _stack(stack: StackConfig) -> str:
    kinds = [mixer.kind for mixer in stack.mixers]
    mixers = kinds[0] if len(set(kinds)) == 1 else ", ".join(kinds)
    return f"{len(kinds)} layers of {mixers}, d = {stack.embed_dim}, FFN {stack.ffn_dim}, {stack.vocab_size:,} entries"


def _usage(name: str, config: ModelConfig, settings: Settings, search: SearchDefaults) -> list[str]:
    quoted = json.dumps(name, ensure_ascii=False)
    if config.encoder is None:
        return [
            _installation("hf"), "", "```python",
            "import lightconv_plugin.hf",
            "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
            f"tokenizer = AutoTokenizer.from_pretrained({quoted})",
            f"model = AutoModelForCausalLM.from_pretrained({quoted})",
            "```",
        ]  # fmt: skip
    transformers = [
        "```python",
        "import lightconv_plugin.hf",
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({quoted})",
        f"model = AutoModelForSeq2SeqLM.from_pretrained({quoted})",
        'output = model.generate(**tokenizer(["…"], return_tensors="pt"))',
        "print(tokenizer.batch_decode(output, skip_special_tokens=True))",
        "```",
    ]
    if config.decoder.adaptive_softmax is not None or config.decoder.adaptive_input is not None:
        return [_installation("hf"), "", *transformers]  # our search has no such layers
    listed = ignored = ""
    if settings.shortlist:
        listed = f", among the words that `{SHORTLIST}` lists (`--shortlist none`: all words)"
        ignored = ", which does not use the shortlist"
    return [
        _installation("text"),
        "",
        "```sh",
        f"lightconv translate {shlex.quote(name)} < in.{_cell(settings.source_lang)}",
        "```",
        "",
        f"With beam {search.num_beams} and length penalty {search.length_penalty:g}{listed}. From Python:",
        "",
        "```python",
        "from lightconv_plugin.generation import Translator",
        "",
        f'print(Translator({quoted}).translate(["…"])[0].text)',
        "```",
        "",
        f"With Hugging Face's transformers (`[hf]` instead of `[text]`){ignored}:",
        "",
        *transformers,
    ]


def _installation(extra: str) -> str:
    return (
        f"Install {_LIBRARY}, which is not on PyPI: `pip install '.[{extra}]'` in a checkout, "
        f"or `pip install 'FILE.whl[{extra}]'` with its wheel."
    )


def _kinds(config: ModelConfig) -> list[str]:
    """The kinds of mixers on both sides, without duplicates."""
    stacks = [stack for stack in (config.encoder, config.decoder) if stack is not None]
    return [*dict.fromkeys(mixer.kind for stack in stacks for mixer in stack.mixers)]


def _papers(config: ModelConfig) -> list[str]:
    kinds = (MIXERS[name] for name in _kinds(config))
    papers = dict.fromkeys((*kind.paper.split(", ", 1), kind.url) for kind in kinds if kind.paper)
    return [f"{authors}, [{title}]({url})" for authors, title, url in papers]


def _code(lang: str) -> str:
    """A language code for the hub: de for de_DE."""
    return lang.replace("-", "_").partition("_")[0].lower()


def _cell(text: str | None) -> str:
    return str(text).replace("|", "\\|").replace("`", "'")


def _yaml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
