"""A patch for settings that fairseq evaluates as Python."""

import sys

from lightconv_plugin.compat.registry import patch
from lightconv_plugin.expressions import evaluate


@patch(versions="all versions of fairseq")
def settings_without_eval() -> None:
    """fairseq calls Python's eval on settings, including a checkpoint's: loading one could run any command.

    Safe loading of tensors does not prevent this (`--adaptive-softmax-cutoff`, the layers of fconv, …). A module global
    named `eval` hides the builtin. evaluate() reads everything in fairseq's own defaults and documentation.
    """
    import fairseq.models
    import fairseq.optim
    import fairseq.tasks  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.startswith("fairseq."):
            vars(module).setdefault("eval", evaluate)
