"""What `replace_attention` says where it finds nothing to replace."""

import pytest
from torch import nn

from linattn import SoftmaxAttention, TorchMultiheadAttention, replace_attention


class BertSelfAttention(nn.Module):
    pass


class Derived(nn.MultiheadAttention):
    pass


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
