import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from linattn.generation import generate
from linattn.models import EncoderDecoder
from linattn.ops import FeatureState
from tests.models.stacks import encoder_decoder, model, some_tokens

KINDS = {"plain": {}, "reversible": {"reversible": True}, "positions": {"positions": "learned"}}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())


def padded(b: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return some_tokens(b, n), torch.arange(n) < torch.tensor([[n], [n // 2], [1]])[:b]


@every_kind
@pytest.mark.parametrize("training", [True, False])
def test_padding_and_neighbours_change_nothing(options, training):
    both = encoder_decoder(**options).train(training)
    (source, source_mask), (target, target_mask) = padded(3, 24), padded(3, 15)
    y = both(source, target, source_mask=source_mask, target_mask=target_mask)
    for row in range(3):
        alone = both(source[row, source_mask[row]].unsqueeze(0), target[row, target_mask[row]].unsqueeze(0))[0]
        assert_close(y[row, target_mask[row]], alone)


@every_kind
def test_generates_what_the_whole_model_would(options):
    both = encoder_decoder(**options).eval()
    source, mask = padded(3, 24)
    prompts = [[1], [2, 3, 4], [5, 6]]
    new = generate(both.decoder, prompts, max_new_tokens=8, state=both.begin(source, source_mask=mask))
    for row, prompt in enumerate(prompts):
        tokens = list(prompt)
        for _ in range(8):
            logits = both(source[row, mask[row]].unsqueeze(0), torch.tensor([tokens]))
            tokens.append(int(logits[0, -1].argmax()))
        assert new[row] == tokens[len(prompt) :]


def test_generation_reads_the_source_once():
    both, calls = encoder_decoder(), []
    both.encoder.register_forward_hook(lambda *_: calls.append("encoder"))
    for branch in both.decoder.stack.branches:
        if branch.is_cross_attention:
            branch.module.k_proj.register_forward_hook(lambda *_: calls.append("keys"))
    generate(both.decoder, [[1], [2]], max_new_tokens=6, state=both.begin(some_tokens(2, 24)))
    assert calls == ["encoder", "keys", "keys"]


def test_the_encoder_is_kept_as_its_sums():
    """Of linear attention, (S, z) for each layer, whatever the length of the source."""
    both, shapes = encoder_decoder(depth=1), set()
    for m in (3, 70):
        cross = both.begin(some_tokens(1, m)).stack[2].module
        assert isinstance(cross, FeatureState)
        shapes.add((cross.sums.S.shape, cross.sums.z.shape))
    assert len(shapes) == 1


def test_generation_is_in_evaluation_and_leaves_training_on():
    both = encoder_decoder().train()
    both.encoder.dropout.p = both.decoder.dropout.p = 0.9
    source = some_tokens(1, 9)
    new = generate(both.decoder, [[1]], max_new_tokens=8, state=both.begin(source))
    assert all(module.training for module in both.modules())
    both.eval()
    assert new == generate(both.decoder, [[1]], max_new_tokens=8, state=both.begin(source))


@every_kind
def test_the_loss_is_the_next_tokens_cross_entropy(options):
    both = encoder_decoder(**options)
    (source, source_mask), (target, target_mask) = padded(3, 24), padded(3, 15)
    losses = []
    for row in range(3):
        alone = source[row, source_mask[row]].unsqueeze(0), target[row, target_mask[row]].unsqueeze(0)
        losses.append(F.cross_entropy(both(*alone)[0, :-1], alone[1][0, 1:], reduction="none"))
    loss = both.loss(source, target, source_mask=source_mask, target_mask=target_mask)
    assert_close(loss, torch.cat(losses).mean())
    loss.backward()
    for name, parameter in both.named_parameters():
        assert parameter.grad.count_nonzero() > 0, name


def test_wrong_halves_are_refused():
    for encoder in (model(causal=False), model(head=None)):
        with pytest.raises(ValueError, match="the encoder must have no head and see all tokens"):
            EncoderDecoder(encoder, model(cross=True))
    with pytest.raises(ValueError, match="the decoder must be causal"):
        EncoderDecoder(model(causal=False, head=None), model(causal=False, cross=True))
    both = encoder_decoder()
    with pytest.raises(ValueError, match="the state is of 2 sequences, but there are 3"):
        generate(both.decoder, [[1], [2], [3]], max_new_tokens=1, state=both.begin(some_tokens(2, 5)))
