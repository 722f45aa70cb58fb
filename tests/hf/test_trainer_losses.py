"""The losses of transformers' Trainer against formulas in float64, beside LLaMA and BART on the same data."""

import pytest
import torch
import transformers
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from tests.hf.models import (
    EOS,
    PAD,
    STILL,
    export_language_model,
    language_model,
    language_model_in_bands,
    seq2seq,
    words,
)

VOCABULARY = 29
WEIGHT = 0.1  # of label smoothing
NEW = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 20)
counts_the_predicted = pytest.mark.skipif(not NEW, reason="this Trainer counts the first label, which is not predicted")


def llama():
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                    num_attention_heads=2, pad_token_id=PAD, bos_token_id=EOS, eos_token_id=EOS)
    ).eval()  # fmt: skip


def bart():
    layers = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
              (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip
    return BartForConditionalGeneration(
        BartConfig(vocab_size=VOCABULARY, d_model=32, dropout=0, max_position_embeddings=32, pad_token_id=PAD,
                   bos_token_id=0, eos_token_id=EOS, decoder_start_token_id=EOS, **layers)
    ).eval()  # fmt: skip


SIZES = {"d_model": 32, "decoder_layers": 1, **STILL}
MODELS = {
    "language model": lambda: language_model(**SIZES),
    "language model in bands": lambda: language_model_in_bands(**SIZES),
    "LLaMA": llama,
    "seq2seq": lambda: seq2seq(encoder_layers=1, **SIZES),
    "BART": bart,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """It only pads here."""
    return AutoTokenizer.from_pretrained(export_language_model(tmp_path_factory.mktemp("losses") / "model"))


@pytest.fixture(autouse=True)
def _quiet(capsys):
    """The trainers print what they log."""
    yield
    capsys.readouterr()


def trainer_of(model, tokenizer, directory, rows, **options):
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    if model.config.is_encoder_decoder:
        collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    given = {"report_to": [], "use_cpu": True, "save_strategy": "no", "log_level": "error",
             "dataloader_pin_memory": False, "logging_steps": 1, "disable_tqdm": True}  # fmt: skip
    return Trainer(
        model,
        TrainingArguments(str(directory), **given | options),
        data_collator=collator,
        train_dataset=rows,
        eval_dataset=rows,
    )


def sentences(has_source: bool) -> list[dict[str, list[int]]]:
    """Sentences of several lengths; a language model's begin with </s>, others end with it."""
    made = []
    for length in (3, 7, 1, 5):
        ids = words(1, length)[0].tolist()
        row = {"input_ids": [*ids, EOS] if has_source else [EOS, *ids]}
        made.append({**row, "labels": [*reversed(ids), EOS]} if has_source else row)
    return made


def losses(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """(B,T,V), (B,T) → (B,T) in float64: the share `smoothing` of each label's weight is spread over all words."""
    logs = logits.double().log_softmax(-1)
    picked = logs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(1 - smoothing) * picked - smoothing * logs.mean(-1)


def expected(model, batch, smoothing: float) -> tuple[float, int]:
    """(the sum of the losses of a batch's predicted labels, their number)."""
    with torch.no_grad():
        logits, labels = model(**batch).logits, batch["labels"]
    if not model.config.is_encoder_decoder:
        logits, labels = logits[:, :-1], labels[:, 1:]
        if not smoothing and not isinstance(model, LlamaForCausalLM):  # then transformers computes it from the logits
            labels = labels.masked_fill(batch["attention_mask"][:, :-1].eq(0), -100)
    wanted = labels.ne(-100)
    return float(losses(logits, labels, smoothing)[wanted].sum()), int(wanted.sum())


@counts_the_predicted
@pytest.mark.parametrize("smoothing", [0.0, WEIGHT], ids=["", "smoothed"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_and_prediction_give_the_formulas_loss(name, side, smoothing, tokenizer, tmp_path):
    model = MODELS[name]()
    rows = sentences(model.config.is_encoder_decoder)
    tokenizer.padding_side = side
    trainer = trainer_of(
        model, tokenizer, tmp_path, rows, label_smoothing_factor=smoothing, per_device_eval_batch_size=4
    )
    batch = trainer.data_collator([dict(row) for row in rows])
    total, count = expected(model, batch, smoothing)
    found = trainer.predict(rows)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(total / count, rel=1e-5)
    assert found.metrics["test_loss"] == pytest.approx(total / count, rel=1e-5)
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    assert torch.equal(torch.tensor(found.label_ids), batch["labels"])
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(logits), model(**batch).logits, rtol=1e-4, atol=1e-4)


def alone(row: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([row["input_ids"]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@counts_the_predicted
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_loss_of_a_language_model(side, tokenizer, tmp_path):
    model, rows = MODELS["language model"](), sentences(False)
    tokenizer.padding_side = side
    trainer = trainer_of(model, tokenizer, tmp_path, rows, per_device_eval_batch_size=4)
    total, count = (sum(each) for each in zip(*(expected(model, alone(row), 0.0) for row in rows), strict=True))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, WEIGHT], ids=["", "smoothed"])
@pytest.mark.parametrize(
    "name",  # not BART, which ignores num_items_in_batch
    [
        *(
            pytest.param(name, marks=counts_the_predicted)
            for name in ("language model", "language model in bands", "LLaMA")
        ),
        "seq2seq",
    ],
)
def test_accumulated_batches_give_the_loss_of_one(name, smoothing, tokenizer, tmp_path):
    """Padded on the right: four batches of a sentence each, and one of all four."""
    model = MODELS[name]()
    rows = sentences(model.config.is_encoder_decoder)
    tokenizer.padding_side = "right"
    start = {key: value.clone() for key, value in model.state_dict().items()}
    found = []
    for size in (4, 1):
        model.load_state_dict(start)
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size, "max_steps": 1}
        trainer = trainer_of(model, tokenizer, tmp_path, rows, label_smoothing_factor=smoothing, **options)
        total, count = expected(model.eval(), trainer.data_collator([dict(row) for row in rows]), smoothing)
        trainer.train()
        logs = next(log for log in trainer.state.log_history if "loss" in log)
        assert logs["loss"] == pytest.approx(total / count, abs=2e-4), "transformers rounds what it logs"
        found.append(logs["grad_norm"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def task(has_source: bool) -> torch.Tensor:
    """32 sentences of 8 words, (32,9) each: each word is the one before plus 1, after the last comes the first."""
    words = 4 + (torch.randint(0, VOCABULARY - 4, (32, 1)) + torch.arange(8)) % (VOCABULARY - 4)
    end = torch.full((32, 1), EOS)
    return torch.cat([words, end] if has_source else [end, words], dim=1)


@pytest.mark.parametrize("name", ["language model", "seq2seq"])
def test_smoothed_training_teaches_the_next_word(name, tokenizer, tmp_path):
    """The loss looks healthy too where a model learns to repeat its input."""
    torch.manual_seed(1)
    model = MODELS[name]()
    has_source, rows = model.config.is_encoder_decoder, task(model.config.is_encoder_decoder)
    data = [{"input_ids": row, **({"labels": row} if has_source else {})} for row in rows.tolist()]
    options = {"label_smoothing_factor": WEIGHT, "max_steps": 60, "learning_rate": 1e-2, "logging_steps": 60}
    trainer_of(model, tokenizer, tmp_path, data, per_device_train_batch_size=16, **options).train()
    rows = task(has_source)
    with torch.no_grad():
        logits = model.eval()(rows, labels=rows).logits
    found, wanted = (logits.argmax(-1), rows) if has_source else (logits.argmax(-1)[:, 1:-1], rows[:, 2:])
    assert (found == wanted).float().mean() > 0.8
