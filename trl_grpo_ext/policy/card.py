"""Ask the planner for the mode that fits the card of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trl_grpo_ext.preflight.lengths import measure_longest, token_counter

# Where the data cannot be measured: a stream, or no tokenizer at hand.
_ASSUMED_PROMPT = 1024


def planner_for_card(
    model: Any, args: Any, peft_config: Any, train_dataset: Any, processing_class: Any
) -> Callable[[], Any] | None:
    """Return a function that plans this run for this process's card, or None without a CUDA card.

    Args:
        model: A name or a model; its configuration is what is planned.
        args: The configuration.
        peft_config: The adapter, or None.
        train_dataset: The longest prompt is looked for here.
        processing_class: The tokenizer, if the user gave one.
    """
    if args.device.type != "cuda":
        return None

    def plan() -> Any:
        from trl_grpo_ext.memory.plan import plan_memory

        free, _ = torch.cuda.mem_get_info(args.device)
        template_kwargs = getattr(args, "chat_template_kwargs", None)
        prompt = longest_prompt(train_dataset, processing_class, template_kwargs) or _ASSUMED_PROMPT
        return plan_memory(model, args, peft_config, budget_gib=free / 2**30, prompt_len=prompt)

    return plan


def longest_prompt(dataset: Any, tokenizer: Any, template_kwargs: Any = None) -> int | None:
    """Return the tokens of the longest prompt of a data set, or None where there is nothing to count.

    Args:
        dataset: The training data.
        tokenizer: Of the model, or a processor that holds it; images are not counted.
        template_kwargs: The trainer's ``chat_template_kwargs``.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if tokenizer is None or not hasattr(tokenizer, "apply_chat_template") or "prompt" not in _columns(dataset):
        return None
    return max(measure_longest(dataset["prompt"], token_counter(tokenizer, template_kwargs)), default=None)


def _columns(dataset: Any) -> list[str]:
    """Return the columns of a data set of known length; a stream has none to look at."""
    return list(getattr(dataset, "column_names", None) or []) if hasattr(dataset, "__len__") else []
