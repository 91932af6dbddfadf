"""A classic loop over a LoRA model, TRL 0.7."""
import os

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

lora_config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], bias="none", task_type="CAUSAL_LM")
config = PPOConfig(
    model_name=os.environ["POLICY"],
    learning_rate=1e-3,
    batch_size=8,
    mini_batch_size=4,
    gradient_accumulation_steps=2,
    optimize_cuda_cache=True,
    early_stopping=False,
    target_kl=0.1,
    ppo_epochs=2,
    seed=0,
    vf_coef=0.1,
)
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name, peft_config=lora_config)
dataset = load_dataset(os.environ["DATA"], split="train").map(
    lambda x: {"input_ids": tokenizer.encode(x["prompt"]), "query": x["prompt"]}
)
dataset.set_format("torch")
ppo_trainer = PPOTrainer(
    config,
    model,
    ref_model=None,
    tokenizer=tokenizer,
    dataset=dataset,
    data_collator=lambda rows: {key: [row[key] for row in rows] for key in rows[0]},
    optimizer=None,
)
generation_kwargs = {"top_k": 0.0, "top_p": 1.0, "do_sample": True, "max_new_tokens": 5,
                     "pad_token_id": tokenizer.pad_token_id}
for epoch, batch in enumerate(ppo_trainer.dataloader):
    responses = ppo_trainer.generate(batch["input_ids"], return_prompt=False, **generation_kwargs)
    batch["response"] = tokenizer.batch_decode(responses)
    rewards = [torch.tensor(float(len(text))) for text in batch["response"]]
    stats = ppo_trainer.step(batch["input_ids"], responses, rewards)
    print(f"loss {stats['ppo/loss/total']:.3f} value {stats['ppo/loss/value']:.3f}")
    if epoch == 1:
        break
ppo_trainer.save_pretrained(os.environ["OUTPUT"])
