"""The nouns of a rollout and the protocol an engine fulfils.

Dimensions: B rows (completions asked for), M rows alive in one decode step, V vocabulary, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trl_grpo_ext.errors import ConfigurationError


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when a row stops, in the words of ``transformers.GenerationConfig``.

    Args:
        max_new_tokens: most tokens per completion, >= 1.
        do_sample: True draws, False takes the most likely token (and ignores temperature, top-k, top-p and min-p, as
            ``generate`` does).
        temperature: divides the scores, > 0.
        top_k: keep the k highest scores and their ties; 0 keeps all.
        top_p: keep the smallest set of top tokens whose mass reaches top_p; 1.0 keeps all.
        min_p: drop tokens less likely than ``min_p`` times the most likely one; None or 0 keeps all.
        repetition_penalty: > 0; divides the positive and multiplies the negative scores of tokens already in the
            prompt or completion.
        min_new_tokens: end-of-sequence tokens cannot be drawn before this many tokens.
        suppress_token_ids: tokens that are never drawn.
        eos_token_ids: any of these ends a row and is its last token. Empty: rows end by length or stop string only.
        pad_token_id: not needed by the engine (rows are never padded); kept so that the caller can pad.
        stop_strings: a row ends with the token that completes one of them; the engine then needs a tokenizer.
        row_seeds: one 64-bit integer per row. The uniforms of a row are then a function of its seed and the token's
            index alone, so its text does not depend on the batch or the budget. None draws from torch's global
            generator.

    Raises:
        ConfigurationError: for a value outside its range.
    """

    max_new_tokens: int
    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    suppress_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    stop_strings: tuple[str, ...] = ()
    row_seeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        ranges: list[tuple[str, Any, bool, str]] = [
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, self.temperature > 0, "greater than 0"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("top_p", self.top_p, 0 <= self.top_p <= 1, "between 0 and 1"),
            ("min_p", self.min_p, self.min_p is None or 0 <= self.min_p <= 1, "None or between 0 and 1"),
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "greater than 0"),
            ("min_new_tokens", self.min_new_tokens, self.min_new_tokens >= 0, "0 or more"),
        ]
        for name, value, ok, allowed in ranges:
            if not ok:
                raise ConfigurationError(f"{name}={value!r} cannot be used for sampling; it must be {allowed}.")

    @property
    def needs_filter(self) -> bool:
        """Whether drawing uses anything beyond a softmax of scores divided by the temperature."""
        warped = self.top_k > 0 or self.top_p < 1.0 or bool(self.min_p)
        return (warped and self.do_sample) or self.changes_scores

    @property
    def changes_scores(self) -> bool:
        """Whether scores are edited before the temperature: these edits also apply to greedy decoding."""
        return self.repetition_penalty != 1.0 or self.min_new_tokens > 0 or bool(self.suppress_token_ids)

    @classmethod
    def from_generation_settings(
        cls, settings: Mapping[str, Any], row_seeds: Sequence[int] | None = None
    ) -> SamplingParams:
        """Return the parameters in ``settings``, the merged result of ``support.merged_generation_settings``.

        Settings that are not sampling parameters are left for ``support.why_unsupported`` to judge.
        """
        eos = settings.get("eos_token_id")
        eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        stop = settings.get("stop_strings") or ()
        return cls(
            max_new_tokens=int(settings.get("max_new_tokens") or 0),
            do_sample=bool(settings.get("do_sample")),
            temperature=float(_or(settings.get("temperature"), 1.0)),
            top_k=int(_or(settings.get("top_k"), 0)),
            top_p=float(_or(settings.get("top_p"), 1.0)),
            min_p=settings.get("min_p"),
            repetition_penalty=float(_or(settings.get("repetition_penalty"), 1.0)),
            min_new_tokens=int(settings.get("min_new_tokens") or 0),
            suppress_token_ids=tuple(settings.get("suppress_tokens") or ()),
            eos_token_ids=tuple(int(token) for token in eos_ids),
            pad_token_id=settings.get("pad_token_id"),
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
            row_seeds=None if row_seeds is None else tuple(int(seed) for seed in row_seeds),
        )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


@dataclass(frozen=True)
class RolloutProgress:
    """Where a running rollout stands: rows and completion tokens so far, seconds since it began."""

    num_rows_done: int
    num_rows: int
    num_tokens: int
    elapsed_s: float


ProgressCallback = Callable[[RolloutProgress], None]


@dataclass
class RolloutStats:
    """What a rollout cost. Seconds are wall-clock.

    ``prompt_tokens`` counts each distinct prompt once, ``prompt_tokens_padded_rows`` what one row per completion
    would have cost. ``row_steps`` is the sum over decode steps of the rows alive; ``num_tokens`` the completion tokens
    returned. ``peak_kv_tokens`` is the largest number of token slots (prompt + completion) held at once.
    """

    num_rows: int = 0
    num_prompts: int = 0
    num_tokens: int = 0
    prompt_tokens: int = 0
    prompt_tokens_padded_rows: int = 0
    decode_steps: int = 0
    row_steps: int = 0
    num_admissions: int = 0
    peak_kv_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prepare_s: float = 0.0
    decoder: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RolloutBatch:
    """Completions in the order of the prompts given.

    Attributes:
        completion_ids: per row the drawn tokens, the ending token included; never padded, never empty.
        logprobs: per row and token the log-probability under the policy at the sampling temperature:
            ``log_softmax(logits / temperature)`` over the whole vocabulary, before top-k, top-p, min-p and penalties.
            That is what TRL's ``_get_per_token_logps_and_entropies`` computes for old log-probabilities. None unless
            asked for.
        stats: what the rollout cost.
    """

    completion_ids: list[list[int]]
    logprobs: list[list[float]] | None
    stats: RolloutStats


class RolloutEngine(Protocol):
    """Anything that turns prompts into completions."""

    def why_unsupported(
        self, model: Any, params: SamplingParams, generation_kwargs: Mapping[str, Any] | None = None
    ) -> str | None:
        """Return why this engine must not be used for the call, or None when it gives what ``generate`` would."""
        ...

    def generate(
        self,
        model: Any,
        prompt_ids: list[list[int]],
        params: SamplingParams,
        *,
        max_tokens: int | None = None,
        return_logprobs: bool = False,
        progress: ProgressCallback | None = None,
    ) -> RolloutBatch:
        """Return one completion per entry of ``prompt_ids``, in order."""
        ...
