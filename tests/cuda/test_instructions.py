"""What speed/ does with an instruction whose effect it does not know. Needs neither nvcc nor nvdisasm."""

import pytest

from .speed.listing import Instruction, UnknownInstruction
from .speed.operations import compiled

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "opcode, modifiers, operands",
    [
        ("FROB", (), ("R1", "R2")),
        ("HMMA", ("1688", "F32"), ("R0", "R2", "R4", "R6")),
        ("CS2R", (), ("R0", "SR_CLOCKLO")),
        ("HADD2", (), ("R0", "R1", "R2")),
    ],
)
def test_it_is_named_and_nothing_is_guessed(opcode, modifiers, operands):
    with pytest.raises(UnknownInstruction, match=rf"does not know .*: 0x10: {opcode}"):
        compiled(Instruction(0x10, None, opcode, modifiers, operands))
