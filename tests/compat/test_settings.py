"""The patch of fairseq that evaluates settings without running code."""

import re
import sys
from pathlib import Path

import pytest

from lightconv_plugin.expressions import evaluate


def test_settings_without_eval_and_with_it(monkeypatch):
    """The patch reaches every module of fairseq that evaluates settings; without it a setting runs."""
    utils = pytest.importorskip("fairseq.utils")
    import lightconv_plugin.models  # noqa: F401 (the patches)

    parts = ("fairseq.models.", "fairseq.optim.", "fairseq.tasks.", "fairseq.utils")
    loaded = [module for name, module in sys.modules.items() if name.startswith(parts)]
    evaluating = [
        module for module in loaded if re.search(r"(?<![.\w])eval\(", Path(module.__file__).read_text("utf-8"))
    ]
    assert len(evaluating) > 3
    assert all(vars(module).get("eval") is evaluate for module in evaluating)

    code = "[len('not a setting')]"
    with pytest.raises(ValueError, match="is code"):
        utils.eval_str_list(code)
    monkeypatch.delattr(utils, "eval")
    assert utils.eval_str_list(code) == [13.0]
