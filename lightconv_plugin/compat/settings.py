"""Settings that fairseq evaluates as Python."""

import sys

from lightconv_plugin.compat.expressions import evaluate
from lightconv_plugin.compat.registry import patch


@patch(versions="all versions of fairseq")
def settings_without_eval() -> None:
    """fairseq calls Python's eval on settings, also on a checkpoint's: loading one could run any command.

    Safe loading of tensors does not help there (`--adaptive-softmax-cutoff`, the layers of fconv, …). A global of that
    name hides the builtin; evaluate() reads everything that fairseq's own defaults and documentation write.
    """
    import fairseq.models
    import fairseq.optim
    import fairseq.tasks  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.startswith("fairseq."):
            vars(module).setdefault("eval", evaluate)
