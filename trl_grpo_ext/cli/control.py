"""A control run: the same training with rewards that say nothing about the completions they belong to."""

from __future__ import annotations

import random
from typing import Any

import torch

from trl_grpo_ext.trainer import GroupRelativeTrainer


class ShuffledRewardsTrainer(GroupRelativeTrainer):
    """Permute the rewards of every step among its completions.

    Their distribution stays, so that a rise of held-out accuracy in such a run would show that something other than the
    rewards teaches the task. Rewards of weight 0 are only watched and stay in place, so that the logged accuracies are
    those of the completions.
    """

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        # The same on every process, since each of them holds the rewards of all.
        order = list(range(rewards.size(0)))
        random.Random(f"{self.args.seed}/{self.state.global_step}/{self._step}").shuffle(order)
        paid = torch.as_tensor(self.reward_weights, device=rewards.device) != 0
        rewards = torch.where(paid, rewards[order], rewards)
        self._rewards_per_func = rewards
        return rewards
