"""Greedy decoding with a deployed model, using only torch: python decode.py DIR < pieces > pieces.

Each input line has the pieces of a sentence or, for a language model, the beginning of a text (which may be empty).
"""

import json
import sys
from pathlib import Path

import torch

LONGEST = 200  # pieces


def load(path: Path, format: str):
    if format == "aoti":
        return torch._inductor.aoti_load_package(str(path))
    return torch.export.load(path).module()


def dictionary(path: Path) -> list[str]:
    """The pieces of a fairseq dictionary, by index."""
    with path.open(encoding="utf-8") as file:
        lines = [line.rstrip().removesuffix(" #fairseq:overwrite") for line in file]
    return ["<s>", "<pad>", "</s>", "<unk>", *(line.rsplit(" ", 1)[0] for line in lines)]


@torch.no_grad()
def main(directory: Path) -> None:
    about = json.loads((directory / "deployment.json").read_text(encoding="utf-8"))
    start, step = (load(directory / f"{name}.pt2", about["format"]) for name in ("start", "step"))
    source, target = about["source_lang"], about["target_lang"]
    words = dictionary(directory / ("dict.txt" if target is None else f"dict.{target}.txt"))
    known = words if source is None else dictionary(directory / f"dict.{source}.txt")
    numbers = {piece: number for number, piece in enumerate(known)}
    pad, eos, unk = about["pad"], about["eos"], about["unk"]
    for line in sys.stdin:
        read = [numbers.get(piece, unk) for piece in line.split()]
        if source is None:
            *before, token = [eos, *read]  # a text begins with the end of the previous one
        else:
            before, token = [*read, eos], eos
        state = list(start(torch.tensor([before or [pad]])))
        found: list[str] = []
        longest = min(LONGEST, about["max_target_positions"] - (len(before) if source is None else 0) - 1)
        while len(found) < longest:
            scores, *changed = step(torch.tensor([token]), *state)
            state[: len(changed)] = changed
            scores[:, pad] = -torch.inf
            token = int(scores.argmax())
            if token == eos:
                break
            found.append(words[token])
        print(*found, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
