"""The picture of the family shows every method that has a state update of its own."""

from examples import family
from examples.pictures import for_both_themes, main
from linattn import ATTENTIONS, named_attention


def is_causal_only(name: str) -> bool:
    """Tell whether a method fades or corrects its state, which has no form over all tokens."""
    try:
        named_attention(name, num_heads=2, head_dim=4, max_length=8)
    except ValueError as error:
        return "causal only" in str(error)
    return False


def test_every_method_with_gates_or_a_decay_has_a_cell(tmp_path):
    names = {cell.names for cell in family.CELLS}
    assert {name for name in ATTENTIONS if is_causal_only(name)} == names & set(ATTENTIONS)
    family.main(["--out", str(tmp_path / "family.svg")])
    assert "prefers-color-scheme" in (tmp_path / "family.svg").read_text("utf-8")


def test_a_picture_is_changed_once(tmp_path):
    saved = tmp_path / "saved.svg"
    path = "<path style='fill: #ffffff; stroke: #000000'/>"
    saved.write_text(f"<svg><style>*{{stroke-linejoin: round}}</style>{path}</svg>")
    main([str(saved)])
    changed = saved.read_text("utf-8")
    assert "fill: none; stroke: currentColor" in changed and for_both_themes(changed) == changed
