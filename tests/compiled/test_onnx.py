"""Through torch's ONNX exporter with a dynamic length, onnxruntime gives what torch gives."""

import io

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.testing import assert_close

from linattn.attention import named_attention
from linattn.models import LanguageModel, LanguageModelConfig

LENGTH = Dim("n", min=2, max=100_000)
Session = onnxruntime.InferenceSession


class Masked(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor) -> Tensor:
        return self.inner(q, k, v, key_mask=key_mask)


def session(module: nn.Module, inputs: tuple[Tensor, ...], shapes: list[dict[int, Dim]]) -> Session:
    program = torch.onnx.export(module.eval(), inputs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    # a runtime would not know an operator of ours
    assert not any("linattn" in node.domain for node in program.model.graph)
    stream = io.BytesIO()
    program.save(stream)
    return Session(stream.getvalue(), providers=["CPUExecutionProvider"])


def run(session: Session, *inputs: Tensor) -> Tensor:
    given = {x.name: value.numpy() for x, value in zip(session.get_inputs(), inputs, strict=True)}
    return torch.from_numpy(session.run(None, given)[0])


@pytest.mark.parametrize(
    ("name", "causal", "masked"),
    [
        # causal and without a mask, elu and a window are the default language model's, below
        ("favor", False, False),
        ("local+elu", True, True),
    ],
)
def test_an_attention(name: str, causal: bool, masked: bool) -> None:
    inner = named_attention(name, num_heads=4, num_key_heads=2, head_dim=8, causal=causal, window=5)
    module = Masked(inner) if masked else inner

    def inputs(n: int) -> tuple[Tensor, ...]:
        mask = (torch.rand(2, 1, n) < 0.6,) if masked else ()
        return *(torch.randn(2, h, n, 8) for h in (4, 2, 2)), *mask

    exported = session(module, inputs(70), [{2: LENGTH}] * (3 + masked))
    for n in (2, 70, 300):
        others = inputs(n)
        assert_close(run(exported, *others), module(*others), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_default_language_model() -> None:
    model = LanguageModel(LanguageModelConfig(vocab_size=50, dim=16, depth=1)).eval()
    exported = session(model, (torch.randint(50, (2, 70)),), [{0: Dim("b", max=100), 1: LENGTH}])
    for b, n in ((2, 2), (3, 70), (1, 300)):
        text = torch.randint(50, (b, n))
        assert_close(run(exported, text), model(text), rtol=1e-4, atol=1e-4)
