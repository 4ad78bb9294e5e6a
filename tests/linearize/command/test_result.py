"""The result of a conversion: what its report measures fits into the model's positions."""

import pytest
import torch

from linattn.linearize.command.result import language_probes
from linattn.linearize.probes import costs, greedy_agreement, recall
from tests.integrations.transformers.stock_attention.families import DECODERS, VOCABULARY, make


@pytest.mark.parametrize(("positions", "lengths"), [(64, []), (70, []), (87, []), (88, [64])])
def test_probes_fit_into_the_models_positions(positions, lengths):
    """A cost is that of 24 tokens after the context."""
    model, text = make(DECODERS["gpt2"], torch.float32, n_positions=positions), torch.randint(3, VOCABULARY, (200,))
    probes = language_probes(model.config, text, [{"input_ids": text[:64][None]}])
    assert (probes.recall_lengths, probes.cost_lengths) == ([64], lengths)
    recall(model, text[None, : probes.recall_lengths[0]])
    greedy_agreement(model, model, probes.prompts, tokens=probes.new_tokens)
    for length in probes.cost_lengths:
        costs([model], length)
