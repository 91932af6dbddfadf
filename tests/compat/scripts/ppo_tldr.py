"""The summarising example: messages through the chat template, a length filter, EOS as stop token and its penalty.

Only the import block differs from what ran on TRL 0.12 to 1.12.
"""

from accelerate import PartialState
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
)
from trl import ModelConfig, ScriptArguments, get_peft_config

from trl_grpo_ext.compat.ppo import PPOConfig, PPOTrainer

if __name__ == "__main__":
    parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_into_dataclasses()

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    value_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    reward_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)
    peft_config = get_peft_config(model_args)
    ref_policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path) if peft_config is None else None

    dataset = load_dataset(script_args.dataset_name)
    train_dataset = dataset[script_args.dataset_train_split]

    def prepare_dataset(dataset, tokenizer):
        def tokenize(element):
            input_ids = tokenizer.apply_chat_template(
                element["messages"][:1], padding=False, add_generation_prompt=True, return_dict=False
            )
            return {"input_ids": input_ids, "lengths": len(input_ids)}

        return dataset.map(tokenize, remove_columns=dataset.column_names, num_proc=training_args.dataset_num_proc)

    with PartialState().local_main_process_first():
        train_dataset = prepare_dataset(train_dataset, tokenizer)
        train_dataset = train_dataset.filter(lambda x: x["lengths"] <= 512, num_proc=training_args.dataset_num_proc)

    assert train_dataset[0]["input_ids"][-1] != tokenizer.eos_token_id, "the last token should not be EOS"

    trainer = PPOTrainer(
        args=training_args,
        processing_class=tokenizer,
        model=policy,
        ref_model=ref_policy,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=train_dataset,
        peft_config=peft_config,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
