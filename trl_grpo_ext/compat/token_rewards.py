"""Score token ids with a reward model the way PPO did, and PPO's penalty for a missing end.

GRPO's own path decodes a completion without special tokens and tokenises it again, so EOS is missing and a model
trained on sequences that end with EOS is read at the wrong token. PPO gave the policy's own ids to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trl_grpo_ext.errors import ConfigurationError


class TrainerScored:
    """Hold a place in ``reward_funcs`` for a reward that the trainer works out itself, from ids or log-probabilities.

    It is never called; its name and its column are what TRL needs.

    Args:
        name: Under which its mean and deviation are logged.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, **_: Any) -> list[float]:
        """Refuse: only a trainer made from a PPO call knows what to put here.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"The reward {self.__name__!r} is worked out by the trainer and cannot be called.")


class MissingEosPenalty:
    """0 for a completion that holds the tokenizer's EOS, minus ``penalty`` for one without.

    A custom stop token does not count as an end, as in PPO.
    """

    def __init__(self, eos_token_id: int, penalty: float) -> None:
        self.eos_token_id, self.penalty = eos_token_id, penalty

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return one penalty per completion."""
        return [0.0 if self.eos_token_id in ids else -self.penalty for ids in completion_ids]


def check_reward_module(model: nn.Module, largest_id: int, vocabulary: str) -> None:
    """Raise unless ``model`` follows the contract of PPO's reward models and knows the policy's token ids.

    Args:
        model: Needs ``base_model_prefix``, the backbone under that name, and ``score``.
        largest_id: Largest token id that the policy's tokenizer can produce.
        vocabulary: What the ids come from, for the message.

    Raises:
        ConfigurationError: naming the missing attribute, the number of labels, or both vocabulary sizes.
    """
    prefix = getattr(model, "base_model_prefix", None)
    for name in ("base_model_prefix", prefix, "score"):
        if not name or not hasattr(model, name):
            raise ConfigurationError(
                f"The reward model {type(model).__name__} has no attribute {name or 'base_model_prefix'!r}. Load it as "
                "AutoModelForSequenceClassification, or pass a function as reward_funcs."
            )
    weight = getattr(model.score, "weight", None)
    labels = int(weight.shape[0]) if weight is not None and weight.ndim == 2 else 1
    if labels != 1:
        raise ConfigurationError(f"The reward model expects one score, got {labels} labels; load with num_labels=1.")
    rows = embedding_rows(model)
    if rows is not None and rows <= largest_id:
        raise ConfigurationError(
            f"The reward model has an embedding of {rows} rows, but the largest token id of {vocabulary} is "
            f"{largest_id}. It scores the policy's own token ids, so both need the same tokenizer; pass "
            "reward_processing_classes to score text instead."
        )


def embedding_rows(model: Any) -> int | None:
    """Return the number of rows of the input embedding, or None where the model does not say."""
    getter = getattr(model, "get_input_embeddings", None)
    if not callable(getter):
        return None
    weight = getattr(getter(), "weight", None)
    return None if weight is None else int(weight.shape[0])


@torch.no_grad()
def score_token_ids(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    *,
    rows_per_pass: int | None = None,
    stop_token_id: int | None = None,
) -> torch.Tensor:
    """Return the reward model's value at the last token of each response.

    Rows are left-padded with id 0 under a mask, positions count from the first real token, and what follows the stop
    token is left out, as TRL's PPO did.

    Args:
        model: A module that ``check_reward_module`` accepted.
        prompt_ids: B lists of token ids.
        completion_ids: B lists of token ids.
        rows_per_pass: Most rows in one forward pass; None: all.
        stop_token_id: The response is cut after its first occurrence.

    Returns:
        (B,) float32 on the model's device.
    """
    rows = [
        [*prompt, *_cut_after(completion, stop_token_id)]
        for prompt, completion in zip(prompt_ids, completion_ids, strict=True)
    ]
    device = next(model.parameters()).device
    known = embedding_rows(model)
    backbone = getattr(model, model.base_model_prefix)
    values = []
    step = rows_per_pass or max(len(rows), 1)
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        width = max(max(len(row) for row in piece), 1)
        ids = torch.tensor([[0] * (width - len(row)) + row for row in piece], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in piece], device=device)
        if known is not None:  # rows of the policy's head beyond its tokenizer: never trained, rarely sampled
            ids = ids.masked_fill(ids >= known, 0)
        output = backbone(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            return_dict=True,
            output_hidden_states=True,
            use_cache=False,
        )
        values.append(model.score(output.hidden_states[-1])[:, -1].reshape(len(piece)).float())
    return torch.cat(values)


def _cut_after(ids: Sequence[int], stop: int | None) -> list[int]:
    ids = list(ids)
    return ids[: ids.index(stop) + 1] if stop is not None and stop in ids else ids
