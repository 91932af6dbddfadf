"""The private parts of TRL that this package builds on, written down so that a change in TRL is noticed by name.

``check_seams`` compares signatures and runs in milliseconds; the tests also compare the lines that each seam relies on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trl_grpo_ext.errors import SeamError


class Seam(NamedTuple):
    """One method of ``trl.GRPOTrainer`` that is overridden or called.

    Attributes:
        name: of the method.
        parameters: that it is expected to take after ``self``, in order.
        relies_on: source text, blanks aside, without which our override is wrong.
        why: what we use it for.
    """

    name: str
    parameters: tuple[str, ...]
    relies_on: tuple[str, ...]
    why: str


SEAMS = (
    Seam(
        "__init__",
        (
            "model",
            "reward_funcs",
            "args",
            "train_dataset",
            "eval_dataset",
            "processing_class",
            "reward_processing_classes",
            "callbacks",
            "optimizers",
            "quantization_config",
            "peft_config",
            "tools",
            "rollout_func",
            "environment_factory",
        ),
        (
            "self.ref_model = create_model_from_path(get_config_model_id(self.model.config), **model_init_kwargs)",
            'model.add_adapter("ref", default_config)',
            "param.data = param.data.to(torch.bfloat16)",
        ),
        "the constructor takes TRL's arguments in TRL's order; ours gives it the reference of a loaded model, keeps or "
        "drops its copy of an adapter, and takes back its rounding of adapters",
    ),
    Seam(
        "training_step",
        ("model", "inputs", "num_items_in_batch"),
        ("self._step += 1", 'self._metrics["train"]["step_time"].append(self._current_train_step_time)'),
        "one call per micro-batch; ours collects them and runs the window with the last one",
    ),
    Seam(
        "_prepare_inputs",
        ("generation_batch",),
        (
            "generate_every = self.args.steps_per_generation * self.num_iterations",
            "if self._step % generate_every == 0 or self._buffered_inputs is None",
            "shuffle_sequence_dict(generation_batch)",
            "split_tensor_dict(generation_batch, self.args.steps_per_generation)",
            "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]",
        ),
        "gives TRL's micro-batch, rows shuffled; our extra row tensors are shuffled and split along",
    ),
    Seam(
        "_generate_and_score_completions",
        ("inputs",),
        (
            "advantages = torch.nan_to_num(advantages, nan=0.0)",
            "self.accelerator.process_index * len(prompts)",
            '"prompt_ids": prompt_ids',
            '"prompt_mask": prompt_mask',
            '"completion_ids": completion_ids',
            '"completion_mask": completion_mask',
            '"advantages": advantages',
            '"num_items_in_batch": num_items_in_batch',
            'output["old_per_token_logps"] = old_per_token_logps',
            'output["ref_per_token_logps"] = ref_per_token_logps',
            "generate_every = self.args.steps_per_generation * self.num_iterations",
            "if self.args.gradient_accumulation_steps % generate_every != 0 or (",
            "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies( self.model,",
        ),
        "returns the rows in the order of the prompts, one process's slice; we mark dead groups in it, and answer its "
        "first call for log-probabilities with the old ones",
    ),
    Seam(
        "_calculate_rewards",
        ("inputs", "prompts", "completions", "completion_ids_list"),
        ("rewards_per_func = gather(rewards_per_func)", "return rewards_per_func"),
        "returns the rewards of all processes; we test groups for equal rewards",
    ),
    Seam(
        "_tokenize_prompts",
        ("prompts",),
        ("return prompt_ids, images, multimodal_fields",),
        "one list of token ids per prompt; we drop a doubled BOS and cut over-long prompts",
    ),
    Seam(
        "_generate_single_turn",
        ("prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"),
        ("return completion_ids, logprobs",),
        "one entry of prompt_ids is one completion; we call it in slices that fit a token budget",
    ),
    Seam(
        "_get_per_token_logps_and_entropies",
        (
            "model",
            "input_ids",
            "attention_mask",
            "logits_to_keep",
            "batch_size",
            "compute_entropy",
            "compute_aux_loss",
            "pixel_values",
            "image_grid_thw",
            "num_images",
            "pixel_attention_mask",
            "spatial_shapes",
            "num_tiles",
            "image_sizes",
            "token_type_ids",
            "mm_token_type_ids",
            "image_position_ids",
        ),
        ("return logps, entropies, aux_loss",),
        "the only place where a loss reads the model; we hand it scores that were computed before",
    ),
    Seam(
        "compute_loss",
        ("model", "inputs", "return_outputs", "num_items_in_batch"),
        ("return self._compute_loss(model, inputs)",),
        "evaluated on TRL's micro-batch with our scores",
    ),
    Seam(
        "_compute_loss",
        ("model", "inputs"),
        (
            "self._get_per_token_logps_and_entropies(",
            'old_per_token_logps = inputs.get("old_per_token_logps")',
            "per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps",
            "normalizer = self.current_gradient_accumulation_steps",
            'normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes',
            "normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation",
            'self.loss_type in ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]',
            'self.loss_type in ["cispo", "dapo", "vespo"]',
        ),
        "the loss of each row depends on other rows through masks and counts only",
    ),
    Seam(
        "_load_from_checkpoint",
        ("resume_from_checkpoint", "model"),
        ("for subdir_name in adapter_subdirs", "model.set_adapter(active_adapter)"),
        "restores every adapter of a checkpoint; ours restores what the KL term is measured against",
    ),
    Seam(
        "_save_checkpoint",
        ("model", "trial"),
        ('checkpoint_folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"',),
        "lowered token budgets are written into the folder it makes",
    ),
    Seam("_load_optimizer_and_scheduler", ("checkpoint",), (), "called on resume; token budgets are read back"),
    Seam("_log_completion_extra", ("column", "values"), ("self._pending_extra_logs[column]",), "unusable calls warn"),
    Seam("_log_metric", ("name", "value"), ("self._pending_metrics[name]",), "unusable calls warn"),
)

# Read or written by us on the trainer; each is assigned in the body of the class or in __init__.
ATTRIBUTES = (
    "_buffered_inputs",
    "_current_train_step_time",
    "_entropy_bonus_enabled",
    "_is_vlm",
    "_metrics",
    "_pending_extra_logs",
    "_pending_metrics",
    "_step",
    "_tag_names",
    "aux_loss_enabled",
    "eos_token_ids",
    "beta",
    "max_completion_length",
    "multi_objective_aggregation",
    "num_generations",
    "num_iterations",
    "reward_func_names",
    "reward_weights",
    "temperature",
    "tools",
    "top_entropy_quantile",
    "use_adaptive_entropy",
    "use_transformers_continuous_batching",
    "use_vllm",
)


def parameters_of(method: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a method's parameters after ``self``; decorators with ``__wrapped__`` are seen through."""
    return tuple(inspect.signature(method).parameters)[1:]


def check_seams(trainer_class: Any = None, seams: Sequence[Seam] = SEAMS) -> None:
    """Raise if a method that we override is missing or takes other parameters.

    Args:
        trainer_class: The class to look at; ``trl.GRPOTrainer`` by default.
        seams: What is expected of it.

    Raises:
        SeamError: naming the seam, what was found, what is expected and which versions of TRL are supported.
    """
    import trl

    owner = trl.GRPOTrainer if trainer_class is None else trainer_class
    for seam in seams:
        method = getattr(owner, seam.name, None)
        where = f"{owner.__name__}.{seam.name} of TRL {trl.__version__}"
        advice = f"This package needs it because {seam.why}. Install a supported TRL: pip install 'trl>=1.16,<2'."
        if method is None:
            raise SeamError(f"{where} does not exist. {advice}")
        found = parameters_of(method)
        if found != seam.parameters:
            raise SeamError(f"{where} takes ({', '.join(found)}), expected ({', '.join(seam.parameters)}). {advice}")
