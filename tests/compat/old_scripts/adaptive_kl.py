"""Adaptive KL with a target, early stopping and a scheduler, TRL 0.10."""
import os

import torch
import trl
from transformers import AutoTokenizer
from trl.core import LengthSampler, respond_to_batch

tokenizer = AutoTokenizer.from_pretrained(os.environ["POLICY"])
config = trl.PPOConfig(
    model_name=os.environ["POLICY"],
    steps=16,
    batch_size=8,
    mini_batch_size=8,
    adap_kl_ctrl=True,
    init_kl_coef=0.2,
    target=0.5,
    horizon=100,
    gamma=0.99,
    lam=0.95,
    cliprange=0.2,
    cliprange_value=0.2,
    log_with=None,
)
model = trl.AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
ref_model = trl.AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
ppo_trainer = trl.PPOTrainer(config, model, ref_model, tokenizer, optimizer=optimizer, lr_scheduler=scheduler)
sampler = LengthSampler(2, 5)
before = ppo_trainer.kl_ctl.value
for _ in range(config.total_ppo_epochs):
    queries = [torch.tensor(tokenizer.encode("What is 1 + 1?")) for _ in range(8)]
    responses = [respond_to_batch(model, q.unsqueeze(0), txt_len=sampler())[0] for q in queries]
    stats = ppo_trainer.step(queries, responses, [torch.tensor(float(len(r))) for r in responses])
print("kl weight", before, "->", ppo_trainer.kl_ctl.value, stats["objective/kl_coef"])
