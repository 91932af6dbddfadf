"""The names on a PPO trainer that scripts read or call and GRPO's trainer lacks."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from typing import Any

import torch
from transformers import TrainerCallback

from trl_grpo_ext.compat.sampling import sample_responses
from trl_grpo_ext.compat.shaping import RewardShapingMixin, SampledBatch
from trl_grpo_ext.rng import preserved_rng

logger = logging.getLogger(__name__)

_SHOWN_SAMPLES = 5
_NEARLY_GREEDY = 0.01


class SampleTables(TrainerCallback):
    """Print a table of sample completions ``num_tables`` times over a run, as PPO's ``num_sample_generations`` did."""

    def __init__(self, trainer: Any, num_tables: int, steps_per_update: int) -> None:
        self.trainer, self.num_tables, self.steps_per_update = trainer, num_tables, steps_per_update

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Print after the first update and then at equal distances."""
        if state.global_step % self.steps_per_update:
            return
        every = max(state.max_steps // self.steps_per_update // self.num_tables, 1)
        if (state.global_step // self.steps_per_update - 1) % every == 0:
            self.trainer.generate_completions(sampling=True)


class PPOMethodsMixin(RewardShapingMixin):
    """Add PPO's attributes, sample tables and both forms of saving."""

    @property
    def config(self) -> Any:
        """The user's configuration object."""
        return self._ppo.config

    @property
    def ppo_args(self) -> Any:
        """The user's configuration object."""
        return self._ppo.config

    @property
    def tokenizer(self) -> Any:
        """The user's tokenizer."""
        return self.processing_class

    @property
    def dataset(self) -> Any:
        """The training data as the user gave it."""
        return self._ppo.dataset

    @property
    def current_device(self) -> torch.device:
        """The device of this process."""
        return self.accelerator.device

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train."""
        return self.accelerator.num_processes > 1

    @property
    def policy_model(self) -> Any:
        """The policy; ``trainer.model`` is the same object."""
        return self.model

    @property
    def reward_model(self) -> Any:
        """The reward model as the user gave it."""
        return self._ppo.reward_model

    @property
    def value_model(self) -> None:
        """None: there is no critic."""
        return

    @property
    def stop_token_id(self) -> int | None:
        """The token that ends a completion, as PPO resolved it."""
        config = self._ppo.config
        if getattr(config, "stop_token", None) == "eos":
            return self._tokenizer.eos_token_id
        return self._ppo.settings.stop_token_id

    def generate_completions(self, sampling: bool = False) -> None:
        """Print prompt, response and score of up to five evaluation prompts, sampled almost greedily.

        Args:
            sampling: True looks at the first evaluation batch only, False at all of them (five rows are shown anyway,
                the whole table goes to wandb when a run is active).
        """
        dataset = self.eval_dataset
        if dataset is None or isinstance(dataset, dict):
            return
        limit = self.args.per_device_eval_batch_size if sampling else len(dataset)
        rows = [dataset[index] for index in range(min(limit, len(dataset)))]
        was_training = self.model.training
        with preserved_rng(), torch.no_grad():
            table = self._sample_table(rows)
        self.model.train(was_training)
        if self.accelerator.is_main_process and rows:
            _show(table)

    def _sample_table(self, rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
        given = [row.get("input_ids") for row in rows]
        if any(ids is None for ids in given):
            prompts = super()._tokenize_prompts([row["prompt"] for row in rows])[0]
        else:
            prompts = [list(ids) for ids in given]  # type: ignore[arg-type]
        responses = sample_responses(
            self,
            prompts,
            {
                "max_new_tokens": self.max_completion_length,
                "do_sample": True,
                "temperature": _NEARLY_GREEDY,
                "top_k": 0,
                "top_p": 1.0,
                "eos_token_id": self.eos_token_ids,
            },
            rows_per_call=self._no_grad_rows,
            ends=self.eos_token_ids,
        )
        texts = self.processing_class.batch_decode(responses, skip_special_tokens=True)
        scores = self._scores_of_samples(rows, prompts, responses, texts)
        return {
            "query": self.processing_class.batch_decode(prompts, skip_special_tokens=True),
            "model response": self.processing_class.batch_decode(responses),
            "score": scores,
        }

    def _scores_of_samples(
        self, rows: list[dict[str, Any]], prompts: list[list[int]], responses: list[list[int]], texts: list[str]
    ) -> list[float]:
        """Return the task score of each sample, leaving the metrics and logs of training as they are."""
        if not self._ppo.has_reward:
            return [math.nan] * len(rows)
        names = (
            "_pending_extra_logs",
            "_pending_metrics",
            "_rewards_per_func",
            "_given_rewards",
            "_sampled",
            "_metrics",
        )
        kept = {name: getattr(self, name, None) for name in names}
        self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._sampled, self._wants_kl = SampledBatch(prompts, responses, None), False
        conversational = isinstance(rows[0]["prompt"], list)
        completions: list[Any] = [[{"role": "assistant", "content": t}] for t in texts] if conversational else texts
        try:
            rewards = self._calculate_rewards(rows, [row["prompt"] for row in rows], completions, responses)
        finally:
            self.__dict__.update(kept)
            self._wants_kl = True
        columns = list(self._ppo.score_columns)
        first = self.accelerator.process_index * len(rows)
        weighted = rewards * self.reward_weights.to(rewards.device)
        return weighted[first : first + len(rows), columns].nansum(dim=1).tolist()

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the policy and the tokenizer to ``save_directory``; the classic trainer's way."""
        model = self.accelerator.unwrap_model(self.model)
        if self.accelerator.is_main_process:
            model.save_pretrained(save_directory, **kwargs)
            self.processing_class.save_pretrained(save_directory)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Push as ``transformers.Trainer`` does, or as the classic trainer did when a repository name is given.

        The classic form is taken for ``repo_id=`` or a first argument like ``"user/name"``.
        """
        name = kwargs.pop("repo_id", None)
        if name is None and args and isinstance(args[0], str) and "/" in args[0] and " " not in args[0]:
            name, args = args[0], args[1:]
        if name is None:
            return super().push_to_hub(*args, **kwargs)
        self.processing_class.push_to_hub(name, **kwargs)
        return self.accelerator.unwrap_model(self.model).push_to_hub(name, *args, **kwargs)


def _show(table: dict[str, list[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(show_lines=True)
    for name in table:
        shown.add_column(name)
    for row in list(zip(*table.values(), strict=True))[:_SHOWN_SAMPLES]:
        shown.add_row(*(Text(f"{value:.4g}" if isinstance(value, float) else str(value)) for value in row))
    Console().print(shown)
    import importlib.util

    if importlib.util.find_spec("wandb") is not None:
        import wandb

        if getattr(wandb, "run", None) is not None:
            wandb.log({"completions": wandb.Table(columns=list(table), data=list(zip(*table.values(), strict=True)))})
