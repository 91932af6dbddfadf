"""The sizes of a GRPO run that decide its memory, read from a config, and how the engines cut them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.learner.micro_batches import Row, num_tokens, plan_generation_batches, plan_micro_batches


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one optimiser step has to get through on one device.

    Attributes:
        prompt_tokens: Longest prompt.
        completion_tokens: Longest completion.
        num_generations: Completions of a prompt.
        num_completions: Completions of an optimiser step.
        rows_per_pass: TRL's micro-batch, used where ``micro_batch_tokens`` is 0.
        micro_batch_tokens: Budget of a forward and backward; 0: none.
        generation_tokens: Budget of sampling; 0: none.
        shares_prompts: Whether a group's prompt is forwarded once.
        uses_vllm: Whether vLLM samples on the same card.
        vllm_share: Its part of the card, as configured.
        has_kl: Whether a KL term needs a reference.
        autocast: dtype of mixed precision, or None.
        clips_gradients: Whether the gradient's norm is limited.
        rank: Of the adapter, for the bound.
    """

    prompt_tokens: int
    completion_tokens: int
    num_generations: int = 8
    num_completions: int = 8
    rows_per_pass: int = 8
    micro_batch_tokens: int = 4096
    generation_tokens: int = 32768
    shares_prompts: bool = True
    uses_vllm: bool = False
    vllm_share: float = 0.3
    has_kl: bool = False
    autocast: str | None = "bfloat16"
    clips_gradients: bool = True
    rank: int = 16

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "completion_tokens", "num_generations", "num_completions", "rows_per_pass"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_completions % self.num_generations:
            raise ConfigurationError(
                f"{self.num_completions} completions per step cannot be cut into groups of {self.num_generations}; "
                "make the first a multiple of the second"
            )

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.prompt_tokens + self.completion_tokens

    def largest_pass(self, micro_batch_tokens: int) -> tuple[tuple[int, ...], int]:
        """Return the completions of each prompt in the largest forward pass, and the number of passes."""
        size = self.num_generations
        if micro_batch_tokens == 0:
            rows = min(self.rows_per_pass, self.num_completions)
            return _by_group(rows, size), -(-self.num_completions // rows)
        rows_ = [Row(0, n, n // size, self.prompt_tokens, self.completion_tokens) for n in range(self.num_completions)]
        passes = plan_micro_batches(rows_, micro_batch_tokens, shared_prompts=self.shares_prompts)
        largest = max(passes, key=lambda part: num_tokens(part, shared_prompts=self.shares_prompts))
        counts: dict[int, int] = {}
        for row in largest:
            counts[row.group] = counts.get(row.group, 0) + 1
        return tuple(sorted(counts.values(), reverse=True)), len(passes)

    def generation_batch(self, generation_tokens: int) -> tuple[tuple[int, ...], int]:
        """Return the completions of each prompt that are sampled at once, and how often that happens."""
        size, total = self.num_generations, self.num_completions
        if generation_tokens == 0:
            return _by_group(total, size), 1
        if self.shares_prompts:  # our engine: the prompt's keys are kept once
            group = self.prompt_tokens + size * self.completion_tokens
            whole = min(generation_tokens // group, total // size)
            if whole:
                return (size,) * whole, -(-(total // size) // whole)
            rows = max((generation_tokens - self.prompt_tokens) // self.completion_tokens, 1)
            return (rows,), -(-total // rows)
        slices = plan_generation_batches([self.prompt_tokens] * total, self.completion_tokens, size, generation_tokens)
        rows = max(part.stop - part.start for part in slices)
        return _by_group(rows, size), len(slices)


def _by_group(rows: int, size: int) -> tuple[int, ...]:
    return (size,) * (rows // size) + ((rows % size,) if rows % size else ())


def job_of(config: Any, *, prompt_tokens: int, rank: int = 16, engine: str = "auto", automatic: Any = None) -> Job:
    """Return the sizes in a ``GRPOConfig``, ours or TRL's; anything with its fields will do.

    Args:
        config: the settings of the run.
        prompt_tokens: the longest prompt, which no setting states.
        rank: of the adapter.
        engine: "vllm" or "transformers" overrides the config.
        automatic: the token budgets that stand for None: (micro-batch, generation).
    """
    micro, sampling = automatic or (4096, 32768)

    def value(name: str, default: Any) -> Any:
        found = getattr(config, name, None)
        return default if found is None else found

    per_device = int(value("per_device_train_batch_size", 8))
    accumulation = int(value("gradient_accumulation_steps", 1))
    wants_vllm = bool(value("use_vllm", False)) and value("vllm_mode", "colocate") == "colocate"
    # accelerate casts to bfloat16 unless the run says otherwise; a run on the CPU is planned for the card to come.
    autocast = "float16" if value("fp16", False) else ("bfloat16" if value("bf16", True) else None)
    return Job(
        prompt_tokens=prompt_tokens,
        completion_tokens=int(value("max_completion_length", 256)),
        num_generations=int(value("num_generations", 8)),
        num_completions=per_device * accumulation,
        rows_per_pass=per_device,
        micro_batch_tokens=int(value("max_tokens_per_micro_batch", micro)),
        generation_tokens=int(value("max_tokens_per_generation_batch", sampling)),
        shares_prompts=bool(value("shared_prefix_forward", True)),
        uses_vllm=wants_vllm if engine == "auto" else engine == "vllm",
        vllm_share=float(value("vllm_gpu_memory_utilization", 0.3)),
        has_kl=float(value("beta", 0.0)) > 0,
        autocast=autocast,
        clips_gradients=float(value("max_grad_norm", 1.0)) > 0,
        rank=rank,
    )
