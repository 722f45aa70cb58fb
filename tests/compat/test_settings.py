"""Settings are values, not code. (Checkpoints with code in a setting: robustness/test_untrusted_checkpoints.py.)"""

import re
import sys
from pathlib import Path

import pytest

from lightconv_plugin.compat.expressions import evaluate


@pytest.mark.parametrize(
    "text",
    [
        "[(512, 3)] * 20 + [(1024, 3)]",
        "(0.9, 0.98)",
        "0.1,0.2",
        "[True]",
        "None",
        "-1e-3",
        "{'a': [1], 'b': 2 / 4}",
        " 3 ",
    ],
)
def test_settings_that_fairseq_documents_are_as_with_eval(text):
    assert evaluate(text) == eval(text.strip())


@pytest.mark.parametrize(
    "text, error",
    [
        ("__import__('os')", ValueError), ("open('x')", ValueError), ("x", ValueError), ("().__class__", ValueError),
        ("[i for i in (1,)]", ValueError), ("lambda: 1", ValueError), ("f'{1}'", ValueError), ("2 ** 9", ValueError),
        ("[0] * 10**9", ValueError), ("[0] * 100000", ValueError), ("100000 * 'a'", ValueError), ("{**{}}", ValueError),
        ("import os", SyntaxError), ("", SyntaxError), ("-" * 100_000 + "1", ValueError), (True, TypeError),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)  # fmt: skip
def test_code_is_no_setting(text, error):
    with pytest.raises(error if error is not ValueError else (ValueError, MemoryError)):
        evaluate(text)


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
