"""Use the log-probabilities that the engine saw while sampling as the old ones of the loss, instead of a forward pass.

Dimensions: B rows, T completion tokens.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from trl import GRPOTrainer

from trl_grpo_ext.learner.support import find_absolute_positions
from trl_grpo_ext.rollout.engine import SamplingParams

logger = logging.getLogger(__name__)

# Mean difference per token between two ways to compute the same rows that is rounding and nothing else. For a model of
# 135M parameters it is 8e-6 in float32 and 0.02 in bfloat16 (docs/engine_rollout.md); deeper ones round more often.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}
_ROUNDING_IN_HALF = 0.1


class SampledLogpsMixin(GRPOTrainer):
    """Answer TRL's question for the old log-probabilities with those of the rollout engine.

    TRL asks when a completion is trained on by more than the optimiser step that follows its sampling. What the engine
    returns is the same quantity: ``log_softmax(logits / temperature)`` of the policy that sampled, before top-k, top-p
    and penalties. The first rollout is computed both ways and compared. Comes before the classes that score, in the
    order of bases.
    """

    args: Any
    model: Any
    _old_logps_from_rollout = False
    _sampled_logps: list[list[float]] | None = None
    _sampled_logps_agree: bool | None = None

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        generate_every = self.args.steps_per_generation * self.num_iterations
        trl_asks = self.args.gradient_accumulation_steps % generate_every != 0
        if self._old_logps_from_rollout and trl_asks and self._sampled_logps_agree is not False:
            self._sampled_logps = []  # the engine's calls of this rollout add to it, in the order of the rows
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self._sampled_logps = None

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kw: Any,
    ) -> Any:
        # TRL asks for the old ones before any others of a rollout, so the list serves once. It is short where a call of
        # the engine fell back to `generate`.
        sampled, self._sampled_logps = self._sampled_logps, None
        usable = bool(sampled) and len(sampled or ()) == input_ids.size(0) and model is self.model
        if usable and self._sampled_logps_agree:
            return _padded(sampled or [], logits_to_keep, input_ids.device), None, None
        output = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kw
        )
        if usable:
            logps_BT = _padded(sampled or [], logits_to_keep, input_ids.device)
            self._compare(logps_BT, output[0], attention_mask[:, -logits_to_keep:])
        return output

    def _compare(self, sampled_BT: torch.Tensor, scored_BT: torch.Tensor, mask_BT: torch.Tensor) -> None:
        """Decide, once, whether the two agree but for rounding."""
        gap = (sampled_BT - scored_BT.float()).abs()[mask_BT.bool()].mean().item()
        dtype = torch.bfloat16 if self.accelerator.mixed_precision != "no" else self.model.dtype
        limit = _ROUNDING.get(dtype, _ROUNDING_IN_HALF)
        self._sampled_logps_agree = gap <= limit
        if not self._sampled_logps_agree:
            self._say_why_forward(
                f"they differ from it by {gap:.2g} per token on average, more than rounding does ({limit:g})"
            )

    def _wants_sampled_logps(self, model: Any, params: SamplingParams) -> bool:
        """Return whether this rollout should give log-probabilities, and say once why not where they would not do."""
        if self._sampled_logps is None:
            return False
        reason = self._why_not_sampled(model, params)
        if reason is not None:
            self._say_why_forward(reason)
        return reason is None

    def _why_not_sampled(self, model: Any, params: SamplingParams) -> str | None:
        if self.tools:
            return "tools write a part of each completion"
        if not params.do_sample or params.temperature != self.temperature:
            drawn = f"at temperature {params.temperature:g}" if params.do_sample else "greedily"
            return f"completions are sampled {drawn} and scored at {self.temperature:g}"
        name = find_absolute_positions(model)
        if name is not None:
            return f"{name} holds absolute positions, which TRL's forward counts from the padding"
        return None

    def _say_why_forward(self, reason: str) -> None:
        said: set[str] = self.__dict__.setdefault("_forward_reasons_said", set())
        if reason not in said:
            said.add(reason)
            logger.warning("Old log-probabilities from a forward pass, not from sampling: %s.", reason)


def _padded(rows: list[list[float]], width: int, device: Any) -> torch.Tensor:
    """Return (B, ``width``) float32; 0 behind the end of a row, where nothing reads it."""
    padded_BT = torch.zeros(len(rows), width)
    for index, row in enumerate(rows):
        padded_BT[index, : len(row)] = torch.tensor(row)
    return padded_BT.to(device)
