"""A subclass of the v2 trainer with a callback, written for TRL 0.15."""
import os

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import PPOConfig, PPOTrainer

PATHS = {name: os.environ[name] for name in ("POLICY", "REWARD", "DATA", "OUTPUT")}


class StopAfter(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.episode >= 16


class LoggingTrainer(PPOTrainer):
    """Counts what it logs."""

    logged = 0

    def log(self, logs, *args):
        self.logged += 1
        return super().log(logs, *args)


tokenizer = AutoTokenizer.from_pretrained(PATHS["POLICY"], padding_side="left")
policy = AutoModelForCausalLM.from_pretrained(PATHS["POLICY"])
ref_policy = AutoModelForCausalLM.from_pretrained(PATHS["POLICY"])
reward_model = AutoModelForSequenceClassification.from_pretrained(PATHS["REWARD"], num_labels=1)
value_model = AutoModelForSequenceClassification.from_pretrained(PATHS["REWARD"], num_labels=1)
dataset = load_dataset(PATHS["DATA"], split="train")
dataset = dataset.map(lambda x: tokenizer(x["prompt"]), remove_columns=dataset.column_names)

args = PPOConfig(
    output_dir=PATHS["OUTPUT"],
    per_device_train_batch_size=8,
    total_episodes=32,
    num_ppo_epochs=1,
    response_length=4,
    num_sample_generations=0,
    evaluation_strategy="no",
    overwrite_output_dir=True,
    warmup_ratio=0.1,
    vf_coef=0.1,
    cliprange_value=0.2,
    save_strategy="no",
    report_to=[],
    no_cuda=True,
    bf16=False,
)
trainer = LoggingTrainer(
    args=args,
    processing_class=tokenizer,
    model=policy,
    ref_model=ref_policy,
    reward_model=reward_model,
    train_dataset=dataset,
    value_model=value_model,
    callbacks=[StopAfter()],
)
trainer.train()
