"""``trl-grpo plan table``: models by modes, on several cards."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, NamedTuple

MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B", "Llama-3.1-8B", "Qwen2.5-14B")
TUNINGS = ("full", "lora", "qlora-8bit", "qlora")
GIB = 2**30


class Sizes(NamedTuple):
    """The job that every model is planned for."""

    prompt: int
    completion: int
    group: int
    batch: int
    rank: int


_SHORT = {"adamw_8bit": "8-bit Adam", "paged_adamw_8bit": "paged 8-bit Adam"}


def print_table(cards: list[float], sizes: Sizes, headroom: float, as_json: bool) -> None:
    """Print, for each model, tuning and card, the process's GiB in the chosen mode and what had to be given up.

    The figures are extrapolated (tier 1), as there are many.
    """
    rows = []
    for model in MODELS:
        for tuning in TUNINGS:
            plans = [_plan(model, tuning, card, sizes, headroom) for card in cards]
            rows.append({"model": model, "tuning": tuning, "cells": [cell(plan) for plan in plans]})
    if as_json:
        print(json.dumps({"cards": cards, "rows": rows}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"process GiB; {sizes.prompt} + {sizes.completion} tokens, {sizes.batch} completions a step")
    table.add_column("model")
    table.add_column("tuning")
    for card in cards:
        table.add_column(f"{card:g} GiB")
    for row in rows:
        table.add_row(str(row["model"]), str(row["tuning"]), *row["cells"])
    console = Console()
    console.print(table)
    console.print(
        "c: gradient checkpointing; o: activations offloaded; Nk: thousands of tokens a pass; -: does not fit "
        "(with what it needs)",
        highlight=False,
        soft_wrap=True,
    )


def _plan(model: str, tuning: str, card: float, sizes: Sizes, headroom: float) -> Any:
    from trl_grpo_ext.memory.plan import plan_memory

    config = SimpleNamespace(
        memory=tuning,
        max_completion_length=sizes.completion,
        num_generations=sizes.group,
        per_device_train_batch_size=sizes.group,
        gradient_accumulation_steps=sizes.batch // sizes.group,
    )
    return plan_memory(
        model,
        config,
        {"r": sizes.rank} if tuning != "full" else None,
        budget_gib=card,
        headroom=headroom,
        prompt_len=sizes.prompt,
        tier="T1",
        with_alternatives=False,
    )


def cell(plan: Any) -> str:
    """Return a plan as the text of one cell."""
    mode = plan.mode
    if plan.fits == "no":
        return f"- {plan.process / GIB:.1f}"
    words = [f"{plan.process / GIB:.1f}"]
    letters = ("c" if mode.gradient_checkpointing else "") + ("o" if mode.activation_offload else "")
    tokens = mode.max_tokens_per_micro_batch
    words += [letters] if letters else []
    words += [f"{tokens / 1024:g}k"] if tokens and tokens != plan.job.micro_batch_tokens else []
    words += [_SHORT[mode.optim]] if mode.optim in _SHORT else []
    return " ".join(words) + (" ?" if plan.fits == "uncertain" else "")
