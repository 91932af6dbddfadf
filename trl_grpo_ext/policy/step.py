"""Look after the policy through a run: precision and reference after construction, checkpoints, moved weights."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

from trl_grpo_ext.config import setting
from trl_grpo_ext.memory import adapter as adapters
from trl_grpo_ext.memory.mode import MemoryMode
from trl_grpo_ext.memory.offload import HostOffload
from trl_grpo_ext.memory.quantised import is_quantised, keep_differentiable
from trl_grpo_ext.memory.record import PolicyRecord, check_kl_reference, load_record, save_record
from trl_grpo_ext.memory.update_guard import UpdateGuard
from trl_grpo_ext.policy.setup import Policy, settle_kl_reference


class PolicyStepMixin(GRPOTrainer):
    """Finish what ``prepare_policy`` began, and keep it so.

    Attributes:
        memory_mode: The memory mode of this run; None where none was asked for.
    """

    args: Any
    model: Any
    memory_mode: MemoryMode | None = None
    _kl_reference: str | None = None
    _update_guard: UpdateGuard | None = None
    _offload: HostOffload | None = None

    def _settle_policy(self, policy: Policy) -> None:
        """Undo what TRL's constructor did to the adapter's precision, settle the reference, start watching.

        Raises:
            ConfigurationError: if nothing is trainable.
        """
        self.memory_mode = policy.mode
        if is_quantised(self.model):
            keep_differentiable(self.model)
        if policy.float32 is not None and self._wants_float32_adapters():
            policy.float32.restore(self.model)
        adapters.check_trainable(self.model)
        self._kl_reference = settle_kl_reference(self.model, self.args, adapter_is_new=policy.peft_config is not None)
        if policy.mode is not None and policy.mode.activation_offload:
            self._offload = HostOffload(self.model, self.args.device.type)
        if setting(self.args, "watch_updates"):
            self._watch_updates()

    def _watch_updates(self) -> None:
        def log_metric(name: str, value: float) -> None:
            self._metrics["train"][name].append(value)

        self._update_guard = UpdateGuard(log_metric, lambda: self.accelerator.optimizer_step_was_skipped)
        self.add_callback(self._update_guard)

    def _wants_float32_adapters(self) -> bool:
        """Return whether adapters are to be float32 where TRL or the user left them in half precision."""
        if not setting(self.args, "float32_adapters") or not adapters.is_peft_model(self.model):
            return False
        # ZeRO-3 gathers the parameters of a layer into one buffer, so that TRL keeps them all in the base's dtype.
        plugin = getattr(self.args, "deepspeed_plugin", None)
        shares_buffers = plugin is not None and plugin.zero_stage == 3
        return is_quantised(self.model) or (self.memory_mode is not None and not shares_buffers)

    def _saved_for_backward(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context that decides where activations wait for the backward pass."""
        return contextlib.nullcontext() if self._offload is None else self._offload

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as ``transformers.Trainer.save_model`` does, with a note of what PEFT's files do not say."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            base = self.accelerator.unwrap_model(self.model)
            record = PolicyRecord(self._kl_reference)
            if is_quantised(base):
                dtype = str(base.get_input_embeddings().weight.dtype).removeprefix("torch.")
                record = record._replace(quantization=base.config.quantization_config.to_dict(), dtype=dtype)
            save_record(Path(output_dir or self.args.output_dir), record)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights, the copy of the starting adapter included, and measure the KL term against it as before."""
        folder = Path(resume_from_checkpoint)
        recorded = load_record(folder).kl_reference if self._kl_reference is not None else None
        if recorded is not None:
            check_kl_reference(recorded, setting(self.args, "kl_reference"), folder)
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if recorded is not None and adapters.is_peft_model(self.model):
            self._kl_reference = recorded
            if recorded == "base" and adapters.REFERENCE in self.model.peft_config:
                self.model.delete_adapter(adapters.REFERENCE)
