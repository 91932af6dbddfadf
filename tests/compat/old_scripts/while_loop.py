"""A while loop over one game with scores from outside; batch of one and stored responses, TRL 0.11."""
import os

import torch
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

tokenizer = AutoTokenizer.from_pretrained(os.environ["POLICY"])
model = AutoModelForCausalLMWithValueHead.from_pretrained(os.environ["POLICY"])
ppo_config = PPOConfig(batch_size=1, mini_batch_size=1, learning_rate=1e-4, is_encoder_decoder=False, world_size=1)
trainer = PPOTrainer(ppo_config, model, None, tokenizer)
done = 0
while done < 2:
    query = tokenizer.encode("guess a number", return_tensors="pt")[0]
    response = trainer.generate(query, max_new_tokens=4, return_prompt=False)[0]
    stats = trainer.step([query], [response], [torch.tensor(1.0)])
    model.v_head.summary.weight
    trainer.record_step_stats(kl_coef=0.1)
    done += 1
