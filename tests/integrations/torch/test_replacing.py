"""What `replace_attention` says where it finds nothing to replace."""

from pathlib import Path

import pytest
import torch
from torch import nn

from linattn import SoftmaxAttention, TorchMultiheadAttention, replace_attention


class BertSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = 4, nn.Linear(16, 48), nn.Linear(16, 16)
        self.q_norm, self.k_norm, self.norm = nn.LayerNorm(4), nn.RMSNorm(4), nn.LayerNorm(16)


class Derived(nn.MultiheadAttention):
    pass


def test_other_classes_are_counted() -> None:
    model = nn.Sequential(
        *(BertSelfAttention() for _ in range(12)), nn.Linear(2, 2), nn.Sequential(BertSelfAttention())
    )
    with pytest.raises(ValueError, match=r"no nn.MultiheadAttention .* 13 × \S*test_replacing.BertSelfAttention."):
        replace_attention(model, "elu")


def test_a_class_derived_from_torchs_is_not_called_absent() -> None:
    model = nn.Sequential(Derived(16, 4), Derived(16, 4), BertSelfAttention())
    with pytest.raises(
        ValueError, match=r"derived from nn.MultiheadAttention.* 2 × .*Derived, 1 × .*with_inner"
    ) as error:
        replace_attention(model, "elu")
    assert "there is no" not in str(error.value)


@pytest.mark.parametrize("attention", [nn.MultiheadAttention(16, 4), TorchMultiheadAttention(16, 4, inner="elu")])
def test_a_choice_of_none_is_told_from_there_being_none(attention: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"`where` chose no nn.MultiheadAttention of this Sequential"):
        replace_attention(nn.Sequential(attention), "elu", where=lambda name, module: False)


def test_without_any_attention() -> None:
    with pytest.raises(ValueError, match=r"in this Linear, nor a module with Attention in its name"):
        replace_attention(nn.Linear(2, 2), "elu")


@pytest.mark.parametrize("options", [{"window": 5}, {"max_length": 9}])
def test_options_of_names_need_a_name(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="window and max_length are for attention by name"):
        replace_attention(nn.Sequential(nn.MultiheadAttention(16, 4)), lambda module: SoftmaxAttention(), **options)


def test_the_page_wraps_timms_attention() -> None:
    """Its code, run: with softmax inside the numbers are those of the attention that it replaces."""
    text = Path("docs/drop_in.md").read_text().split("## A model with attention of its own")[1]
    names: dict[str, object] = {}
    exec("import linattn\nfrom torch import nn\n" + text.split("```python\n")[1].split("```")[0], names)
    model, x = nn.Sequential(nn.Sequential(BertSelfAttention())), torch.randn(2, 9, 16)
    old = model[0][0]
    q, k, v = old.qkv(x).reshape(2, 9, 3, 4, 4).permute(2, 0, 3, 1, 4)
    y = nn.functional.scaled_dot_product_attention(old.q_norm(q), old.k_norm(k), v)
    expected = old.proj(old.norm(y.transpose(1, 2).reshape(2, 9, 16)))
    names["wrap"](model, "BertSelfAttention", lambda module: names["TimmAttention"](module, "softmax"))
    torch.testing.assert_close(model(x), expected)
    with pytest.raises(ValueError, match="no mask per query and key"):
        model[0][0](x, attn_mask=torch.zeros(9, 9))
