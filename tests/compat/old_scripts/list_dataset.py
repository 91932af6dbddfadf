"""PPOv2 of TRL 0.11 with a Python list as data set, positional arguments and a settings dictionary."""
import os

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.ppov2_config import PPOv2Config
from trl.trainer.ppov2_trainer import PPOv2Trainer

tokenizer = AutoTokenizer.from_pretrained(os.environ["POLICY"], padding_side="left")
rows = [{"input_ids": tokenizer(f"What is {i}?", padding="max_length", max_length=20)["input_ids"]} for i in range(16)]
common = {"report_to": "none", "save_strategy": "no"}
config = PPOv2Config(
    os.environ["OUTPUT"],
    learning_rate=1e-4,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_ppo_epochs=2,
    num_mini_batches=2,
    total_episodes=16,
    batch_size=1,
    mini_batch_size=1,
    response_length=5,
    num_sample_generations=0,
    non_eos_penalty=False,
    bf16=False,
    use_cpu=True,
    **common,
)
policy = AutoModelForCausalLM.from_pretrained(os.environ["POLICY"])
ref = AutoModelForCausalLM.from_pretrained(os.environ["POLICY"])
reward = AutoModelForSequenceClassification.from_pretrained(os.environ["REWARD"], num_labels=1)
value = AutoModelForSequenceClassification.from_pretrained(os.environ["REWARD"], num_labels=1)
trainer = PPOv2Trainer(config, tokenizer, policy, ref, reward, rows, value, eval_dataset=rows)
trainer.train()
