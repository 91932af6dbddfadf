"""The classic loop with a sentiment classifier as reward.

Only the import block differs from what ran on TRL 0.4 to 0.11. The paths come from the environment.
"""

import os

import torch
from datasets import load_dataset
from tqdm import tqdm
from transformers import AutoTokenizer, pipeline

from trl_grpo_ext.compat.ppo import (
    AutoModelForCausalLMWithValueHead,
    LengthSampler,
    PPOConfig,
    PPOTrainer,
    create_reference_model,
    set_seed,
)

config = PPOConfig(
    model_name=os.environ["MODEL"],
    query_dataset=os.environ["DATASET"],
    reward_model=os.environ["CLASSIFIER"],
    learning_rate=1.41e-5,
    batch_size=16,
    mini_batch_size=8,
    steps=32,
)
sent_kwargs = {"top_k": None, "function_to_apply": "none", "batch_size": 16}


def build_dataset(config, input_min_text_length=2, input_max_text_length=8):
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    tokenizer.pad_token = tokenizer.eos_token
    ds = load_dataset(config.query_dataset, split="train")
    ds = ds.rename_columns({"text": "review"})
    ds = ds.filter(lambda x: len(x["review"]) > 20, batched=False)
    input_size = LengthSampler(input_min_text_length, input_max_text_length)

    def tokenize(sample):
        sample["input_ids"] = tokenizer.encode(sample["review"])[: input_size()]
        sample["query"] = tokenizer.decode(sample["input_ids"])
        return sample

    ds = ds.map(tokenize, batched=False)
    ds.set_format(type="torch")
    return ds


def collator(data):
    return {key: [d[key] for d in data] for key in data[0]}


dataset = build_dataset(config)
set_seed(config.seed)

model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
ref_model = create_reference_model(model)
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
tokenizer.pad_token = tokenizer.eos_token

ppo_trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset=dataset, data_collator=collator)

device = ppo_trainer.accelerator.device
if ppo_trainer.accelerator.num_processes == 1:
    device = 0 if torch.cuda.is_available() else "cpu"
sentiment_pipe = pipeline("sentiment-analysis", model=config.reward_model, device=device)

generation_kwargs = {
    "min_length": -1,
    "top_k": 0.0,
    "top_p": 1.0,
    "do_sample": True,
    "pad_token_id": tokenizer.eos_token_id,
    "eos_token_id": -1,
}
output_length_sampler = LengthSampler(4, 8)
history = []

for epoch, batch in tqdm(enumerate(ppo_trainer.dataloader)):
    if epoch >= config.total_ppo_epochs:
        break
    query_tensors = batch["input_ids"]

    response_tensors, ref_response_tensors = ppo_trainer.generate(
        query_tensors,
        return_prompt=False,
        generate_ref_response=True,
        length_sampler=output_length_sampler,
        **generation_kwargs,
    )
    batch["response"] = tokenizer.batch_decode(response_tensors)
    batch["ref_response"] = tokenizer.batch_decode(ref_response_tensors)

    texts = [q + r for q, r in zip(batch["query"], batch["response"], strict=True)]
    pipe_outputs = sentiment_pipe(texts, **sent_kwargs)
    rewards = [torch.tensor(next(o["score"] for o in out if o["label"] == "LABEL_1")) for out in pipe_outputs]
    ref_texts = [q + r for q, r in zip(batch["query"], batch["ref_response"], strict=True)]
    ref_outputs = sentiment_pipe(ref_texts, **sent_kwargs)
    batch["ref_rewards"] = [
        torch.tensor(next(o["score"] for o in out if o["label"] == "LABEL_1")) for out in ref_outputs
    ]

    stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
    ppo_trainer.log_stats(stats, batch, rewards, columns_to_log=["query", "response", "ref_response", "ref_rewards"])
    history.append(stats)

model.save_pretrained(os.environ["OUTPUT"])
tokenizer.save_pretrained(os.environ["OUTPUT"])
