"""A wrong kernel does not pass: each mistake of mistakes.txt, made on purpose, is noticed by a call or two.

All are written into one copy of the sources, each behind a number that says which one is being made, so that few files
are compiled anew. What is replaced must be found once: a mistake whose text has gone with a change of the kernels fails
here, and must be written anew, of the same kind.
"""

import dataclasses
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from . import host
from .calls import check, compare
from .convolution_calls import Case
from .decoding_calls import BestCase, RingCase
from .dropout_calls import NormCase, ReluCase
from .host import Sparse
from .loss_calls import LossCase
from .operators import Operators
from .talk_calls import TalkCase

# What is compiled anew. Only templates may be changed, which these files alone instantiate (and not functions that all
# have in common, of which the linker would take any copy).
UNITS = tuple(
    f"{name}.cu"
    for name in (
        *("convolution/forward_float32", "convolution/backward_float32", "convolution/band_forward"),
        *("convolution/band_backward", "convolution/slabs", "talk/talk_float32", "talk/talk_band", "loss/loss"),
        *("dropout/norm", "dropout/relu", "decoding/ring", "decoding/words"),
    )
)

LIGHT = Case("lightconv", 21, 2, 3, 8, 9, 4)
DYNAMIC = dataclasses.replace(LIGHT, operator="dynamicconv")
SHORT = Case("dynamicconv", 21, 2, 2, 8, 7, 3)
WIDE = Case("dynamicconv", 40, 2, 2, 64, 31, 15, torch.float16)
TALK = TalkCase(70, 2, 2, 8, 9, 5)
BAND = TalkCase(90, 2, 2, 72, 15, 7, torch.float16, top=1.6)
CASES = {
    "LIGHT": LIGHT,
    "LIGHT_31": dataclasses.replace(LIGHT, size=31),
    "LIGHT_ODD": dataclasses.replace(LIGHT, rows="odd"),
    "PACKED": dataclasses.replace(LIGHT, batch=1, packed=True),
    "DYNAMIC": DYNAMIC,
    "DYNAMIC_31": dataclasses.replace(DYNAMIC, size=31),
    "DYNAMIC_100": dataclasses.replace(DYNAMIC, size=100, steps=70),
    "DROPPED": dataclasses.replace(DYNAMIC, dropout=0.5),
    "STEP": dataclasses.replace(DYNAMIC, steps=3, padding_l=8, seen=8),
    "SHORT": SHORT,
    "INSIDE": dataclasses.replace(SHORT, steps=100),  # whole warps meet nothing but rows of their sequence
    "LONG": Case("dynamicconv", 40, 2, 2, 64, 40, 20, torch.float16),
    "MANY": Case("lightconv", 5, 70, 3, 8, 9, 4),
    "WIDE": WIDE,
    "WIDE_DROPPED": dataclasses.replace(WIDE, dropout=0.5),
    "WIDE_DROPPED_3": dataclasses.replace(WIDE, dropout=0.5, heads=3),
    "OFFSET": Case("lightconv", 3, 2, 2, 64, 5, 2),
    "TALK_PLAIN": dataclasses.replace(TALK, top=1.6),
    "TALK_ODD": TalkCase(70, 2, 3, 5, 9, 5, top=1.6, rows="odd"),
    "TALK_ODD_VECTORS": dataclasses.replace(TALK, rows="odd"),
    "TALK_LENGTHS": dataclasses.replace(TALK, steps=60, batch=3, lengths=torch.int64),
    "TALK_SIXTEENS": TalkCase(70, 1, 1, 8, 31, 31),
    "TALK_LONG": TalkCase(90, 1, 1, 8, 31, 31),
    "TALK_LEFT": TalkCase(70, 2, 1, 8, 25, 9),
    "TALK_FAR": TalkCase(330, 1, 1, 64, 3, 3, top=40),
    "TALK_PACKED_FAR": TalkCase(330, 1, 1, 64, 40, 40, packed=True),
    "TALK_STEP": TalkCase(12, 2, 2, 8, 7, 0, seen=5),
    "TALK_BAND": BAND,
    "TALK_BAND_FAR": TalkCase(330, 1, 1, 16, 3, 3, torch.float16, top=80),
    "TALK_SHORT_BAND": TalkCase(37, 1, 1, 16, 3, 3, torch.float16),
    "LOSS": LossCase(2048, 2048),
    "LOSS_ODD": LossCase(64, 65),
    "LOSS_SUMMED": LossCase(64, 64, summed=True),
    "NORM": NormCase(channels=40),
    "NORM_WIDE": NormCase(channels=520),
    "NORM_ROWS": NormCase(channels=16, rows=300),
    "NORM_UNALIGNED": NormCase(unaligned=True),
    "RELU": ReluCase(),
    "RELU_ODD": ReluCase(elements=5001),
    "RING": RingCase(),
    "RING_BEGINS": RingCase(now=2),
    "RING_ODD": RingCase(rows="odd"),
    "RING_NARROW": RingCase(heads=8, per_head=2),
    "WORDS": BestCase(5004, penalties=((7, math.inf), (70, -30.0)), scores=True),
    "WORDS_TIES": BestCase(5004, ties=True),
    "WORDS_MANY": BestCase(5004, 20, crowded=True),
    "WORDS_GIVEN": BestCase(204, normalisers=True),
    "WORDS_ODD": BestCase(204, pitch=205),
}


