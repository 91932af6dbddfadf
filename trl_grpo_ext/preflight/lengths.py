"""Do prompts and completions fit the model, and are completions cut?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trl_grpo_ext.preflight.report import Answer

# Prompts are measured from the longest text down; after so many in a row that fit, no later one is taken for longer.
_ENOUGH_THAT_FIT = 32


def token_counter(tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> Callable[[Any], int]:
    """Return a function that counts the tokens of a prompt, text or chat, as the trainer renders it.

    Args:
        tokenizer: of the model.
        template_kwargs: the trainer's ``chat_template_kwargs``.
    """

    def count(prompt: Any) -> int:
        if isinstance(prompt, str):
            return len(tokenizer(prompt)["input_ids"])
        kwargs = template_kwargs or {}
        return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **kwargs))

    return count


def measure_longest(prompts: Iterable[Any], count_tokens: Callable[[Any], int], limit: int | None = None) -> list[int]:
    """Return the token counts of the longest prompts by text, longest text first, as far as needed to know the limit.

    Args:
        prompts: all of the data's.
        count_tokens: of one prompt.
        limit: prompts above it are all counted; None for no limit.
    """
    counts: list[int] = []
    fitting = 0
    for prompt in sorted(prompts, key=_num_characters, reverse=True):
        counts.append(count_tokens(prompt))
        fitting = 0 if limit is not None and counts[-1] > limit else fitting + 1
        if fitting >= _ENOUGH_THAT_FIT:
            break
    return counts


def check_prompt_lengths(
    counts: Sequence[int], num_prompts: int, *, max_completion_length: int, max_positions: int | None
) -> Answer:
    """Return whether the longest prompts and their completions stay within the model's positions.

    Args:
        counts: tokens of the longest prompts, at least of all that are too long.
        num_prompts: of the data.
        max_completion_length: most tokens sampled.
        max_positions: of the model; None where it states none.
    """
    longest = max(counts, default=0)
    if max_positions is None:
        return Answer("prompt lengths", "green", f"longest {longest} tokens; the model states no limit")
    if max_completion_length >= max_positions:
        return Answer(
            "prompt lengths",
            "red",
            f"max_completion_length={max_completion_length} alone fills the model's {max_positions} positions",
            f"Lower it below {max_positions - longest}",
        )
    room = max_positions - max_completion_length
    too_long = sum(count > room for count in counts)
    beyond = sum(count >= max_positions for count in counts)
    if not too_long:
        share = f"{longest} + {max_completion_length} of {max_positions} positions"
        return Answer("prompt lengths", "green", f"longest {longest} tokens; with its completion {share}")
    return Answer(
        "prompt lengths",
        "red" if beyond else "yellow",
        f"{too_long} of {num_prompts} prompts are longer than {room} tokens (longest {longest}), so that prompt and "
        f"completion exceed the model's {max_positions} positions",
        f"trainer.max_prompt_length={room} drops them (overlong_prompts=truncate cuts them)",
    )


def check_clipping(num_cut: int, num_probed: int, max_completion_length: int) -> Answer:
    """Return whether the base model's completions end by themselves.

    Cut completions get the reward of their first part, mostly none, and pull towards short answers or nothing at all.
    """
    share = num_cut / max(num_probed, 1)
    finding = (
        f"{num_cut} of {num_probed} completions of the untrained model are cut off at "
        f"max_completion_length={max_completion_length}"
    )
    if share <= 0.2:
        return Answer("completions cut", "green", finding)
    return Answer(
        "completions cut",
        "red" if share > 0.9 else "yellow",
        finding,
        "Raise max_completion_length, or ask for short answers in the prompt",
    )


def _num_characters(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(turn.get("content"))) for turn in prompt)
