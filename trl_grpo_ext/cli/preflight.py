"""Ask the questions of ``trl_grpo_ext.preflight`` about a prepared recipe; ``train`` and ``check`` share it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_grpo_ext.cli.check import spread
from trl_grpo_ext.errors import ConfigurationError, GroupRelativeError
from trl_grpo_ext.models import load_tokenizer, resolve_model
from trl_grpo_ext.preflight.lengths import check_clipping, check_prompt_lengths, measure_longest, token_counter
from trl_grpo_ext.preflight.report import Answer
from trl_grpo_ext.preflight.steps import check_data, check_trainable
from trl_grpo_ext.preflight.template import check_template

if TYPE_CHECKING:
    from trl_grpo_ext.cli.prepare import Prepared

_PROMPTS_RENDERED = 16
_PROMPTS_PROBED = 8


class Preflight(NamedTuple):
    """The answers, and the plan that one of them stands on, if one was made."""

    answers: list[Answer]
    plan: Any = None


def run_preflight(prepared: Prepared, *, gpu_gib: float | None = None, probe: bool = False) -> Preflight:
    """Return the answers about a recipe, cheapest question first; weights are loaded for the probe only.

    Args:
        prepared: from ``prepare``.
        gpu_gib: memory of the card to plan for; None: the card that is there, if one is.
        probe: True samples a few completions from the untrained model to see whether they are cut.
    """
    recipe, rows = prepared.recipe, prepared.splits.train
    prompts = [row["prompt"] for row in rows]
    total, group = recipe.completions_per_step(int(os.environ.get("WORLD_SIZE", "1")))
    answers = [check_data(len(prompts), total, group)]
    try:
        tokenizer = _tokenizer(prepared)
        config = _model_config(prepared)
    except GroupRelativeError as error:
        return Preflight([*answers, Answer("model", "red", str(error))])
    except Exception as error:  # a hub that cannot be reached, files that cannot be read
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Preflight([*answers, Answer("model", "yellow", f"not looked at: {reason}")])
    template_kwargs = recipe.trainer.get("chat_template_kwargs") or {}
    template_answers = check_template(tokenizer, spread(prompts, _PROMPTS_RENDERED), template_kwargs)
    answers += template_answers
    answers.append(_trainable(prepared, config))
    longest = 0
    if all(answer.colour != "red" for answer in template_answers):
        counts, answer = _lengths(prepared, tokenizer, config, template_kwargs)
        longest = max(counts, default=0)
        answers.append(answer)
    fit, plan = _fit(prepared, longest, gpu_gib)
    if fit is not None:
        answers.append(fit)
    if probe:
        answers.append(_probe(prepared, tokenizer, template_kwargs))
    return Preflight(answers, plan)


def longest_prompt(prepared: Prepared) -> int:
    """Return the tokens of the longest training prompt of a recipe."""
    recipe = prepared.recipe
    template_kwargs = recipe.trainer.get("chat_template_kwargs") or {}
    counts, _ = _lengths(prepared, _tokenizer(prepared), _model_config(prepared), template_kwargs)
    return max(counts, default=1)


def _tokenizer(prepared: Prepared) -> Any:
    recipe = prepared.recipe
    return load_tokenizer(
        recipe.model.name,
        revision=recipe.model.revision,
        trust_remote_code=recipe.model.trust_remote_code,
        chat=recipe.data.chat,
    )


def _model_config(prepared: Prepared) -> Any:
    from transformers import AutoConfig

    model = prepared.recipe.model
    return AutoConfig.from_pretrained(
        resolve_model(model.name), revision=model.revision, trust_remote_code=model.trust_remote_code
    )


def _trainable(prepared: Prepared, config: Any) -> Answer:
    from trl_grpo_ext.memory.trainable import count_trainable

    recipe = prepared.recipe
    learning_rate = recipe.trainer.get("learning_rate")
    rate = 1e-6 if learning_rate is None else float(learning_rate)
    if recipe.trainer.get("adapter") or recipe.trainer.get("memory"):
        return Answer("trainable", "green", "an adapter or memory mode, asserted when the model is built")
    try:
        count = count_trainable(config, _lora(recipe.peft))
    except ConfigurationError as error:
        return Answer("trainable", "red", str(error))
    except Exception as error:  # code of the model's own that cannot be built without weights
        return Answer("trainable", "yellow", f"not counted: {error}")
    return check_trainable(count.trainable, count.total, rate)


def _lora(values: dict[str, Any] | None) -> Any:
    from trl_grpo_ext.memory.trainable import lora_config

    return None if values is None else lora_config(values)


def _lengths(
    prepared: Prepared, tokenizer: Any, config: Any, template_kwargs: dict[str, Any]
) -> tuple[list[int], Answer]:
    recipe = prepared.recipe
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text_config, "max_position_embeddings", None)
    completion = int(recipe.trainer.get("max_completion_length") or 256)
    limit = None if positions is None else positions - completion
    prompts = [row["prompt"] for row in prepared.splits.train]
    counts = measure_longest(prompts, token_counter(tokenizer, template_kwargs), limit)
    allowed = recipe.trainer.get("max_prompt_length")
    if allowed is not None:  # longer ones are dropped or cut
        counts = [min(number, int(allowed)) for number in counts]
    answer = check_prompt_lengths(counts, len(prompts), max_completion_length=completion, max_positions=positions)
    return counts, answer


def _fit(prepared: Prepared, longest_prompt: int, gpu_gib: float | None) -> tuple[Answer | None, Any]:
    """Return the planner's answer and its plan; None where there is no card to plan for or no plan."""
    import torch

    from trl_grpo_ext.preflight.fit import answer_of_plan, answer_without_plan

    if gpu_gib is None and torch.cuda.is_available():
        gpu_gib = torch.cuda.mem_get_info()[1] / 2**30
    if gpu_gib is None:
        return None, None
    from trl_grpo_ext.cli.run import trainer_config

    planner = load_planner()
    try:
        recipe = prepared.recipe
        args = trainer_config(recipe, recipe.base_dir)
        model = resolve_model(recipe.model.name)
        plan = planner.plan_memory(
            model,
            args,
            _lora(recipe.peft),
            budget_gib=gpu_gib,
            prompt_len=max(longest_prompt, 1),
            mode=planner.AS_CONFIGURED,
        )
    except Exception as error:  # a plan that cannot be made must not keep a run from starting
        return answer_without_plan(gpu_gib, error), None
    return answer_of_plan(plan, gpu_gib, str(recipe.path)), plan


def load_planner() -> Any:
    """Return the module with ``plan_memory``, which takes torch with it."""
    from trl_grpo_ext.memory import plan

    return plan


def _probe(prepared: Prepared, tokenizer: Any, template_kwargs: dict[str, Any]) -> Answer:
    """Return how many completions of the untrained model are cut, sampled as in training."""
    from trl_grpo_ext.cli.generate import SAMPLING_DEFAULTS, generate_completions
    from trl_grpo_ext.cli.run import load_policy

    recipe = prepared.recipe
    limit = int(recipe.trainer.get("max_completion_length") or 256)
    chosen = {name: recipe.trainer[name] for name in SAMPLING_DEFAULTS if recipe.trainer.get(name) is not None}
    prompts = [row["prompt"] for row in spread(prepared.splits.train, _PROMPTS_PROBED)]
    completions = generate_completions(
        load_policy(recipe, None),
        tokenizer,
        [prompt for prompt in prompts for _ in range(4)],
        max_new_tokens=limit,
        sampling=chosen,
        template_kwargs=template_kwargs,
    )
    return check_clipping(sum(completion.truncated for completion in completions), len(completions), limit)
