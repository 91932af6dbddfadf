"""Score completions on packed rows where that is exact, on TRL's padded path where it is not."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import torch
from trl import GRPOTrainer

from trl_grpo_ext.learner.packing import IrregularRowsError
from trl_grpo_ext.learner.scoring import forward_is_collective, score_completions
from trl_grpo_ext.learner.support import find_disagreement, why_unsupported
from trl_grpo_ext.memory.oom import TokenBudget, Work, recover

logger = logging.getLogger(__name__)


class PackedScoringMixin(GRPOTrainer):
    """Add the shared-prefix forward to a GRPO trainer, at TRL's seam for log-probabilities and entropies."""

    args: Any
    _packed_forward_is_on = False
    _score_budget = TokenBudget("score", "max_tokens_per_micro_batch", None, max_halvings=0)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> Any:
        def score(max_tokens: int | None) -> Any:
            return self._score(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                max_tokens=max_tokens,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **multimodal,
            )

        if torch.is_grad_enabled():
            return score(None)  # memory is bounded by the micro-batch, and its caller takes back what failed

        def work() -> Work:
            is_packed = self._why_not_packed(model, input_ids.size(1), compute_aux_loss, multimodal) is None
            return _work(attention_mask, None if is_packed else batch_size or len(input_ids))

        return recover(self._score_budget, score, work)

    def _score(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *,
        max_tokens: int | None,
        batch_size: int | None,
        compute_entropy: bool,
        compute_aux_loss: bool,
        **multimodal: Any,
    ) -> Any:
        """Return what TRL's method returns, from packed rows or from TRL; ``max_tokens`` in one forward."""
        reason = self._why_not_packed(model, input_ids.size(1), compute_aux_loss, multimodal)
        if reason is None:
            try:
                scores = score_completions(
                    model,
                    input_ids,
                    attention_mask,
                    logits_to_keep,
                    temperature=self.temperature,
                    cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32,
                    compute_entropy=compute_entropy,
                    max_packed_tokens=max_tokens,
                    autocast=self._autocast,
                )
                return scores.logps_BT, scores.entropies_BT, None
            except IrregularRowsError as error:
                reason = str(error)
        if self._packed_forward_is_on:
            self._say_once(reason)
        if max_tokens is not None and not compute_aux_loss and not forward_is_collective(model):
            batch_size = min(batch_size or len(input_ids), max(max_tokens // input_ids.size(1), 1))
        return super()._get_per_token_logps_and_entropies(
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=batch_size,
            compute_entropy=compute_entropy,
            compute_aux_loss=compute_aux_loss,
            **multimodal,
        )

    def _shares_prompts(self, model: Any, max_length: int) -> bool:
        """Return whether rows of at most ``max_length`` tokens are forwarded with each distinct prompt once."""
        return self._why_not_packed(model, max_length, False, {}) is None

    def _why_not_packed(
        self, model: Any, max_length: int, compute_aux_loss: bool, multimodal: dict[str, Any]
    ) -> str | None:
        """Return why this forward must be TRL's own, or None."""
        if not self._packed_forward_is_on:
            return "shared_prefix_forward is off"
        if any(value is not None for value in multimodal.values()):
            return "images are in play"
        # A model is judged once per longest row; what no list foresees shows in a few tokens run both ways, once.
        verdicts: dict[Any, str | None] = self.__dict__.setdefault("_packed_verdicts", {})
        key = (id(model), max_length, compute_aux_loss)
        if key not in verdicts:
            verdicts[key] = why_unsupported(model, max_length=max_length, wants_router_loss=compute_aux_loss)
            if verdicts[key] is None and id(model) not in verdicts:
                verdicts[id(model)] = find_disagreement(
                    model,
                    temperature=self.temperature,
                    cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32,
                    autocast=self._autocast,
                )
        return verdicts[key] or verdicts.get(id(model))

    @property
    def _autocast(self) -> Any:
        return nullcontext if self.accelerator.mixed_precision == "no" else self.accelerator.autocast

    def _say_once(self, reason: str) -> None:
        said: set[str] = self.__dict__.setdefault("_packed_reasons_said", set())
        if reason not in said:
            said.add(reason)
            logger.warning("Scoring completions on TRL's padded path: %s.", reason)


def _work(attention_mask: torch.Tensor, padded_rows: int | None) -> Work:
    """Return the tokens that scoring a batch (B, S) holds: of packed rows, or of so many padded rows at a time."""
    if padded_rows is not None:
        width = attention_mask.size(1)
        return Work(held_tokens=padded_rows * width, row_tokens=width)
    lengths = attention_mask.sum(1)
    return Work(held_tokens=int(lengths.sum()), row_tokens=int(lengths.max()))
