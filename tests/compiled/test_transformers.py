"""The model of transformers under torch.compile, its Trainer's too."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Trainer,
    TrainingArguments,
)

from linattn.integrations.transformers import LinattnCache, LinattnConfig, LinattnForCausalLM, speed_up
from linattn.linearize import convert, plan
from linattn.ops.library import NAMESPACE

SIZE = {"vocab_size": 31, "dim": 32, "depth": 1, "num_heads": 4, "window": 5}


def make(attention: str, **options) -> LinattnForCausalLM:
    torch._dynamo.reset()
    return LinattnForCausalLM(LinattnConfig(language_model={**SIZE, "attention": attention, **options})).double()


def test_one_graph_trains():
    model, tokens = make("local+elu", convolution=3).train(), torch.randint(31, (2, 20))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    mask = (torch.arange(20) >= torch.tensor([[0], [5]])).long()
    model(tokens, attention_mask=mask, labels=tokens).loss.backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    compiled(tokens, attention_mask=mask, labels=tokens).loss.backward()
    assert_close({name: weight.grad for name, weight in model.named_parameters()}, expected)


@pytest.mark.parametrize("attention", ["local+elu", "softmax"])
def test_one_graph_reads_and_another_goes_on(attention):
    model, tokens = make(attention, convolution=3).eval(), torch.randint(31, (2, 20))
    compiled = torch.compile(model, backend="eager", dynamic=True, fullgraph=True)
    with torch.no_grad():
        expected, cache = model(tokens, use_cache=False).logits, LinattnCache()
        logits = [compiled(piece, cache=cache).logits for piece in tokens.split([12, 1, 1, 1, 1, 1, 1, 1, 1], 1)]
    assert_close(torch.cat(logits, 1), expected)


def test_the_trainer_compiles(tmp_path):
    models = [make("local+elu").float() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(31, (8, 20))]
    for model, compiled in zip(models, (False, True), strict=True):
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=4,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            torch_compile=compiled,
            torch_compile_backend="aot_eager" if compiled else None,
        )
        Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-4, atol=1e-5)


def test_our_attention_in_a_stock_model_is_one_graph():
    torch._dynamo.reset()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, num_key_value_heads=2, **sizes)).double().eval()
    model.set_attn_implementation("linattn:local+favor")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    tokens, mask = torch.randint(31, (2, 20)), (torch.arange(20) >= torch.tensor([[0], [5]])).long()
    expected = model(tokens, attention_mask=mask, use_cache=False).logits
    assert_close(compiled(tokens, attention_mask=mask, use_cache=False).logits, expected)
    with torch.no_grad():
        cache = model(tokens[:, :19], attention_mask=mask[:, :19]).cache
        last = compiled(tokens[:, 19:], attention_mask=mask, cache=cache).logits
        assert_close(last, expected[:, 19:])


def test_a_linearized_model_takes_every_token_by_the_same_graph():
    torch._dynamo.reset()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, num_key_value_heads=2, **sizes)).double().eval()
    tokens, counter = torch.randint(31, (2, 20)), CompileCounter()
    convert(model, plan(model, window=3, key_dim=4), [{"input_ids": tokens}])
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        expected, cache = model(tokens, use_cache=False).logits, model(tokens[:, :5]).cache
        logits = [compiled(token, cache=cache).logits for token in tokens[:, 5:].split(1, 1)]
    assert_close(torch.cat(logits, 1), expected[:, 5:])
    # numbers of tokens are constants in the first graph, the past has other strides after it, and then all is the same
    assert counter.frame_count <= 3


def test_a_stock_model_with_our_scans_is_one_graph():
    torch._dynamo.reset()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2}
    model = Mamba2ForCausalLM(Mamba2Config(vocab_size=31, **sizes))
    record = speed_up(model)
    tokens, lengths = torch.randint(31, (1, 20)), (7, 13)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    separate = torch.cat([model(part, use_cache=False).logits for part in tokens.split(lengths, 1)], 1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = compiled(tokens, position_ids=positions, use_cache=False).logits
    assert_close(found, separate, rtol=0, atol=1e-5)
    weights, upstream = list(model.parameters()), torch.randn_like(found)
    gradients = (torch.autograd.grad(y, weights, upstream) for y in (found, separate))
    assert_close(*gradients, rtol=1e-4, atol=1e-4)
    record.undo()


def test_a_stock_model_with_our_selective_scan_is_one_graph():
    torch._dynamo.reset()
    model = MambaForCausalLM(MambaConfig(vocab_size=31, hidden_size=16, num_hidden_layers=1, state_size=4))
    record, tokens = speed_up(model), torch.randint(31, (2, 40))
    expected = model(tokens, use_cache=False).logits
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = compiled(tokens, use_cache=False).logits
    assert_close(found, expected)
    weights, upstream = list(model.parameters()), torch.randn_like(found)
    assert_close(*(torch.autograd.grad(y, weights, upstream) for y in (found, expected)))
    record.undo()


def test_the_selective_scan_is_one_operation():
    v, B = torch.randn(2, 40, 3), torch.randn(2, 40, 4)
    call = tuple(x.requires_grad_() for x in (v, v.exp(), -torch.rand(2, 4, 3), B, B.sin()))
    operations = getattr(torch.ops, NAMESPACE)
    y, S, starts = operations.selective_scan_chunked(*call, True)
    torch.library.opcheck(operations.selective_scan_chunked.default, (*call, False))
    arguments = tuple(x.detach() for x in (torch.randn_like(y), torch.randn_like(S), starts, *call))
    torch.library.opcheck(operations.selective_scan_chunked_gradient.default, arguments)
