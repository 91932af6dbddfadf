"""The sampling half of the classic loop: ``trainer.dataloader`` and ``trainer.generate``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from trl.trainer.utils import RepeatSampler

from trl_grpo_ext.compat.methods import PPOMethodsMixin
from trl_grpo_ext.compat.sampling import cut_after_first, sample_responses
from trl_grpo_ext.errors import ConfigurationError, DataError


class ClassicSamplingMixin(PPOMethodsMixin):
    """Add the classic data loader and ``generate``."""

    _dataloader: Any = None

    @property
    def _step_size(self) -> int:
        """Responses per ``step`` on this process."""
        if self._ppo.plan is None:
            return self.args.per_device_train_batch_size * self.args.steps_per_generation
        share = 1 if self._ppo.era == "classic" else self.accelerator.num_processes
        return self._ppo.plan.completions // share

    @property
    def dataloader(self) -> Any:
        """Batches of the classic data set: every prompt ``num_generations`` times in a row inside ``batch_size`` rows.

        One pass visits every prompt, so it has ``num_generations`` times as many batches as with TRL.
        """
        if self._dataloader is None and self._ppo.dataset is not None:
            self._dataloader = self.prepare_dataloader(self._ppo.dataset, self._ppo.data_collator)
        return self._dataloader

    def prepare_dataloader(self, dataset: Any, data_collator: Any = None) -> Any:
        """Return a shuffled loader over ``dataset`` that repeats every prompt inside a batch.

        Args:
            dataset: HF or torch data set.
            data_collator: Turns a list of rows into a batch; None: torch's default.

        Raises:
            DataError: if the data set has fewer prompts than one batch needs.
        """
        rows, group = self._step_size, self.num_generations
        if len(dataset) < rows // group:
            raise DataError(
                f"The data set has {len(dataset)} prompts, but a batch of {rows} needs {rows // group} different ones, "
                f"each {group} times. Add prompts or lower batch_size."
            )
        if isinstance(dataset, Dataset) and getattr(self._ppo.config, "remove_unused_columns", False):
            kept = {*inspect.signature(self.accelerator.unwrap_model(self.model).forward).parameters}
            kept |= {"label", "query", "response"}
            dataset = dataset.remove_columns([name for name in dataset.column_names if name not in kept])
        sampler = RepeatSampler(dataset, group, batch_size=rows // group, seed=self.args.seed)
        loader = DataLoader(dataset, batch_size=rows, sampler=sampler, collate_fn=data_collator, drop_last=True)
        return self.accelerator.prepare(loader)

    def generate(
        self,
        query_tensor: Any,
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Return responses to one query or to a list of queries.

        Args:
            query_tensor: (L,) tensor of token ids, or a list of such.
            length_sampler: Called before every call of the model; its result is ``max_new_tokens``.
            batch_size: Rows per call of the model, for a list.
            return_prompt: Whether each result starts with its query.
            generate_ref_response: Whether to sample from the reference too.
            **generation_kwargs: For the model's ``generate``.

        Returns:
            For a tensor a (1, L + T) tensor, for a list a list of 1-D tensors without padding, cut after the first EOS
            of the response. With ``generate_ref_response`` a pair of those.
        """
        results = [
            self._generate_from(None, query_tensor, length_sampler, batch_size, return_prompt, generation_kwargs)
        ]
        if not generate_ref_response:
            return results[0]
        return results[0], self._generate_from(
            self._reference_sampler(), query_tensor, length_sampler, batch_size, return_prompt, generation_kwargs
        )

    def _generate_from(
        self,
        model: Any,
        query: Any,
        length_sampler: Callable[[], int] | None,
        batch_size: int,
        return_prompt: bool,
        kwargs: dict[str, Any],
    ) -> Any:
        is_list = isinstance(query, list)
        queries = [q.tolist() if hasattr(q, "tolist") else list(q) for q in (query if is_list else [query])]
        kwargs = dict(kwargs) if length_sampler is None else {**kwargs, "max_new_tokens": length_sampler}
        eos = self._tokenizer.eos_token_id
        was_training = self.model.training
        self.model.eval()
        try:
            if model == "adapters off":
                with self.accelerator.unwrap_model(self.model).disable_adapter():
                    responses = self._sample(queries, kwargs, batch_size, None)
            else:
                responses = self._sample(queries, kwargs, batch_size, model)
        finally:
            self.model.train(was_training)
        responses = [cut_after_first(r, [eos] if eos is not None and is_list else []) for r in responses]
        device = self.accelerator.device
        rows = [q + r if return_prompt else r for q, r in zip(queries, responses, strict=True)]
        tensors = [torch.tensor(row, device=device) for row in rows]
        return tensors if is_list else tensors[0].unsqueeze(0)

    def _sample(self, queries: list[list[int]], kwargs: dict[str, Any], batch_size: int, model: Any) -> list[list[int]]:
        pad = kwargs.get("pad_token_id", self._tokenizer.pad_token_id)
        ends = kwargs.get("eos_token_id", self._tokenizer.eos_token_id)
        stops = [e for e in (ends if isinstance(ends, list | tuple) else [ends]) if e is not None]
        responses = sample_responses(self, queries, kwargs, rows_per_call=batch_size, ends=stops, model=model)
        if pad not in stops:  # rows that ended on another criterion are filled up with pads
            responses = [_without_trailing(row, pad) for row in responses]
        return responses

    def _reference_sampler(self) -> Any:
        if self.ref_model is not None:
            return self.ref_model
        if hasattr(self.accelerator.unwrap_model(self.model), "disable_adapter"):
            return "adapters off"
        raise ConfigurationError("generate_ref_response needs a reference model; there is none (init_kl_coef=0).")


def _without_trailing(ids: list[int], pad: int) -> list[int]:
    end = len(ids)
    while end > 1 and ids[end - 1] == pad:
        end -= 1
    return ids[:end]
