"""Which path a call of an operator takes through the native kernels, and why not those before it."""

from lightconv_plugin.errors import InputError

OPERATORS = ("lightconv", "dynamicconv", "talkconv")
DTYPES = ("float32", "bfloat16", "float16")


def explain(shape: tuple[int, int, int, int, int], operator: str, dtype: str) -> str:
    """A line for each pass and device: the path of a full pass, and what those before it would need.

    Args:
        shape: T, B, C, H, K. T and B decide nothing; of talkconv, K is the length of the widest window.
        operator, dtype: one of `OPERATORS`, of `DTYPES`.

    Raises:
        InputError: a size below 1, or C is no multiple of H.
    """
    from lightconv_plugin.ops import artifacts

    sizes = dict(zip("TBCHK", shape, strict=True))
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"`explain`: {name} must be at least 1, got {size}")
    if sizes["C"] % sizes["H"]:
        raise InputError(f"`explain`: C must be a multiple of H, got C = {sizes['C']} and H = {sizes['H']}")
    named = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    lines = [f"{operator}, {dtype}, {named} (C/H = {sizes['C'] // sizes['H']})"]
    for kind in artifacts.KINDS:
        lines += _of_kind(kind, operator, dtype, *shape[2:])
    return "\n".join(lines)


def _of_kind(kind: str, operator: str, dtype: str, *sizes: int) -> list[str]:
    import torch

    from lightconv_plugin.ops import backends

    if kind == "cuda" and not torch.cuda.is_available():
        return ["cuda: torch sees no CUDA device"]  # asking for the backend would warn of a slow reference
    try:
        decided = backends.decision(kind)
    except (RuntimeError, ValueError) as error:
        return [f"{kind}: {error}"]
    if decided.backend == "reference":
        return [f"{kind}: reference ({decided.reason})"]
    lines = []
    like = torch.empty(0, dtype=getattr(torch, dtype), device=kind)
    for name, backward in (("forward", False), ("backward", True)):
        *earlier, (path, _) = (
            line.split("\t") for line in torch.ops.lightconv.explain(like, operator, backward, *sizes).splitlines()
        )
        reasons = "; ".join(f"not {other}: that needs {needs}" for other, needs in earlier)
        lines.append(f"{kind} {name}: {path}" + (f" ({reasons})" if reasons else ""))
    return lines
