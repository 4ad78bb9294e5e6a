"""Whole language models, ours in its default configuration but for the attention: training, prefill, generation."""

import torch
from torch import Tensor

from linattn.cli.bench.cells import Call, Cell, Setup, Work
from linattn.cli.bench.past import past_of
from linattn.models import LanguageModel, LanguageModelConfig
from linattn.models.generation import stream
from linattn.models.loss import next_token_loss

METHODS = ("softmax", "local+elu", "elu")
VOCABULARY = 257
POSITIONS = (1_000, 100_000)
"""Where the memory of a generation is compared."""


def training(setup: Setup, cell: Cell) -> Work:
    """Loss, gradients and a step of AdamW on one sequence; in bfloat16 by autocast, as `linattn train` does it."""
    model = _model(setup, cell, torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = _tokens(setup, cell.n + 1)

    def call() -> object:
        optimizer.zero_grad()
        with torch.autocast(model.device.type, cell.torch_dtype, enabled=cell.torch_dtype != torch.float32):
            loss = next_token_loss(model(tokens[:, :-1]), tokens)
        loss.backward()
        return optimizer.step()

    return Work(lambda: call, grad=True)


def prefill(setup: Setup, cell: Cell) -> Work:
    """From a prompt to the first new token."""
    model, tokens = _model(setup, cell, cell.torch_dtype), _tokens(setup, cell.n)
    return Work(lambda: lambda: next(stream(model, tokens, max_new_tokens=1)))


def decoding(setup: Setup, cell: Cell) -> Work:
    model, token = _model(setup, cell, cell.torch_dtype), _tokens(setup, 1)

    @torch.no_grad()
    def extend(n: int, state: object) -> object:
        return model.extend_hidden(_tokens(setup, n), state)[1]  # type: ignore[arg-type]

    def begin() -> Call:
        state = past_of(extend, cell.n, model.config.window)
        # as `generate` does it
        return torch.inference_mode()(lambda: model.extend(token, state))

    return Work(begin)


def _model(setup: Setup, cell: Cell, dtype: torch.dtype) -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageModelConfig(vocab_size=VOCABULARY, attention=cell.method)
    return LanguageModel(config).to(device=setup.device, dtype=dtype).eval()


def _tokens(setup: Setup, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (setup.batch, n), generator=generator).to(setup.device)
