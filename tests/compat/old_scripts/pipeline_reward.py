"""A text pipeline as reward, with the pipeline arguments of transformers 4, TRL 0.6."""
import os

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, pipeline
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model
from trl.core import LengthSampler

config = PPOConfig(model_name=os.environ["POLICY"], learning_rate=1.41e-5, batch_size=8, forward_batch_size=4)
sent_kwargs = {"return_all_scores": True, "function_to_apply": "none", "batch_size": 16}
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
ref_model = create_reference_model(model, num_shared_layers=1)
dataset = load_dataset(os.environ["DATA"], split="train").map(
    lambda x: {"input_ids": tokenizer.encode(x["prompt"]), "query": x["prompt"]}
)
dataset.set_format("torch")


def collator(data):
    return dict((key, [d[key] for d in data]) for key in data[0])


ppo_trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset=dataset, data_collator=collator)
sentiment = pipeline("sentiment-analysis", model=os.environ["CLASSIFIER"], device=-1, return_all_scores=True)
lengths = LengthSampler(3, 6)
for epoch, batch in enumerate(ppo_trainer.dataloader):
    query_tensors = batch["input_ids"]
    response_tensors = []
    for query in query_tensors:
        response = ppo_trainer.generate(query, max_new_tokens=lengths(), do_sample=True, eos_token_id=-1,
                                        pad_token_id=tokenizer.pad_token_id)
        response_tensors.append(response.squeeze()[len(query):])
    batch["response"] = [tokenizer.decode(r.squeeze()) for r in response_tensors]
    outputs = sentiment([q + r for q, r in zip(batch["query"], batch["response"])], **sent_kwargs)
    rewards = [torch.tensor(max(o["score"] for o in output)) for output in outputs]
    stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
    ppo_trainer.log_stats(stats, batch, rewards)
    print(stats["ppo/val/var_explained"])
    if epoch == 1:
        break
