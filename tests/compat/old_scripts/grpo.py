"""A GRPO script of TRL 0.19."""
import os

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig

dataset = load_dataset(os.environ["DATA"], split="train")


def short(completions, **kwargs):
    return [-float(len(c)) for c in completions]


class Mine(GRPOTrainer):
    pass


args: GRPOConfig = GRPOConfig(
    output_dir=os.environ["OUTPUT"],
    num_generations=4,
    per_device_train_batch_size=4,
    max_prompt_length=64,
    max_completion_length=6,
    max_steps=2,
    wandb_log_unique_prompts=True,
    use_liger_loss=False,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    bf16=False,
)
trainer = Mine(model=os.environ["POLICY"], reward_funcs=short, args=args, train_dataset=dataset)
trainer.train()
