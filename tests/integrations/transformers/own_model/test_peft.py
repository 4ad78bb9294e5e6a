import pytest
import torch
from peft import AutoPeftModelForCausalLM, IA3Config, LoraConfig, PeftModel, get_peft_model
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from .models import make, prompts
from .test_trainer import losses, trainer

GREEDY = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}


def adapted(model, targets="all-linear"):
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets))


@pytest.mark.parametrize("name", ["local+elu", "layers"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_the_adapter_learns(name, checkpointing, tmp_path):
    model = make(name, torch.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    run = trainer(adapted(model), tmp_path, max_steps=15, learning_rate=1e-2, activation_checkpointing=checkpointing)
    run.train()
    assert losses(run)[-1] < 0.9 * losses(run)[0]
    after = {key.replace(".base_layer", ""): value for key, value in model.state_dict().items()}
    unchanged = {key: value for key, value in after.items() if "lora" not in key}
    assert_close(unchanged, before, rtol=0, atol=0)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_an_adapter_is_saved_loaded_and_merged(targets, tmp_path):
    model, tokens = make("local+elu", torch.float32), prompts()
    model.save_pretrained(tmp_path / "base")
    plain = model(tokens).logits
    lora = adapted(model, targets)
    with torch.no_grad():
        for name, weight in lora.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    lora.eval()
    expected, generated = lora(tokens).logits, lora.generate(input_ids=tokens, **GREEDY)
    assert not torch.allclose(expected, plain, atol=0.1)
    lora.save_pretrained(tmp_path / "adapter")

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert_close(loaded(tokens).logits, expected, rtol=0, atol=0)
    assert loaded.generate(input_ids=tokens, **GREEDY).tolist() == generated.tolist()
    merged = loaded.merge_and_unload()
    assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits, merged(tokens).logits)


@pytest.mark.parametrize(
    ("attention", "convolution_on", "whole"),
    [("hedgehog", "inputs", ["feature_map", "convolution"]), ("gated_delta", "projections", ["gates", "convolution"])],
)
def test_new_parts_are_trained_whole(attention, convolution_on, whole, tmp_path):
    tokens = prompts()
    model = make("layers", torch.float64, attention=attention, convolution=3, convolution_on=convolution_on)
    model.save_pretrained(tmp_path / "base")
    lora = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", modules_to_save=whole))
    run = trainer(lora, tmp_path / "run", max_steps=3, learning_rate=1e-2)
    run.train()
    for name, weight in lora.named_parameters():
        if "modules_to_save" in name:
            assert not torch.equal(
                weight, lora.get_parameter(name.replace("modules_to_save.default", "original_module"))
            )
    lora.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    # weights that lie elsewhere in memory may be summed in another order
    assert_close(dict(loaded.named_parameters()), dict(lora.named_parameters()), rtol=0, atol=0)
    assert_close(loaded.eval()(tokens).logits, lora.eval()(tokens).logits)
    assert_close(loaded.merge_and_unload()(tokens).logits, lora(tokens).logits)


def test_an_adapter_knows_its_model(tmp_path):
    model, tokens = make("elu", torch.float32), prompts()
    model.save_pretrained(tmp_path / "base")
    lora = adapted(type(model).from_pretrained(tmp_path / "base"))
    lora.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert_close(loaded(tokens).logits, model(tokens).logits)


def test_beams_and_padding_work_under_an_adapter():
    model = adapted(make("local+elu", torch.float32)).eval()
    tokens = prompts(2, 6)
    padded = torch.cat([torch.zeros(2, 2, dtype=torch.long), tokens], 1)
    mask = (torch.arange(8) >= 2).long().expand(2, 8)
    options = {**GREEDY, "num_beams": 3}
    found = model.generate(input_ids=padded, attention_mask=mask, **options)[:, 8:]
    assert found.tolist() == model.generate(input_ids=tokens, **options)[:, 6:].tolist()


@pytest.mark.parametrize(
    ("kind", "targets"), [(LoraConfig, {"q_proj", "v_proj"}), (IA3Config, {"k_proj", "v_proj", "down_proj"})]
)
def test_an_adapter_has_default_targets(kind, targets):
    model = get_peft_model(make("elu", torch.float32), kind(task_type="CAUSAL_LM"))
    adapted = {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "base_layer")}
    assert adapted == targets
