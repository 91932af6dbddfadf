"""Make a built-in job the arguments of a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_grpo_ext.bench.jobs import JOBS, prompt_rows, reward_by_tokens
from trl_grpo_ext.config import GroupRelativeConfig
from trl_grpo_ext.models import resolve_model

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def builtin_call(
    name: str, model_name: str, dtype: str, num_steps: int, fields: dict[str, Any], out: Path
) -> dict[str, Any]:
    """Return the keyword arguments of a trainer, TRL's or ours, for ``num_steps + 1`` steps of a built-in job.

    Completions run to their full length: the only token that ends one is the last of the vocabulary, which no model
    samples, or a random ``stop_share`` of all tokens. The first epoch is the run, in the data's own order, so that both
    sides see the same prompts and the same dead groups.

    Args:
        name: of the job.
        model_name: as in a recipe.
        dtype: ``bf16`` or ``fp32``, of the base weights; adapters are float32.
        num_steps: timed steps.
        fields: of ``GroupRelativeConfig``; they win over the job's.
        out: output directory.
    """
    job = JOBS[name]
    torch.manual_seed(0)
    path = resolve_model(model_name)
    tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype])
    vocab_size = model.get_input_embeddings().weight.size(0)
    stops = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))[: int(job.stop_share * vocab_size)]
    # The tokenizer's own end is added by TRL, so it has to be one that is not sampled either.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.generation_config.eos_token_id = sorted({len(tokenizer) - 1, *stops.tolist()})
    peft_config = None
    if not job.full:
        from peft import LoraConfig

        peft_config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    has_gpu = torch.cuda.is_available()
    values: dict[str, Any] = {
        "per_device_train_batch_size": job.num_rows,
        "num_generations": job.num_generations,
        "max_completion_length": job.max_completion_length,
        "max_steps": num_steps + 1,
        "shuffle_dataset": False,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": has_gpu and dtype == "bf16",
        "use_cpu": not has_gpu,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        **fields,
    }
    return {
        "model": model,
        "reward_funcs": reward_by_tokens,
        "args": GroupRelativeConfig(output_dir=str(out), **values),
        "train_dataset": Dataset.from_list(prompt_rows(job, num_steps + 1)),
        "processing_class": tokenizer,
        "peft_config": peft_config,
    }
