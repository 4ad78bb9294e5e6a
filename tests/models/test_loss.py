import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from linattn.models import next_token_loss


def example(b: int = 3, n: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(b, n - 1, 7, dtype=torch.float64), torch.randint(7, (b, n))


def test_is_the_mean_cross_entropy_of_the_next_token():
    logits, tokens = example()
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert_close(next_token_loss(logits, tokens), expected)
    more = torch.cat([logits, torch.randn(3, 1, 7, dtype=torch.float64)], 1)
    assert_close(next_token_loss(more, tokens), expected)


@pytest.mark.parametrize("where", ["left", "right", "holes"])
def test_masked_tokens_are_missing_tokens(where):
    logits, tokens = example()
    places, counts = torch.arange(12), torch.tensor([[12], [5], [1]])
    mask = {"left": places >= 12 - counts, "right": places < counts, "holes": torch.rand(3, 12) < 0.6}[where]
    parts = []
    for row in range(3):
        kept = mask[row].nonzero().squeeze(1)
        parts.append(F.cross_entropy(logits[row, kept[:-1]], tokens[row, kept[1:]], reduction="none"))
    assert_close(next_token_loss(logits, tokens, key_mask=mask), torch.cat(parts).mean())


def test_tokens_may_be_int32():
    logits, tokens = example()
    for mask in (None, torch.rand(3, 12) < 0.6):
        expected = next_token_loss(logits, tokens, key_mask=mask)
        assert_close(next_token_loss(logits, tokens.int(), key_mask=mask), expected)


def test_some_tokens_do_not_count():
    logits, tokens = example()
    tokens[:, 3] = tokens[1, 7] = -100
    kept = tokens[:, 1:] != -100
    assert_close(next_token_loss(logits, tokens), F.cross_entropy(logits[kept], tokens[:, 1:][kept]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_long_text_in_half_precision_loses_nothing(dtype):
    """Its sum is beyond float16's largest number, and has three digits in bfloat16."""
    logits, tokens = torch.randn(2, 19_999, 64, dtype=dtype, requires_grad=True), torch.randint(64, (2, 20_000))
    exact = logits.detach().double().requires_grad_()
    found, expected = next_token_loss(logits, tokens), next_token_loss(exact, tokens)
    assert_close(found, expected, check_dtype=False, rtol=1e-5, atol=0)
    gradients = torch.autograd.grad(found, logits)[0], torch.autograd.grad(expected, exact)[0].to(dtype)
    # a rounding, down to the smallest number that the dtype has
    spacing = torch.finfo(dtype).eps * max(float(gradients[1].abs().max()), torch.finfo(dtype).smallest_normal)
    assert_close(*gradients, rtol=0, atol=spacing)


def test_nothing_to_learn_is_zero():
    logits, tokens = example()
    logits.requires_grad_()
    loss = next_token_loss(logits, tokens, key_mask=torch.zeros(3, 12, dtype=torch.bool))
    loss.backward()
    assert loss == 0 and not logits.grad.any()


@pytest.mark.parametrize("n", [0, 1])
def test_no_following_token_is_zero_too(n):
    logits, tokens = torch.randn(2, n, 7), torch.randint(7, (2, n))
    for mask in (None, torch.ones(2, n, dtype=torch.bool)):
        assert next_token_loss(logits, tokens, key_mask=mask) == 0


@pytest.mark.usefixtures("unchecked")
def test_other_shapes_are_refused():
    logits, tokens = example()
    for wrong in (logits[:, :-1], logits[0], logits[:2]):
        with pytest.raises(ValueError, match=r"logits must be \(3, 11, v\), .* or \(3, 12, v\), but are"):
            next_token_loss(wrong, tokens)
    for wrong in (None, [1.0], logits.long()):
        with pytest.raises(ValueError, match=r"logits must be (a tensor|floating-point), but"):
            next_token_loss(wrong, tokens)
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 7\), but go from 0 to 9"):
        next_token_loss(torch.zeros(1, 3, 7), torch.tensor([[9, 0, -100, 9]]))
    with pytest.raises(ValueError, match="key_mask must be boolean"):
        next_token_loss(logits, tokens, key_mask=torch.ones(3, 12))
    with pytest.raises(ValueError, match=r"key_mask must be \(3, 12\), as tokens, but is \(3, 11\)"):
        next_token_loss(logits, tokens, key_mask=torch.ones(3, 11, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"tokens must be int64 or int32 \(b, n\), but are torch.float32"):
        next_token_loss(logits, tokens.float())
