"""What becomes of every setting a PPO script may name. Pure data: no torch, so that the codemod can read it too.

Two vocabularies exist. *Classic* is TRL <= 0.11: a loop written by the user around ``generate`` and ``step``. *v2* is
TRL 0.9.3 to 1.12: ``train()`` with a reward model. Both call their settings ``PPOConfig``.
"""

from __future__ import annotations

from typing import Literal

Era = Literal["classic", "v2"]
Disposition = Literal["same", "translate", "critic", "quiet", "output", "refuse"]

# same: means what it meant. translate: turned into other settings. critic: accepted, named once in the start-up report,
# no effect because there is no value model. quiet: accepted, had or has no effect. output: filled in by the trainer.
# refuse: an error that names the replacement.
V2_FIELDS: dict[str, Disposition] = {
    "num_mini_batches": "translate",
    "total_episodes": "translate",
    "local_rollout_forward_batch_size": "translate",
    "num_sample_generations": "translate",
    "response_length": "translate",
    "stop_token": "translate",
    "stop_token_id": "translate",
    "temperature": "same",
    "missing_eos_penalty": "translate",
    "sft_model_path": "same",
    "reward_model_path": "same",
    "model_adapter_name": "same",
    "ref_adapter_name": "same",
    "num_ppo_epochs": "translate",
    "whiten_rewards": "quiet",
    "kl_coef": "translate",
    "kl_estimator": "translate",
    "cliprange": "translate",
    "vf_coef": "critic",
    "cliprange_value": "critic",
    "gamma": "critic",
    "lam": "critic",
    "ds3_gather_for_generation": "same",
    "dataset_num_proc": "same",
    "exp_name": "same",
    "world_size": "output",
    "num_total_batches": "output",
    "micro_batch_size": "output",
    "local_batch_size": "output",
    "batch_size": "output",
    "local_mini_batch_size": "output",
    "mini_batch_size": "output",
    # PPOv2Config of 0.9 and 0.10 only
    "num_updates": "output",
    "base_model": "same",
    "sanity_check": "quiet",
    "non_eos_penalty": "refuse",
    "penalty_reward_value": "refuse",
}

CLASSIC_FIELDS: dict[str, Disposition] = {
    "exp_name": "same",
    "seed": "same",
    "log_with": "translate",
    "task_name": "same",
    "model_name": "same",
    "query_dataset": "same",
    "reward_model": "same",
    "remove_unused_columns": "same",
    "tracker_kwargs": "translate",
    "accelerator_kwargs": "translate",
    "project_kwargs": "translate",
    "tracker_project_name": "translate",
    "push_to_hub_if_best_kwargs": "same",
    "steps": "same",
    "learning_rate": "same",
    "adap_kl_ctrl": "same",
    "init_kl_coef": "same",
    "kl_penalty": "same",
    "target": "same",
    "horizon": "same",
    "gamma": "critic",
    "lam": "critic",
    "cliprange": "translate",
    "cliprange_value": "critic",
    "vf_coef": "critic",
    "batch_size": "translate",
    "forward_batch_size": "translate",
    "mini_batch_size": "translate",
    "gradient_accumulation_steps": "translate",
    "ppo_epochs": "translate",
    "max_grad_norm": "translate",
    "optimize_cuda_cache": "translate",
    "optimize_device_cache": "translate",
    "early_stopping": "same",
    "target_kl": "same",
    "compare_steps": "same",
    "ratio_threshold": "same",
    "use_score_scaling": "same",
    "use_score_norm": "same",
    "score_clip": "same",
    "whiten_rewards": "quiet",
    "gradient_checkpointing": "same",
    "dataset_num_proc": "same",
    "world_size": "output",
    "is_encoder_decoder": "output",
    "is_peft_model": "output",
    "backward_batch_size": "output",
    "global_backward_batch_size": "output",
    "global_batch_size": "output",
    "total_ppo_epochs": "output",
    # new in v2, and honoured in the loop too
    "model_adapter_name": "same",
    "ref_adapter_name": "same",
}

