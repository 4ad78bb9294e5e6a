import torch
from transformers import PrinterCallback, TrainingArguments

from linattn.integrations.transformers import LinattnConfig, LinattnForCausalLM, StatefulTrainer

config = LinattnConfig(language_model={"vocab_size": 257, "dim": 32, "depth": 2, "attention": "gated_delta"})
# two texts, side by side, in windows that share a token: window 2 continues window 0, window 3 continues window 1, …
texts = torch.randint(256, (2, 65))
windows = [(step, text[16 * step : 16 * step + 17]) for step in range(4) for text in texts]
data = [{"input_ids": window, "labels": window, "continues": step > 0} for step, window in windows]
args = TrainingArguments(
    "run",
    max_steps=4,
    per_device_train_batch_size=2,
    train_sampling_strategy="sequential",
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = StatefulTrainer(model=LinattnForCausalLM(config), args=args, train_dataset=data)
trainer.remove_callback(PrinterCallback)
print(trainer.train().global_step)  # 4
