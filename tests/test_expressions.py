"""Settings are values, not code. (Checkpoints with code in a setting: robustness/test_untrusted_checkpoints.py.)"""

import re

import pytest

from lightconv_plugin.expressions import evaluate


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
    with pytest.raises(error):
        evaluate(text)


@pytest.mark.parametrize("text", ["1/0", "[1]+(2,)", "{[1]: 2}", "-'a'", f"1.5 * {10**400}"], ids=lambda text: text[:9])
def test_an_expression_without_a_value_is_quoted(text):
    with pytest.raises(ValueError, match=re.escape(f"the setting {text[:200]!r} has no value: ")):
        evaluate(text)
