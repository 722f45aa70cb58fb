"""Small plain models with all kinds of dropout, and a training step that a CUDA graph can capture."""

import torch

from lightconv_plugin.modules import MixerSpec, ModelConfig, StackConfig, build_model

PAD, WORDS = 1, 40


def stack(mixer, *, causal, **options):
    spec = MixerSpec(
        mixer,
        kernel_size=5,
        conv_dim=16,
        num_heads=4,
        glu=mixer != "attention",
        input_dropout=0.1,
        weight_dropout=0.1,
        normalize="softmax",
        attention_dropout=0.1,
        causal=causal,
    )
    sizes = {"vocab_size": WORDS, "embed_dim": 16, "ffn_dim": 24, "num_heads": 4, "dropout": 0.2}
    return StackConfig(mixers=(spec, spec), max_positions=32, **sizes, **options)


def model_of(mixer, *, encoder=True, **options):
    torch.manual_seed(1)
    decoder = stack(mixer, causal=True, encoder_dim=16 if encoder else None, **options)
    return build_model(ModelConfig(decoder, stack(mixer, causal=False, **options) if encoder else None)).train()


def words(device, steps=9):
    found = torch.randint(4, WORDS, (3, steps))
    found[0, 5:], found[2, 4:] = PAD, PAD
    return found.to(device)


class TrainingStep:
    """Loss, gradients and a step of gradient descent, of a batch that `load` puts in the same tensors each time."""

    def __init__(self, model):
        self.model, self.parameters = model, list(model.parameters())
        device = self.parameters[0].device
        self.source, self.target, self.labels = words(device, 7), words(device), words(device)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.load(0)

    def load(self, seed):
        """The batch and the masks of dropout follow from the seed."""
        torch.manual_seed(seed)
        for tensor in (self.source, self.target, self.labels):
            tensor.copy_(words(tensor.device, tensor.shape[1]))

    def __call__(self):
        self.model(self.source, self.target, self.labels, label_smoothing=0.1).loss.backward()
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad.zero_()