@dataclasses.dataclass(frozen=True)
class Mistake:
    """`old` becomes `new` in `file`, where MISTAKE stands for "this one is being made"; `what` of `case` must fail."""

    name: str
    file: str
    old: str
    new: str
    what: str
    case: str

    def __str__(self) -> str:
        return self.name


def read(text):
    """A mistake is its name, `file: what of CASE`, the lines that are replaced (-), and those that replace them (+)."""
    for block in text.strip().split("\n\n"):
        name, where, *lines = block.split("\n")
        file, what, case = re.fullmatch(r"(\S+): (\w+) of (\w+)", where).groups()
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        yield Mistake(name, file, old, new, what, case)


ALL = list(read(Path(__file__).with_name("mistakes.txt").read_text(encoding="utf-8")))
# They need more than the random tensors of their case.
OFFSET, SPREAD = "an offset of 32 bits", "talk: matrix units: what is not finite stays where zeros met it"


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    """The kernels with all mistakes in them; `on(mistake=n)` makes the n-th, from 1."""
    folder = tmp_path_factory.mktemp("mistaken") / "cuda"
    shutil.copytree(host.SOURCES, folder)
    for number, mistake in enumerate(ALL, 1):
        file = folder / mistake.file
        text = file.read_text(encoding="utf-8")
        assert text.count(mistake.old) == 1, f"{mistake.file} has {text.count(mistake.old)} times: {mistake.old}"
        new = mistake.new.replace("MISTAKE", f"(lightconv_host::mistake == {number})")
        file.write_text(text.replace(mistake.old, new), encoding="utf-8")
    runner = host.Runner(host.build_runner(folder, UNITS))
    yield Operators(runner)
    runner.close()


@pytest.mark.parametrize("number", range(1, len(ALL) + 1), ids=lambda number: str(ALL[number - 1]))
def test_is_noticed(mistaken, number):
    """The call passes without the mistake, and fails with it."""
    mistake = ALL[number - 1]
    case, wrong = CASES[mistake.case], mistaken.on(mistake=number)
    made = case.tensors()
    if mistake.name == OFFSET:
        far = made | {"x": Sparse(made["x"], (2**31 + 64, 256, 1))}
        compare("out", case.forward(mistaken, far).values, case.expected("forward", made))
        # Wherever that leads: out of the tensor, or out of all memory.
        with pytest.raises(AssertionError):
            compare("out", case.forward(wrong, far).values, case.expected("forward", made))
        return
    if mistake.name == SPREAD:
        made["grad"][40, 0, 7] = math.nan
    check(case, mistake.what, mistaken, made)
    with pytest.raises(AssertionError):
        check(case, mistake.what, wrong, made)


def test_the_special_ones_are_there():
    assert {OFFSET, SPREAD} <= {mistake.name for mistake in ALL}
