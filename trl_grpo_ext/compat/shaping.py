"""What PPO put between sampling and the loss: ids fed unchanged, scores on token ids, the KL penalty in the reward.

Dimensions: ``B`` rows of this process, ``T`` completion tokens, ``N`` rows of all processes, ``K`` reward columns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from trl_grpo_ext.compat.kl import FixedKLController, summed_kl
from trl_grpo_ext.compat.reference import has_output_head, is_peft, logps_from_logits
from trl_grpo_ext.compat.sampling import left_padded, right_padded
from trl_grpo_ext.compat.setup import PPOSetup
from trl_grpo_ext.compat.token_rewards import TrainerScored, score_token_ids
from trl_grpo_ext.trainer import GroupRelativeTrainer


class SampledBatch(NamedTuple):
    """The token ids of one generation on this process; ``tool_mask`` is 0 for tokens that the policy did not write."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None


class PolicyMove(NamedTuple):
    """How far the policy stands from where it sampled, averaged over the tokens of one loss."""

    ratio: float
    approx_kl: float
    policy_kl: float


class Forwarded(NamedTuple):
    """Inputs and log-probabilities (B, T) of the policy that sampled a batch."""

    logps: torch.Tensor
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    mask: torch.Tensor


class RewardShapingMixin(GroupRelativeTrainer):
    """Add PPO's rewards to the trainer; every hook calls the trainer's own first and works on its result."""

    args: Any
    state: Any
    processing_class: Any
    eval_dataset: Any
    num_generations: Any
    _ppo: PPOSetup
    kl_ctl: FixedKLController
    ref_model: Any
    _sampled: SampledBatch | None = None
    _given_prompt_ids: list[list[int]] | None = None
    _forwarded: Forwarded | None = None
    _last_logps: torch.Tensor | None = None
    _last_move = PolicyMove(1.0, 0.0, 0.0)
    _wants_kl = True
    _began_at = 0.0

    def _tokenize_prompts(self, prompts: list) -> Any:
        if self._given_prompt_ids is not None:
            return self._given_prompt_ids, None, {}
        return super()._tokenize_prompts(prompts)

    def _generate(self, prompts: list) -> Any:
        output = super()._generate(prompts)
        self._sampled = SampledBatch(output[0], output[1], output[2])
        return output

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: dict[str, Any],
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        rows = self._ppo.settings.rollout_rows
        whole = self.use_vllm or self.use_transformers_continuous_batching or images is not None or multimodal_fields
        if not rows or whole or len(prompt_ids) <= rows:
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )
        # PPO's local_rollout_forward_batch_size; whole groups, so that an engine may share a prompt's cache
        rows = max(rows // num_generations, 1) * num_generations
        completions: list[list[int]] = []
        for start in range(0, len(prompt_ids), rows):
            ids, _ = super()._generate_single_turn(prompt_ids[start : start + rows], None, {}, num_generations)
            completions.extend(ids)
        return completions, None

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        ids = [row.get("input_ids") for row in inputs]
        if any(row is not None for row in ids):
            self._given_prompt_ids = [
                list(row) if row is not None else self.processing_class(text=inputs[index]["prompt"])["input_ids"]
                for index, row in enumerate(ids)
            ]
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self._given_prompt_ids = self._forwarded = self._sampled = None

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
        rows = self._ppo.settings.rollout_rows
        if rows and batch_size is not None and not torch.is_grad_enabled():
            batch_size = rows
        output = super()._get_per_token_logps_and_entropies(
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=batch_size,
            compute_entropy=compute_entropy,
            compute_aux_loss=compute_aux_loss,
            **multimodal,
        )
        self._last_logps = output[0].detach()
        if self._sampled is not None and self._forwarded is None and model is self.model:
            # TRL scored the sampled batch itself, which saves a pass of ours
            mask = attention_mask[:, -logits_to_keep:]
            self._forwarded = Forwarded(self._last_logps, input_ids, attention_mask, mask)
        return output

    def _reward_functions(self) -> list[int]:
        """Leave out what the trainer works out itself: no worker has to know it."""
        return [i for i in super()._reward_functions() if not isinstance(self.reward_funcs[i], TrainerScored)]

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        own = self._own_rewards(completion_ids_list)
        called = [i for i in range(len(self.reward_funcs)) if i not in own]
        made_of = given = None
        if called:
            with self._only_rewards(called):
                made_of = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
                given = self._given_rewards
        rewards_NK = _columns(own, called, made_of)
        # Dead groups are found on these: a KL penalty tells equal scores apart.
        self._rewards_per_func = rewards_NK
        self._given_rewards = rewards_NK if given is made_of else _columns(own, called, given)
        self._report_scores(rewards_NK, completion_ids_list)
        return rewards_NK

    def _own_rewards(self, completion_ids: Sequence[Sequence[int]]) -> dict[int, torch.Tensor]:
        """Return the columns (N,) that need ids or log-probabilities: reward models, missing ends, the KL penalty."""
        assert self._sampled is not None
        device = self.accelerator.device
        columns: dict[int, torch.Tensor] = {}
        for column, module in self._ppo.token_rewards.items():
            scores = score_token_ids(
                self.accelerator.unwrap_model(module),
                self._sampled.prompt_ids,
                completion_ids,
                rows_per_pass=self._ppo.settings.rollout_rows,
                stop_token_id=self._ppo.settings.stop_token_id,
            )
            columns[column] = gather(scores.to(device))
        if self._ppo.eos_penalty is not None:
            column, penalty = self._ppo.eos_penalty
            columns[column] = gather(torch.tensor(penalty(completion_ids), device=device))
        if self._ppo.kl_column is not None:
            nothing = torch.zeros(len(completion_ids) * self.accelerator.num_processes, device=device)
            columns[self._ppo.kl_column] = self._kl_penalty() if self._wants_kl else nothing
        return columns

    def _kl_penalty(self) -> torch.Tensor:
        kl_N, entropy_N = self._kl_of_sampled_batch()
        penalty_N = -self.kl_ctl.value * kl_N
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["objective/kl"].append(kl_N.mean().item())
        metrics["objective/entropy"].append(entropy_N.mean().item())
        metrics["objective/non_score_reward"].append(penalty_N.mean().item())
        return penalty_N

    def _kl_of_sampled_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return KL to the reference and minus the summed log-probability, both (N,), of the batch just sampled."""
        assert self._sampled is not None
        device = self.accelerator.device
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            if self._forwarded is None:
                pad = self._tokenizer.pad_token_id
                prompt_ids, prompt_mask = left_padded(self._sampled.prompt_ids, pad, device)
                ids, mask = right_padded(self._sampled.completion_ids, pad, device)
                self._get_per_token_logps_and_entropies(
                    self.model,
                    torch.cat([prompt_ids, ids], dim=1),
                    torch.cat([prompt_mask, mask], dim=1),
                    ids.size(1),
                    batch_size=self._no_grad_rows,
                )
            assert self._forwarded is not None
            logps, input_ids, attention_mask, mask = self._forwarded
            reference = self._reference_logps(input_ids, attention_mask, logps.size(1))
            if self._sampled.tool_mask is not None:
                written, _ = right_padded(self._sampled.tool_mask, 0, device)
                mask = mask * torch.nn.functional.pad(written, (0, mask.size(1) - written.size(1)))
            kl = summed_kl(logps, reference, mask, self._ppo.settings.kl_estimator)
            entropy = -(logps.float() * mask).sum(dim=1)
        return gather(kl), gather(entropy)

    @property
    def _no_grad_rows(self) -> int:
        return self._ppo.settings.rollout_rows or self.args.per_device_train_batch_size

    def _reference_logps(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the reference's log-probabilities (B, T) of the last ``num_tokens`` tokens, without gradient."""
        keep = self._last_logps
        try:
            with torch.no_grad():
                if self.ref_model is None:
                    policy = self.accelerator.unwrap_model(self.model)
                    with use_adapter(policy, self._ppo.settings.ref_adapter_name):
                        return self._get_per_token_logps_and_entropies(
                            self.model, input_ids, attention_mask, num_tokens, batch_size=self._no_grad_rows
                        )[0]
                bare = self.accelerator.unwrap_model(self.ref_model)
                if not has_output_head(bare.get_base_model() if is_peft(bare) else bare):
                    return logps_from_logits(
                        self.ref_model,
                        input_ids,
                        attention_mask,
                        num_tokens,
                        temperature=self.temperature,
                        rows_per_pass=self._no_grad_rows,
                    )
                return self._get_per_token_logps_and_entropies(
                    self.ref_model, input_ids, attention_mask, num_tokens, batch_size=self._no_grad_rows
                )[0]
        finally:
            self._last_logps = keep

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        self._last_move = self._policy_move(inputs)
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["val/ratio"].append(self._last_move.ratio)
        metrics["policy/approxkl_avg"].append(self._last_move.approx_kl)
        return loss

    # The loss is TRL's and looks only at the scores it is handed, so the window may go on evaluating it piece by piece.
    _compute_loss.keeps_window = True  # type: ignore[attr-defined]

    def _policy_move(self, inputs: Any) -> PolicyMove:
        """Return mean ratio, half the mean squared log-ratio and the mean of old minus new log-probability."""
        old, new = inputs.get("old_per_token_logps"), self._last_logps
        if old is None or new is None:
            return PolicyMove(1.0, 0.0, 0.0)
        mask = inputs["completion_mask"]
        mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
        log_ratio = (new.float() - old.float()).masked_fill(mask == 0, 0.0)
        sums = torch.stack(
            [(log_ratio.exp() * mask).sum(), 0.5 * log_ratio.square().sum(), -log_ratio.sum(), mask.sum().float()]
        )
        ratio, approx, moved, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        return PolicyMove(ratio / count, approx / count, moved / count) if count else PolicyMove(1.0, 0.0, 0.0)

    def _report_scores(self, rewards_NK: torch.Tensor, completion_ids: Sequence[Sequence[int]]) -> None:
        """Log PPO's names for the scores; the penalty for a missing end counts as score, as in TRL 1.12."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        columns = list(self._ppo.score_columns)
        weights = self.reward_weights.to(rewards_NK.device)
        score = (rewards_NK * weights)[:, columns].nansum(dim=1).mean().item()
        penalty = 0.0 if self._ppo.kl_column is None else rewards_NK[:, self._ppo.kl_column].mean().item()
        eos = self._tokenizer.eos_token_id
        ended = torch.tensor([float(sum(eos in ids for ids in completion_ids))], device=rewards_NK.device)
        metrics["objective/scores"].append(score)
        metrics["objective/rlhf_reward"].append(score + penalty)
        metrics["val/num_eos_tokens"].append(gather(ended).sum().item())
        if self.model.training:
            per_update = max(self.num_iterations * self.args.steps_per_generation, 1)
            updates = self.state.global_step * self.args.gradient_accumulation_steps // per_update + 1
            self.state.episode = updates * self.args.generation_batch_size

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, with PPO's names beside TRL's."""
        metrics = self._metrics["train"]
        if self.model.training and "loss" in logs:
            episode = float(getattr(self.state, "episode", 0))
            extra = {"episode": episode, "loss/policy_avg": logs["loss"]}
            if "learning_rate" in logs:
                extra["lr"] = logs["learning_rate"]
            if self._began_at:
                extra["eps"] = float(int(episode / max(time.perf_counter() - self._began_at, 1e-9)))
            for name, values in {k: [v] for k, v in extra.items()}.items():
                metrics[name] = values
            for ours, theirs in (("policy/clipfrac_avg", "clip_ratio/region_mean"), ("policy/entropy_avg", "entropy")):
                if metrics.get(theirs):
                    metrics[ours] = list(metrics[theirs])
            ratios = torch.tensor(metrics.get("val/ratio", []))
            if ratios.numel():
                metrics["val/ratio_var"] = [ratios.var(unbiased=ratios.numel() > 1).item()]
        super().log(logs, start_time)


def _columns(own: dict[int, torch.Tensor], called: Sequence[int], rewards: torch.Tensor | None) -> torch.Tensor:
    """Return (N, K): ``own`` columns, and those of ``rewards`` at the places ``called``."""
    columns = dict(own)
    if rewards is not None:
        columns |= dict(zip(called, rewards.T, strict=True))
    return torch.stack([columns[i].float() for i in range(len(columns))], dim=1)
