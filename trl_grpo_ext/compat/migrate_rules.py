"""What the codemod changes, as tables: where names moved, which arguments were renamed, what needs a person.

Pure data and text look-ups: the script is never executed, and TRL and transformers are not imported.
"""

from __future__ import annotations

import ast
import functools
import re
from typing import NamedTuple

from trl_grpo_ext.compat.fields import CRITIC_FIELDS, OUTPUT_ONLY, REMOVED_ARGUMENTS
from trl_grpo_ext.source_fields import SourceNotFoundError, class_fields, module_path, trainer_fields

PPO_HOME = "trl_grpo_ext.compat.ppo"
GRPO_HOME = "trl_grpo_ext"

# Old name -> (module, name) that stands for it. Names not listed stay where they are.
MOVED: dict[str, tuple[str, str]] = {
    "PPOTrainer": (PPO_HOME, "PPOTrainer"),
    "PPOConfig": (PPO_HOME, "PPOConfig"),
    "PPOv2Trainer": (PPO_HOME, "PPOTrainer"),
    "PPOv2Config": (PPO_HOME, "PPOConfig"),
    "AutoModelForCausalLMWithValueHead": (PPO_HOME, "AutoModelForCausalLMWithValueHead"),
    "AutoModelForSeq2SeqLMWithValueHead": (PPO_HOME, "AutoModelForSeq2SeqLMWithValueHead"),
    "create_reference_model": (PPO_HOME, "create_reference_model"),
    "LengthSampler": (PPO_HOME, "LengthSampler"),
    "set_seed": (PPO_HOME, "set_seed"),
    "respond_to_batch": (PPO_HOME, "respond_to_batch"),
    "get_kbit_device_map": (PPO_HOME, "get_kbit_device_map"),
    "SIMPLE_CHAT_TEMPLATE": (PPO_HOME, "SIMPLE_CHAT_TEMPLATE"),
    "GRPOTrainer": (GRPO_HOME, "GroupRelativeTrainer"),
    "GRPOConfig": (GRPO_HOME, "GroupRelativeConfig"),
}
TRAINERS = frozenset({"PPOTrainer", "PPOv2Trainer", "GRPOTrainer"})
CONFIGS = frozenset({"PPOConfig", "PPOv2Config", "GRPOConfig"})

# Keywords of the v2 trainer that got another name on the way.
TRAINER_KEYWORDS = {"config": "args", "tokenizer": "processing_class", "policy": "model", "ref_policy": "ref_model"}
TRAINER_DROPPED = frozenset({"value_model"})
V2_SIGNS = frozenset({"args", "processing_class", "reward_model", "value_model", "policy", "train_dataset"})

# Keywords of GRPOConfig that TRL renamed or dropped before 1.16; None: nothing stands for it.
GRPO_KEYWORDS: dict[str, str | None] = {
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "use_transformers_paged": "use_transformers_continuous_batching",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "use_liger_loss": None,
    "vllm_device": None,
    "vllm_dtype": None,
    "vllm_max_model_len": "vllm_max_model_length",
    "vllm_enable_prefix_caching": None,
}

# Attributes of the old trainers that are gone, and why or what instead.
GONE_ATTRIBUTES: dict[str, str] = {
    "batched_forward_pass": "internal of the old trainer; step() does it",
    "compute_rewards": "internal of the old trainer; override _calculate_rewards",
    "compute_advantages": "internal of the old trainer; step() does it",
    "train_minibatch": "internal of the old trainer; override _compute_loss",
    "record_step_stats": "internal of the old trainer",
    "compute_reward_score": "reward adapters are not supported; load the adapter as its own sequence classifier",
    "v_head": "there is no value head",
}
GONE_KEYWORDS: dict[str, str] = {
    "reward_adapter": "reward adapters are not supported; load the adapter as its own sequence classifier",
    "non_eos_penalty": "it replaced the score; missing_eos_penalty subtracts from it, choose its size",
    "penalty_reward_value": "it replaced the score; missing_eos_penalty subtracts from it, choose its size",
}
# Statistics that the critic gave; they are NaN now.
CRITIC_STATS = re.compile(r"^(ppo/(loss/value|val/|returns/)|loss/value_avg|val/clipfrac_avg)")


class Keyword(NamedTuple):
    """What to do with one keyword of a configuration.

    Attributes:
        name: Its new name; None drops it.
        remark: A sentence for the list of what a person must decide.
        added: Name and source text of an argument that must stand beside it; None: none.
    """

    name: str | None
    remark: str = ""
    added: tuple[str, str] | None = None


def config_keyword(name: str, value: str, era: str) -> Keyword:
    """Return what becomes of ``name=value`` in a configuration.

    Args:
        name: The keyword.
        value: Its source text.
        era: "classic", "v2" or "grpo".
    """
    if name in REMOVED_ARGUMENTS:
        new = REMOVED_ARGUMENTS[name]
        return Keyword(new) if new and new != "optim" else Keyword(None if new is None else name)
    if era == "grpo":
        return _grpo_keyword(name, value)
    if name in OUTPUT_ONLY or (era == "v2" and name in ("batch_size", "mini_batch_size", "sanity_check")):
        return Keyword(None)
    if name in GONE_KEYWORDS:
        off = value in ("False", "None")
        return Keyword(None) if off else Keyword(name, f"{name}: {GONE_KEYWORDS[name]}")
    if name == "gamma" and _number(value) != 1:
        return Keyword(name, f"gamma={value}: rewards are not discounted here, so the objective differs")
    if name in CRITIC_FIELDS:
        return Keyword(None)
    if era == "classic" and name == "forward_batch_size":
        return Keyword("mini_batch_size")
    if name == "batch_size" and _number(value) == 1:
        return Keyword(name, "batch_size=1 has nothing to compare a response with; use at least 2, better 8 per prompt")
    if name not in ppo_field_names():
        return Keyword(name, f"PPOConfig has no field {name!r}")
    return Keyword(name)


def _grpo_keyword(name: str, value: str) -> Keyword:
    if name == "max_prompt_length" and value != "None":
        # The old trainer cut the start of longer prompts; our own default leaves such rows out.
        return Keyword(name, added=("overlong_prompts", '"truncate"'))
    if name in GRPO_KEYWORDS:
        new = GRPO_KEYWORDS[name]
        if new is None:
            return Keyword(None, f"{name} is dropped: TRL 1.16 has no such setting")
        return Keyword(new)
    if name not in trainer_fields():
        return Keyword(name, f"GroupRelativeConfig has no field {name!r}")
    return Keyword(name)


@functools.cache
def ppo_field_names() -> frozenset[str]:
    """Return the fields of ``PPOConfig``, read from source."""
    return frozenset(class_fields("trl_grpo_ext.compat.config", "PPOConfig"))


@functools.cache
def trl_has(module: str, name: str | None = None) -> bool:
    """Return whether the installed TRL has ``module``, and defines ``name`` in it, judged by its text.

    True where TRL is not installed: then nothing can be said against it.
    """
    try:
        module_path("trl")
    except SourceNotFoundError:
        return True
    try:
        text = module_path(module).read_text(encoding="utf-8")
    except SourceNotFoundError:
        return False
    if name is None:
        return True
    if re.search(rf"^(?:async )?(?:def|class) {name}\b|^{name}\b\s*[:=]|[\"']{name}[\"']", text, re.MULTILINE):
        return True
    imported = re.search(rf"\b{name}\b", text) is not None
    return imported or trl_has(f"{module}.{name}")


def _number(text: str) -> float | None:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return float(value) if isinstance(value, int | float) else None