# Fields that only the classic era knows: naming one is how a configuration says which era it is from.
CLASSIC_ONLY: frozenset[str] = frozenset(
    name
    for name, disposition in CLASSIC_FIELDS.items()
    if name not in V2_FIELDS
    and disposition != "output"
    # shared with TrainingArguments, so no sign of either era
    and name
    not in (
        "seed",
        "learning_rate",
        "remove_unused_columns",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "max_grad_norm",
    )
)

CRITIC_FIELDS: tuple[str, ...] = ("vf_coef", "cliprange_value", "lam", "gamma")
CRITIC_DEFAULTS: dict[str, float] = {"vf_coef": 0.1, "cliprange_value": 0.2, "lam": 0.95, "gamma": 1.0}

# Arguments of the transformers 4 TrainingArguments that transformers 5 no longer takes: what stands for them now, or
# None where there is nothing left to set.
REMOVED_ARGUMENTS: dict[str, str | None] = {
    "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "no_cuda": "use_cpu",
    "adafactor": "optim",
    "push_to_hub_token": "hub_token",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_organization": None,
    "overwrite_output_dir": None,
    "logging_dir": None,
    "save_safetensors": None,
    "group_by_length": None,
    "use_mps_device": None,
    "half_precision_backend": None,
    "fp16_backend": None,
    "fp16_opt_level": None,
    "include_inputs_for_metrics": None,
    "include_tokens_per_second": None,
    "dispatch_batches": None,
    "split_batches": None,
    "past_index": None,
    "jit_mode_eval": None,
    "use_ipex": None,
    "ray_scope": None,
    "tpu_num_cores": None,
    "tpu_metrics_debug": None,
    "use_legacy_prediction_loop": None,
    "mp_parameters": None,
    "xpu_backend": None,
    "torchdynamo": None,
    "sharded_ddp": None,
    "fsdp_min_num_params": None,
    "fsdp_transformer_layer_cls_to_wrap": None,
}

# Outputs of the trainer that scripts sometimes pass in: dropped, because the trainer computes them.
OUTPUT_ONLY: frozenset[str] = frozenset(
    {
        "world_size",
        "is_encoder_decoder",
        "is_peft_model",
        "backward_batch_size",
        "global_backward_batch_size",
        "global_batch_size",
        "total_ppo_epochs",
    }
)

# Methods of the two old trainers that a subclass may have overridden, and which nothing here calls.
DEAD_HOOKS: frozenset[str] = frozenset(
    {
        "compute_rewards",
        "loss",
        "batched_forward_pass",
        "train_minibatch",
        "compute_advantages",
        "record_step_stats",
    }
)


# Arguments of TrainingArguments that PPO counted in updates, read differently or ignored, with the reason.
TRANSLATED_ARGUMENTS: dict[str, str] = {
    "per_device_train_batch_size": "the batch arithmetic",
    "gradient_accumulation_steps": "the batch arithmetic",
    "max_steps": "PPO ignored it; used when total_episodes is not set",
    "save_steps": "counted in PPO updates",
    "warmup_steps": "counted in PPO updates",
    "logging_steps": "counted in PPO updates",
    "eval_strategy": "PPO had no evaluation loop; it only switched sample tables on",
    "eval_steps": "PPO had no evaluation loop",
    "eval_on_start": "PPO had no evaluation loop",
    "load_best_model_at_end": "PPO had no evaluation loop",
    "auto_find_batch_size": "PPO ignored it; groups must stay whole",
    "remove_unused_columns": "reward functions see every column",
}


def disposition(name: str, era: Era) -> Disposition | None:
    """Return what happens to field ``name`` of a ``PPOConfig`` of ``era``; None for a name that neither era knew.

    Fields of ``transformers.TrainingArguments`` are not listed here; those that transformers 5 still has are "same",
    except the few in ``TRANSLATED_ARGUMENTS``, those that it dropped are in ``REMOVED_ARGUMENTS``.
    """
    own = CLASSIC_FIELDS if era == "classic" else V2_FIELDS
    if name in own:
        return own[name]
    if name in REMOVED_ARGUMENTS:
        return "translate" if REMOVED_ARGUMENTS[name] else "quiet"
    if name in TRANSLATED_ARGUMENTS:
        return "translate"
    other = V2_FIELDS if era == "classic" else CLASSIC_FIELDS
    if name not in other:
        return None
    return "refuse" if other[name] == "refuse" else "quiet"
