"""The picture of a state shows calls that exist."""

import re

import linattn
from examples import state
from linattn import states


def test_every_call_exists(tmp_path):
    names = [name for call, _ in state.USES for name in re.findall(r"(?:^|, )([A-Za-z_.]+)(?=\(|$|,)", call)]
    assert len(names) >= len(state.USES)
    for name in names:
        package, _, own = name.rpartition(".")
        assert hasattr(states if package == "states" else linattn, own), name
    state.main(["--out", str(tmp_path / "state.svg")])
    assert "prefers-color-scheme" in (tmp_path / "state.svg").read_text("utf-8")
