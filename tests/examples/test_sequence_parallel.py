"""The example of sequence parallel learns, and every process sees the loss of one process with the whole sequence."""

import torch

from examples.sequence_parallel import source, train
from linattn import LanguageModel, LanguageModelConfig
from linattn.models import next_token_loss
from tests.processes import needs_processes, run_in_two

TOKENS, STEPS, DIM = 1024, 3, 16


def losses_of_one_process() -> list[float]:
    torch.manual_seed(0)
    config = LanguageModelConfig(vocab_size=256, dim=DIM, depth=2, num_heads=2, attention="elu", convolution=4)
    model = LanguageModel(config)
    optimizer, tokens, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), source(TOKENS), []
    for _ in range(STEPS):
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def work(rank: int) -> None:
    losses = train(tokens=TOKENS, steps=STEPS, attention="elu", dim=DIM)
    assert losses[-1] < losses[0] < 6
    torch.testing.assert_close(*map(torch.tensor, (losses, losses_of_one_process())), rtol=1e-4, atol=0)


@needs_processes
def test_the_loss_falls_as_that_of_one_process():
    run_in_two(work)
