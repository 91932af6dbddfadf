"""Settings from the command line, with the argument names of TRL 0.12."""
import os

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser

from trl import ModelConfig, PPOConfig, PPOTrainer, ScriptArguments
from trl.trainer.utils import SIMPLE_CHAT_TEMPLATE

if __name__ == "__main__":
    parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
    script_args, config, model_config = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(model_config.model_name_or_path, padding_side="left")
    if tokenizer.chat_template is None:
        tokenizer.chat_template = SIMPLE_CHAT_TEMPLATE
    value_model = AutoModelForSequenceClassification.from_pretrained(config.reward_model_path, num_labels=1)
    reward_model = AutoModelForSequenceClassification.from_pretrained(config.reward_model_path, num_labels=1)
    ref_policy = AutoModelForCausalLM.from_pretrained(config.sft_model_path)
    policy = AutoModelForCausalLM.from_pretrained(config.sft_model_path)
    raw = load_dataset(script_args.dataset_name, split="train")

    def tokenize(row):
        messages = [{"role": "user", "content": row["prompt"]}]
        return {"input_ids": tokenizer.apply_chat_template(messages, add_generation_prompt=True)}

    train_dataset = raw.map(tokenize, remove_columns=raw.column_names)
    trainer = PPOTrainer(
        config=config,
        processing_class=tokenizer,
        policy=policy,
        ref_policy=ref_policy,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=train_dataset,
        eval_dataset=train_dataset,
    )
    trainer.train()
    trainer.save_model(config.output_dir)
    trainer.generate_completions()
