"""The reader of compiled kernels finds what it looks for."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux")

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR8], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def hazards() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "gpu_hazards.py"
    spec = importlib.util.spec_from_file_location("gpu_hazards", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def listing(*lines: str) -> str:
    return "\n".join(x if x.endswith(":") else f"        /*{16 * i:04x}*/    {x} ;" for i, x in enumerate(lines))


@pytest.mark.parametrize("write", ["MOV R90, R1", "LDS.128 R84, [R2]", "@P0 SHFL.BFLY PT, R91, R4, 0x1, 0x1f"])
def test_a_write_before_the_wait_is_found(write: str) -> None:
    before, after = listing(PRODUCT, write, WAIT, "EXIT"), listing(PRODUCT, WAIT, write, "EXIT")
    if "LDS" in write:
        # R84 to R87 end before R88 begins
        assert not hazards().overwritten(before)
        before = before.replace("R84", "R86")
    assert len(hazards().overwritten(before)) == 1
    assert not hazards().overwritten(after)


@pytest.mark.parametrize("other", ["STG.E [R88.64], R90", "FADD R87, R88, R89", "ISETP.GE.AND P0, PT, R88, R1, PT"])
def test_reading_is_no_writing(other: str) -> None:
    assert not hazards().overwritten(listing(PRODUCT, other, WAIT, "EXIT"))


def test_a_loop_is_followed_around() -> None:
    loop = ("MOV R1, R2", ".L_x_1:", "MOV R89, R3", PRODUCT, "@P0 BRA `(.L_x_1)", WAIT, "EXIT")
    assert hazards().overwritten(listing(*loop))
    assert not hazards().overwritten(listing(*(x for x in loop if "BRA" not in x)))


def test_a_wait_may_leave_groups() -> None:
    leave, write, other = WAIT.replace("0x0", "0x1"), "MOV R90, R1", PRODUCT.replace("R88", "R96")
    assert hazards().overwritten(listing(PRODUCT, leave, write, WAIT, "EXIT"))
    assert not hazards().overwritten(listing(PRODUCT, other, leave, write, WAIT, "EXIT"))
    assert hazards().overwritten(listing(PRODUCT, other, leave, "MOV R96, R1", WAIT, "EXIT"))
