"""Finds tensor-core products whose operand in registers is written again before they are done, in compiled kernels.

On Hopper a product (HGMMA) runs on while later instructions issue, and reads its left operand from registers meanwhile.
`WARPGROUP.DEPBAR` waits until so many groups of products are left, each of which ends with a `gsb0`. The ptxas of CUDA
12.8 and 12.9 is reported to move writes of such registers in front of that wait (fla-org/flash-linear-attention 984 and
1262, triton-lang/triton 11366 and 11781). Every path from a product on is followed, each loop once more, up to the
wait."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# registers that hold 64 × 16 half-precision numbers, or 64 × 8 of TF32, of a warp group
_OPERAND = 4
_LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<op>[A-Z][\w.]*)\s*(?P<rest>[^;]*);")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")


class Instruction(NamedTuple):
    """An operation and its operands; a conditional one may be passed over."""

    op: str
    operands: list[str]
    conditional: bool


def disassembled(cubin: Path) -> str:
    return subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout


def parsed(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions of a disassembly, and where labels stand among them."""
    instructions: list[Instruction] = []
    labels = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _LINE.match(line):
            operands = [x.strip() for x in found["rest"].split(",")]
            instructions.append(Instruction(found["op"], operands, "@" in line.split("*/")[1][:8]))
    return instructions, labels


def written(instruction: Instruction) -> set[int]:
    """Return the registers that an instruction writes."""
    op, operands, _ = instruction
    if op.startswith(("HGMMA", "ST", "RED", "BRA", "BAR")) or "SETP" in op or op.startswith("FCHK"):
        return set()
    # a shuffle's first operand is a predicate
    for operand in operands[:2]:
        if register := re.fullmatch(r"R(\d+)(?:\.\w+)*", operand):
            first = int(register[1])
            return set(range(first, first + _width(op)))
        if not re.fullmatch(r"!?U?P[T\d]", operand):
            break
    return set()


def _width(op: str) -> int:
    if ".128" in op or (op.startswith("LDSM") and op.endswith(".4")):
        return 4
    return 2 if ".64" in op or ".WIDE" in op or (op.startswith("LDSM") and op.endswith(".2")) else 1


def _next(at: int, instructions: list[Instruction], labels: dict[str, int]) -> list[int]:
    op, operands, conditional = instructions[at]
    after = [at + 1] if at + 1 < len(instructions) else []
    if op.startswith("EXIT"):
        return after if conditional else []
    if not op.startswith("BRA"):
        return after
    # the target is written `(.L_x_1), and a loop's branch may have its condition as an operand
    target = re.search(r"\.L_x_\d+", " ".join(operands))
    to = [labels[target[0]]] if target and target[0] in labels else []
    return to + after if conditional or len(operands) > 1 else to


def overwritten(text: str) -> list[str]:
    """Describe every product of a disassembly one of whose operand's registers is written before its wait."""
    instructions, labels = parsed(text)
    writes, found = [written(x) for x in instructions], []
    for start, (op, operands, _) in enumerate(instructions):
        register = re.match(r"R(\d+)", operands[1]) if op.startswith("HGMMA") and len(operands) > 1 else None
        if register is None:
            continue
        operand = set(range(int(register[1]), int(register[1]) + _OPERAND))
        # how many groups ended since, its own counted as none
        open_, seen = [(at, 0 if _ends_group(operands) else -1) for at in _next(start, instructions, labels)], set()
        while open_:
            at, later = open_.pop()
            if (at, later) in seen or _waits(instructions[at], later):
                continue
            seen.add((at, later))
            if writes[at] & operand:
                found.append(f"{op} at {start} reads R{register[1]}, which {instructions[at].op} at {at} writes")
                break
            later += instructions[at].op.startswith("HGMMA") and _ends_group(instructions[at].operands)
            open_ += [(after, later) for after in _next(at, instructions, labels)]
    return found


def _ends_group(operands: list[str]) -> bool:
    return operands[-1] == "gsb0"


def _waits(instruction: Instruction, later: int) -> bool:
    """Tell whether it waits for a group after which so many have ended."""
    return instruction.op.startswith("WARPGROUP.DEPBAR") and 0 <= int(instruction.operands[-1], 16) <= later
