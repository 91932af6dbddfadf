"""A collator class of its own and a torch data set, TRL 0.9."""
import os
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead as ValueHeadModel
from trl import PPOConfig, PPOTrainer, create_reference_model, set_seed

set_seed(3)
tokenizer = AutoTokenizer.from_pretrained(os.environ["POLICY"])


class Prompts(Dataset):
    def __init__(self):
        self.texts = [f"What is {i}?" for i in range(8)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {"query": self.texts[index], "input_ids": torch.tensor(tokenizer.encode(self.texts[index]))}


@dataclass
class Collator:
    pad_to: int = 0

    def __call__(self, rows):
        return {"query": [row["query"] for row in rows], "input_ids": [row["input_ids"] for row in rows]}


model = ValueHeadModel.from_pretrained(os.environ["POLICY"])
ppo_trainer = PPOTrainer(
    config=PPOConfig(batch_size=8, mini_batch_size=8, learning_rate=1e-3, ppo_epochs=1, use_score_scaling=True,
                     use_score_norm=True, score_clip=2.0),
    model=model,
    ref_model=create_reference_model(model),
    tokenizer=tokenizer,
    dataset=Prompts(),
    data_collator=Collator(),
)
for step, batch in enumerate(ppo_trainer.dataloader):
    responses = [ppo_trainer.generate(q, max_new_tokens=4).squeeze()[len(q):] for q in batch["input_ids"]]
    rewards = [torch.tensor(float(r.sum() % 5)) for r in responses]
    stats = ppo_trainer.step(batch["input_ids"], responses, rewards)
    if step == 1:
        break
