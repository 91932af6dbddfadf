"""Forward and backward over one window of rollouts, in micro-batches of our choice, with TRL's gradient."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers.training_args import OptimizerNames

from trl_grpo_ext.learner.micro_batches import Row, plan_micro_batches
from trl_grpo_ext.learner.packed_step import PackedScoringMixin
from trl_grpo_ext.learner.window import RolloutWindow, Scores
from trl_grpo_ext.learner.window_retry import (
    FailedPass,
    Pass,
    WindowStart,
    agree_on_budget,
    sync_buffers_in_next_forward,
)
from trl_grpo_ext.memory.oom import TokenBudget, first_line, is_out_of_memory


class LocalAccelerator:
    """See an accelerator without its collectives, so that ranks may evaluate a loss a different number of times."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``."""
        return tensor

    def gather_for_metrics(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``."""
        return tensor

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        """Return ``tensor``; ``reduction`` has nothing to act on."""
        return tensor


class WindowStepMixin(PackedScoringMixin):
    """Add :meth:`_run_window` to a GRPO trainer.

    ``compute_loss`` of TRL runs unchanged on TRL's own micro-batches; log-probabilities reach it through the
    ``_get_per_token_logps_and_entropies`` seam.
    """

    model: Any
    optimizer: Any
    _given_scores: Scores | None = None

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._given_scores is not None:
            return self._given_scores.logps, self._given_scores.entropies, None
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _run_window(self, model: torch.nn.Module, window: RolloutWindow, budget: TokenBudget) -> torch.Tensor:
        """Accumulate the gradient of every row of ``window`` and return the loss TRL would report for it.

        When memory runs out, every process takes the whole window back and does it again with a lower budget.

        Args:
            model: The wrapped policy.
            window: All micro-batches of the optimiser step on this process.
            budget: Tokens of one forward pass.

        Returns:
            Scalar without gradient: the sum of TRL's micro-batch losses.

        Raises:
            MemoryBudgetError: if memory runs out and no smaller pass is left to try.
        """
        alive, dead = window.rows()
        shortest = min(alive + dead, key=lambda row: row.prompt_tokens + row.completion_tokens)
        longest = max(batch["prompt_ids"].size(1) + batch["completion_ids"].size(1) for batch in window.batches)
        shared_prompts = self._shares_prompts(model, longest)
        start = WindowStart(model) if budget.can_recover else None
        syncs_apart = start is not None and self.accelerator.num_processes > 1
        while True:
            assert budget.max_tokens is not None, "there is no window without a budget"
            plan = plan_micro_batches(alive, budget.max_tokens, shared_prompts=shared_prompts)
            # Every process runs the same number of passes: sharded models gather parameters in each of them. At least
            # one, so that gradients exist (and are zero) where every group is dead, as they do in TRL.
            num_passes = self._max_over_processes(len(plan))
            passes = [Pass(rows, True) for rows in plan] + [Pass([shortest], False)] * (num_passes - len(plan))
            if not passes and not syncs_apart:
                passes = [Pass([shortest], False)]
            failed = self._make_passes(model, window, passes, syncs=not syncs_apart, recovers=start is not None)
            if start is None:
                break
            tokens = agree_on_budget(failed, passes, budget, self.accelerator, shared_prompts=shared_prompts)
            if tokens is None:
                break
            start.return_to(window)
            budget.lower(tokens, "on another process" if failed is None else failed.cause)
        if syncs_apart:
            self._sync_gradients(model, window, shortest)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self._reported_loss(model, window)
            self._report(model, window, alive, dead, max(num_passes, 1))
        return loss

    def _make_passes(
        self, model: torch.nn.Module, window: RolloutWindow, passes: Sequence[Pass], *, syncs: bool, recovers: bool
    ) -> FailedPass | None:
        """Run forward and backward of every pass; return the one that ran out of memory, or None.

        Args:
            model: The wrapped policy.
            window: Holds the rows.
            passes: What to forward.
            syncs: True lets gradients travel between processes in the last pass, False in none.
            recovers: False raises when memory runs out.
        """
        if not syncs:
            sync_buffers_in_next_forward(model, False)
        for number, (rows, counts) in enumerate(passes):
            is_last = syncs and number == len(passes) - 1
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            try:
                with self._sync_context(model, is_last), self.compute_loss_context_manager():
                    if counts:
                        loss = self._micro_batch_loss(model, window, rows)
                    else:
                        loss = self._forward(model, window, rows).logps.sum() * 0.0
                    self._backward(loss)
            except Exception as error:
                if not recovers or not is_out_of_memory(error):
                    raise
                return FailedPass(rows, first_line(error))
        return None

    def _sync_gradients(self, model: torch.nn.Module, window: RolloutWindow, row: Row) -> None:
        """Let gradients travel between processes, in a pass of two tokens of ``row`` whose loss is zero."""
        sync_buffers_in_next_forward(model, True)
        two_tokens = Pass([row._replace(prompt_tokens=1, completion_tokens=1)], counts=False)
        self._make_passes(model, window, [two_tokens], syncs=True, recovers=False)

    def _micro_batch_loss(self, model: torch.nn.Module, window: RolloutWindow, rows: Sequence[Row]) -> torch.Tensor:
        """Return a scalar whose gradient is that of the window's loss with respect to the scores of ``rows``."""
        scores = self._forward(model, window, rows)
        window.keep(rows, scores)
        numbers = sorted({row.batch for row in rows})
        losses = [self._loss_apart(model, window, n, window.scores_with(n, rows, scores)) for n in numbers]
        return torch.stack(losses).sum()

    def _forward(self, model: torch.nn.Module, window: RolloutWindow, rows: Sequence[Row]) -> Scores:
        batch = window.select(rows)
        logps, entropies, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            compute_entropy=True,
        )
        return Scores(logps, entropies)

    def _reported_loss(self, model: torch.nn.Module, window: RolloutWindow) -> torch.Tensor:
        losses = [self._loss_apart(model, window, n, window.known(n)) for n in range(len(window.batches))]
        return torch.stack(losses).sum().detach()

    def _report(
        self, model: torch.nn.Module, window: RolloutWindow, alive: Sequence[Row], dead: Sequence[Row], num_passes: int
    ) -> None:
        """Add TRL's metrics, taken once over all forwarded rows of the window, and say on what share they stand."""
        batch, scores = window.union(skipped=dead)
        before = {name: len(values) for name, values in self._metrics["train"].items()}
        with self._scores_given(scores):
            self.compute_loss(model, batch)
        tokens = [sum(row.completion_tokens for row in rows) for rows in (alive, [*alive, *dead])]
        scored, total = self.accelerator.reduce(torch.tensor(tokens, device=scores.logps.device)).tolist()
        metrics = self._metrics["train"]
        if scored == 0:  # nothing was forwarded: TRL's means over no token read 0, which would be a false figure
            for name in list(metrics):
                del metrics[name][before.get(name, 0) :]
                if not metrics[name]:
                    del metrics[name]
        metrics["window/scored_token_share"].append(scored / max(total, 1))
        metrics["window/micro_batches"].append(float(num_passes))

    def _loss_apart(self, model: torch.nn.Module, window: RolloutWindow, number: int, scores: Scores) -> torch.Tensor:
        """Return TRL's loss of its micro-batch ``number`` on given scores, with no effect on metrics or other ranks."""
        metrics, accelerator = self._metrics, self.accelerator
        self._metrics = {mode: defaultdict(list) for mode in metrics}
        self.current_gradient_accumulation_steps = window.accumulation_steps[number]
        if accelerator.num_processes > 1:
            self.accelerator = LocalAccelerator(accelerator)
        try:
            with self._scores_given(scores):
                return self.compute_loss(model, window.batches[number])
        finally:
            self._metrics, self.accelerator = metrics, accelerator

    @contextlib.contextmanager
    def _scores_given(self, scores: Scores) -> Iterator[None]:
        self._given_scores = scores
        try:
            yield
        finally:
            self._given_scores = None

    def _backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass the way ``transformers.Trainer.training_step`` does."""
        kwargs: dict[str, Any] = {}
        if self.args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
            kwargs["learning_rate"] = self._get_learning_rate()
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            kwargs["scale_wrt_gas"] = False
        self.accelerator.backward(loss, **kwargs)

    def _sync_context(self, model: torch.nn.Module, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context of one pass: gradients travel between processes in the last one only."""
        if (
            is_last
            or self.accelerator.distributed_type == DistributedType.DEEPSPEED
            or self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        ):
            return contextlib.nullcontext()
        if getattr(self, "is_distributed_loading_by_transformers", False):
            return self._defer_fsdp_gradient_reduction()
        return functools.partial(self.accelerator.no_sync, model=model)()

    def _max_over_processes(self, value: int) -> int:
        if self.accelerator.num_processes == 1:
            return value
        return int(self.accelerator.gather(torch.tensor([value], device=self.accelerator.device)).max())
