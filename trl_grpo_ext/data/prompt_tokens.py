"""What becomes of a prompt's tokens before the model sees them: one BOS, and no more than allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trl_grpo_ext.errors import DataError


def drop_doubled_bos(ids: Sequence[int], bos_token_id: int | None) -> list[int]:
    """Return the tokens with one BOS at the start where there were several.

    A prompt that was rendered with the chat template holds BOS as text, and a tokenizer that adds BOS adds another. No
    model was trained on two.
    """
    ids = list(ids)
    while bos_token_id is not None and len(ids) > 1 and ids[0] == ids[1] == bos_token_id:
        ids.pop(0)
    return ids


def shorten_prompt(prompt: Any, max_tokens: int, render: Callable[[Any], Sequence[int]], tokenizer: Any) -> Any:
    """Return the prompt, cut so that it renders to at most ``max_tokens``.

    Of a chat the start of its longest turn goes, the system's apart: questions mostly stand at the end. So every turn
    keeps its header, and the generation header ends the prompt. Of plain text the start goes.

    Args:
        prompt: text, or chat messages whose contents are texts; not changed.
        max_tokens: at least 1.
        render: returns the tokens as the model will see them.
        tokenizer: of the model.

    Raises:
        DataError: if the prompt is too long even without that turn.
    """
    length = len(render(prompt))
    if length <= max_tokens:
        return prompt
    place, text = _longest_part(prompt)
    tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    keep = len(tokens) - (length - max_tokens)
    while keep > 0:
        shorter = tokenizer.decode(tokens[-keep:])
        if place is not None:
            shorter = [{**turn, "content": shorter} if i == place else turn for i, turn in enumerate(prompt)]
        length = len(render(shorter))
        if length <= max_tokens:
            return shorter
        keep -= length - max_tokens
    raise DataError(
        f"max_prompt_length={max_tokens} is less than a prompt needs besides its longest turn ({text[:40]!r}…). Raise "
        'it, or drop such rows with overlong_prompts="drop".'
    )


def _longest_part(prompt: Any) -> tuple[int | None, str]:
    """Return the place and the text of the turn to cut; no place for plain text."""
    if isinstance(prompt, str):
        return None, prompt
    texts = {
        i: turn["content"]
        for i, turn in enumerate(prompt)
        if turn.get("role") != "system" and isinstance(turn.get("content"), str)
    }
    if not texts:
        raise DataError(
            "A chat without a text besides the system's cannot be cut to max_prompt_length; drop such rows."
        )
    place = max(texts, key=lambda i: len(texts[i]))
    return place, texts[place]
