"""8-bit policy whose reward model is an adapter of its own, and a 4-bit reference, TRL 0.8."""
import os

import torch
from accelerate import Accelerator
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

name = os.environ["POLICY"]
config = PPOConfig(model_name=name, batch_size=8, mini_batch_size=4, learning_rate=1e-3, ppo_epochs=2, kl_penalty="kl")
tokenizer = AutoTokenizer.from_pretrained(name, use_auth_token=True)
model = AutoModelForCausalLMWithValueHead.from_pretrained(
    name,
    load_in_8bit=True,
    device_map={"": Accelerator().device},
    peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    reward_adapter=os.environ["ADAPTER"],
)
ref = AutoModelForCausalLM.from_pretrained(name, device_map="auto", load_in_4bit=True, use_auth_token=True)
ppo_trainer = PPOTrainer(config, model, ref, tokenizer)
queries = [torch.tensor(tokenizer.encode("What is 1 + 1?"))] * config.batch_size
for _ in range(2):
    responses = ppo_trainer.generate(queries, return_prompt=False, max_new_tokens=4, do_sample=True)
    rewards = [ppo_trainer.model.compute_reward_score(r.unsqueeze(0)) for r in responses]
    stats = ppo_trainer.step(queries, responses, rewards)
