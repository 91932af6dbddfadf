"""Look after prompts and end tokens, at TRL's seam for tokenisation."""

from __future__ import annotations

import logging
from collections.abc import Sized
from typing import Any

from trl import GRPOTrainer

from trl_grpo_ext.config import setting
from trl_grpo_ext.data.prompt_tokens import drop_doubled_bos, shorten_prompt
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.preflight.data import check_one_step_of_data

logger = logging.getLogger(__name__)


class PromptStepMixin(GRPOTrainer):
    """Give every prompt one BOS, keep prompts within ``max_prompt_length``, and insist on an end token."""

    args: Any
    _longest_allowed_prompt: int | None = None

    def _settle_prompts(self) -> None:
        """Check end tokens and drop over-long prompts; called once tokenizer and data are there.

        Raises:
            ConfigurationError: if no completion could ever end, or prompts with images or environments are to be cut.
            DataError: if the rows that are left do not fill one step.
        """
        self._settle_end_tokens()
        limit = setting(self.args, "max_prompt_length")
        if limit is None:
            return
        if self._is_vlm or self.environment_factories is not None:
            raise ConfigurationError(
                f"max_prompt_length={limit} works on texts only; prompts with images or environments must fit as they "
                "are. Set it to None."
            )
        if setting(self.args, "overlong_prompts") == "truncate":
            self._longest_allowed_prompt = limit
            return
        self.train_dataset = self._without_overlong(self.train_dataset, limit, "training")
        if isinstance(self.eval_dataset, dict):
            kept = {name: self._without_overlong(rows, limit, name) for name, rows in self.eval_dataset.items()}
            self.eval_dataset = kept
        else:
            self.eval_dataset = self._without_overlong(self.eval_dataset, limit, "evaluation")
        check_one_step_of_data(self.train_dataset, self.args.generation_batch_size, self.args.num_generations)

    def _settle_end_tokens(self) -> None:
        ends = [token for token in self.eos_token_ids if token is not None]
        if not ends:
            raise ConfigurationError(
                "Neither the tokenizer nor the model's generation_config has an end token, so that no completion would "
                "ever end. Set tokenizer.eos_token to the token that ends an answer."
            )
        if len(ends) < len(self.eos_token_ids):  # the tokenizer has none, the model has
            self.eos_token_ids = ends
            self.generation_config.eos_token_id = ends

    def _without_overlong(self, dataset: Any, limit: int, name: str) -> Any:
        """Return the data set without rows whose prompt is too long; a stream drops them on the way."""
        if dataset is None:
            return None
        has_length = isinstance(dataset, Sized)
        if not has_length:
            return dataset.filter(lambda row: len(self._tokens_of(row["prompt"])) <= limit)
        kept = [place for place, prompt in enumerate(dataset["prompt"]) if len(self._tokens_of(prompt)) <= limit]
        dropped = len(dataset) - len(kept)
        if not dropped:
            return dataset
        logger.warning(
            "Dropped %d of %d %s rows: their prompts are longer than max_prompt_length=%d tokens.",
            dropped,
            len(dataset),
            name,
            limit,
        )
        return dataset.select(kept)

    def _tokens_of(self, prompt: Any) -> list[int]:
        return self._tokenize_as_they_are([prompt])[0][0]

    def _tokenize_as_they_are(self, prompts: list[Any]) -> Any:
        prompt_ids, images, multimodal_fields = super()._tokenize_prompts(prompts)
        if not multimodal_fields:  # their tensors have an entry for every token
            prompt_ids = [drop_doubled_bos(ids, self._tokenizer.bos_token_id) for ids in prompt_ids]
        return prompt_ids, images, multimodal_fields

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        limit = self._longest_allowed_prompt
        if limit is not None:
            prompts = [shorten_prompt(prompt, limit, self._tokens_of, self._tokenizer) for prompt in prompts]
        return self._tokenize_as_they_are(prompts)
