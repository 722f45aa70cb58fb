"""Evaluates settings written as Python expressions, such as "[(512, 3)] * 20", without running code.

fairseq calls Python's own `eval` on them, including those in a checkpoint: a file whose tensors are loaded safely could
still run a command through a setting.
"""

import ast
import operator
from collections.abc import Callable
from typing import Any

LONGEST = 10_000  # items of a list; fairseq's own settings have a few dozen at most

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}


def evaluate(text: str, *scopes: object) -> Any:
    """The value of an expression of numbers, strings, True, False, None, + - * / //, lists, tuples, sets and dicts.

    Replaces `eval`. `scopes`, eval's dictionaries of names, are ignored, because names are not allowed.

    Raises:
        TypeError: not a string. SyntaxError: not an expression. ValueError: an expression with anything else in it,
            or without a value, such as 1/0.
    """
    if not isinstance(text, str):
        raise TypeError(f"a setting to evaluate must be a str, got {type(text).__name__}")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, text)
    except RecursionError:
        raise ValueError(f"the setting {text[:200]!r} is nested too deeply") from None
    except (ArithmeticError, TypeError, MemoryError) as error:
        said = str(error) or type(error).__name__
        raise ValueError(f"the setting {text[:200]!r} has no value: {said}") from error


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Tuple):
        return tuple(_value(item, text) for item in node.elts)
    if isinstance(node, ast.List):
        return [_value(item, text) for item in node.elts]
    if isinstance(node, ast.Set):
        return {_value(item, text) for item in node.elts}
    if isinstance(node, ast.Dict) and None not in node.keys:
        items = zip(node.keys, node.values, strict=True)
        return {_value(k, text): _value(v, text) for k, v in items if k is not None}
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, text))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Mult):
            _check_product(left, right, text)
        return _BINARY[type(node.op)](left, right)
    raise ValueError(
        f"the setting {text[:200]!r} is refused: {ast.unparse(node)[:80]!r} in it is code; allowed are numbers, "
        "strings, lists, tuples, dicts and + - * / // of them"
    )


def _check_product(left: Any, right: Any, text: str) -> None:
    """A repeated list or string must stay small."""
    for items, times in ((left, right), (right, left)):
        if isinstance(items, (str, bytes, list, tuple)) and isinstance(times, int) and len(items) * times > LONGEST:
            raise ValueError(f"the setting {text[:200]!r} is refused: it has more than {LONGEST:,} items")
