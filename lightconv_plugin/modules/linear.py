"""The one initialisation of every linear layer of these models: Xavier-uniform weights and zero biases."""

from torch import nn


class Linear(nn.Linear):
    """nn.Linear initialised as in the paper's models (Glorot & Bengio 2010); (…, in_features) → (…, out_features)."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
