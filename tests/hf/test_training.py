"""Training: gradients, the trainers, gradient checkpointing, torch.compile."""

import copy

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from lightconv_plugin.checkpoints.exported import load_model, open_exported
from lightconv_plugin.modules import MIXERS
from tests.hf.models import (
    ONE_OF_EACH,
    PAD,
    STILL,
    close,
    language_model,
    language_model_in_bands,
    padded,
    plain,
    seq2seq,
    words,
)

PAIRS = [
    ("Ein Hund läuft .", "a dog runs ."),
    ("zwei Hunde laufen", "two dogs run"),
    ("ein Hund durch das Gras", "a dog through the grass"),
    ("Hunde stehen .", "dogs stand ."),
]


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("mixer", MIXERS)
def test_gradients_are_those_of_the_plain_model(mixer):
    model, source, labels = seq2seq(mixer=mixer, **STILL), words(3, 6), words(3, 5)
    labels[1, 3:] = -100
    twin = plain(model)
    model(source, labels=labels).loss.backward()
    twin(source, model.prepare_decoder_input_ids_from_labels(labels), labels).loss.backward()
    assert gradients(model).keys() == gradients(twin).keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients(model).items():
        close(gradient, gradients(twin)[name])


@pytest.mark.parametrize("items", [None, 40])
def test_training_an_adaptive_softmax_makes_no_logits_and_has_the_same_gradients(items):
    model, (tokens, mask) = language_model_in_bands(**STILL), padded(words(3, 6), 2, "left")
    given = {"attention_mask": mask, "labels": tokens, "num_items_in_batch": items}
    twin = copy.deepcopy(model).train()
    expected, found = model(tokens, **given), twin(tokens, **given)
    assert expected.logits.shape == (3, 8, 29) and found.logits is None
    close(found.loss, expected.loss)
    for output in (expected, found):
        output.loss.backward()
    assert gradients(model).keys() == gradients(twin).keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients(model).items():
        close(gradients(twin)[name], gradient)


def test_a_compiled_step_with_an_adaptive_softmax_is_one_graph():
    model, tokens = plain(language_model_in_bands(**STILL)).train(), words(3, 6)
    step = torch.compile(model, fullgraph=True, backend="eager")
    close(step(tokens, tokens).loss, model(tokens, tokens).loss)


def _switch(model, how: str, *args) -> None:
    """Gradient checkpointing, by the name that newer versions of transformers have for it, or by the older one."""
    (getattr(model, f"activation_checkpointing_{how}", None) or getattr(model, f"gradient_checkpointing_{how}"))(*args)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("make", [seq2seq, language_model])
def test_gradient_checkpointing_changes_no_gradient(make, reentrant):
    model = make(mixer=ONE_OF_EACH[: 4 if make is seq2seq else 2], **STILL).train()
    twin = copy.deepcopy(model)
    _switch(twin, "enable", {"use_reentrant": reentrant})
    assert twin.is_gradient_checkpointing and not model.is_gradient_checkpointing
    passes = []
    twin.decoder.layers[0].fc1.register_forward_hook(lambda *_: passes.append(1))
    tokens = words(3, 6)
    for each in (model, twin):
        each(tokens, labels=tokens).loss.backward()
    assert len(passes) == 2 and gradients(model).keys() == gradients(twin).keys(), (
        "the layer is computed again in the backward pass"
    )
    for name, gradient in gradients(model).items():
        close(gradient, gradients(twin)[name])
    inputs = {"decoder_input_ids": tokens} if make is seq2seq else {}
    assert twin(tokens, **inputs, use_cache=True).past_key_values is None, "it would be filled twice"
    _switch(twin, "disable")
    assert not twin.is_gradient_checkpointing


def test_dropout_is_on_in_training_alone():
    model, tokens = language_model(dropout=0.3), words(3, 6)
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    model.train()
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
    outputs = []
    for _ in range(2):
        torch.manual_seed(1)
        outputs.append(model(tokens).logits)
    assert torch.equal(*outputs)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("make", [seq2seq, language_model])
def test_gradients_of_each_sentence_by_vmap(make):
    model, tokens = make(), words(3, 6)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, sentence):
        return torch.func.functional_call(model, parameters, (sentence[None],), {"labels": sentence[None]}).loss

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, tokens)
    for number, sentence in enumerate(tokens):
        model.zero_grad()
        model(sentence[None], labels=sentence[None]).loss.backward()
        for name, gradient in gradients(model).items():
            close(each[name][number], gradient)


def test_shapes_alone_by_fake_tensors():
    with FakeTensorMode():
        for make in (seq2seq, language_model):
            model, tokens = make(), words(3, 6)
            assert model(tokens, labels=tokens).logits.shape == (3, 6, 29)


def dataset(tokenizer):
    return [dict(tokenizer(source, text_target=target)) for source, target in PAIRS]


def arguments(directory, kind=Seq2SeqTrainingArguments, **options):
    given = {
        "output_dir": str(directory),
        "num_train_epochs": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 5e-3,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **options,
    }
    return kind(**given)


@pytest.fixture
def quiet(capsys):
    """The trainers print what they log."""
    yield
    capsys.readouterr()


def test_fine_tuning_of_an_exported_model(exported, tmp_path, quiet):
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    trainer = Seq2SeqTrainer(
        model,
        arguments(
            tmp_path / "run", predict_with_generate=True, label_smoothing_factor=0.1, gradient_checkpointing=True
        ),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=dataset(tokenizer),
        eval_dataset=dataset(tokenizer),
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.8 * before
    predicted = trainer.predict(dataset(tokenizer), num_beams=2, max_length=10)
    assert predicted.predictions.shape[0] == 4 and predicted.label_ids.shape[0] == 4
    trainer.save_model(str(tmp_path / "tuned"))
    opened = open_exported(tmp_path / "tuned")
    source, target = words(2, 4, 21), words(2, 3, 21)
    model.eval()
    expected = model(source, decoder_input_ids=target, use_cache=False).logits
    assert torch.equal(load_model(opened)(source, target).logits, expected)


def test_a_training_resumes_with_the_same_numbers(exported, tmp_path, quiet):
    tokenizer = AutoTokenizer.from_pretrained(exported)

    def train(directory, **options):
        model = AutoModelForSeq2SeqLM.from_pretrained(exported)
        trainer = Seq2SeqTrainer(
            model,
            arguments(directory, num_train_epochs=2, save_strategy="steps", save_steps=2),
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
            train_dataset=dataset(tokenizer),
            processing_class=tokenizer,
        )
        trainer.train(**options)
        return model

    whole = train(tmp_path / "run")
    again = train(tmp_path / "run", resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for first, second in zip(whole.parameters(), again.parameters(), strict=True):
        close(first, second)


def test_torch_compile_gives_the_same_logits():
    """One layer of each side: what is traced is the same for all of them."""
    model = seq2seq(encoder_layers=1, decoder_layers=1, mixer=["lightweight", "dynamic"], **STILL)
    source, target = words(2, 6), words(2, 5)
    source[0, 4:] = PAD
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = model(source, labels=target)
    found = whole(source, labels=target)
    close(found.logits, expected.logits)
    close(found.loss, expected.loss)
