"""Through torch's ONNX exporter with a dynamic length, onnxruntime gives what torch gives."""

import io

import onnxruntime
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.testing import assert_close

from linattn.attention import named_attention
from linattn.models import LanguageModel, LanguageModelConfig

LENGTH = Dim("n", min=2, max=100_000)
Session = onnxruntime.InferenceSession


class Masked(nn.Module):
    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, key_mask: Tensor) -> Tensor:
        return self.model(tokens, key_mask=key_mask)


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


def test_an_attention_to_all_keys() -> None:
    inner = named_attention("favor", num_heads=4, num_key_heads=2, head_dim=8)

    def inputs(n: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(2, h, n, 8) for h in (4, 2, 2))

    exported = session(inner, inputs(70), [{2: LENGTH}] * 3)
    for n in (2, 70, 300):
        others = inputs(n)
        assert_close(run(exported, *others), inner(*others), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_default_language_model_with_missing_tokens() -> None:
    """Causal sums and a window; all tokens are present in the first row."""
    model = Masked(LanguageModel(LanguageModelConfig(vocab_size=50, dim=16, depth=1))).eval()

    def inputs(b: int, n: int) -> tuple[Tensor, Tensor]:
        mask = torch.rand(b, n) < 0.6
        mask[0] = True
        return torch.randint(50, (b, n)), mask

    exported = session(model, inputs(2, 70), [{0: Dim("b", max=100), 1: LENGTH}] * 2)
    for b, n in ((2, 2), (3, 70), (1, 300)):
        others = inputs(b, n)
        assert_close(run(exported, *others), model(*others), rtol=1e-4, atol=1e-4)
