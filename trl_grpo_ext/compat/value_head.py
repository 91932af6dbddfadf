"""The model classes that PPO scripts import beside the trainer: holders of a plain model, without a head."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trl_grpo_ext.errors import ConfigurationError

logger = logging.getLogger(__name__)

_REWARD_ADAPTER = (
    "Reward adapters are not supported; load the adapter as its own sequence classifier and pass it as reward_model."
)
_SEQ2SEQ = "Only causal language models can be trained here; the last TRL with seq2seq PPO is 1.12."
# Settings of the value head, which does not exist any more.
_HEAD_ARGUMENTS = ("summary_dropout_prob", "v_head_init_strategy", "v_head_initializer_range")
_TRL_ARGUMENTS = (*_HEAD_ARGUMENTS, "peft_config", "is_trainable", "load_in_8bit", "load_in_4bit")


class AutoModelForCausalLMWithValueHead(nn.Module):
    """Hold a causal language model where TRL put a value head on top of one.

    There is no critic, so there is no head: the weights are those of ``pretrained_model``, and saving writes a plain
    model. Attributes that this class lacks are looked up on the model.

    Args:
        pretrained_model: A causal language model, or a ``PeftModel`` of one.
        **kwargs: Settings of the head; without effect.

    Raises:
        ConfigurationError: for a seq2seq model or a reward adapter.
    """

    def __init__(self, pretrained_model: Any, **kwargs: Any) -> None:
        super().__init__()
        if getattr(getattr(pretrained_model, "config", None), "is_encoder_decoder", False):
            raise ConfigurationError(_SEQ2SEQ)
        if kwargs.get("reward_adapter") is not None:
            raise ConfigurationError(_REWARD_ADAPTER)
        self.pretrained_model = pretrained_model
        self.is_peft_model = hasattr(pretrained_model, "peft_config") and hasattr(pretrained_model, "disable_adapter")

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any
    ) -> AutoModelForCausalLMWithValueHead:
        """Return a holder of the model at a path, or of a model that is already there.

        Old checkpoints with ``v_head`` weights load; those weights are left out with a warning. ``load_in_8bit`` and
        ``load_in_4bit`` become a ``quantization_config``, ``use_auth_token`` becomes ``token``. Without a dtype the
        weights are float32, as they were under transformers 4.

        Args:
            pretrained_model_name_or_path: Path, hub name, or a model.
            *model_args: Go to ``transformers``.
            **kwargs: Go to ``transformers``, except ``peft_config``, ``is_trainable`` and the head's settings.

        Raises:
            ConfigurationError: for a reward adapter.
        """
        if kwargs.pop("reward_adapter", None) is not None or kwargs.pop("reward_adapter_name", None) not in (
            None,
            "reward_adapter",
        ):
            raise ConfigurationError(_REWARD_ADAPTER)
        own = {name: kwargs.pop(name) for name in _TRL_ARGUMENTS if name in kwargs}
        if not isinstance(pretrained_model_name_or_path, str | Path):
            model = pretrained_model_name_or_path
        else:
            model = _load(str(pretrained_model_name_or_path), *model_args, own=own, **kwargs)
        if own.get("peft_config") is not None:
            model = _with_adapter(model, own["peft_config"])
        return cls(model)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("pretrained_model", "v_head"):
                raise
            return getattr(self.pretrained_model, name)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Return ``(logits, loss, None)``; the third place held the values."""
        for name in ("return_past_key_values", "past_key_values"):
            kwargs.pop(name, None)
        output = self.pretrained_model(*args, **kwargs)
        return output.logits, output.loss, None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model does."""
        return self.pretrained_model.generate(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's weights under the model's names."""
        return self.pretrained_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:  # type: ignore[override]
        """Load weights into the model; those of an old value head are left out."""
        kept = {name: value for name, value in state_dict.items() if not name.startswith("v_head.")}
        return self.pretrained_model.load_state_dict(kept, strict=strict, assign=assign)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model, without a head."""
        return self.pretrained_model.save_pretrained(*args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Push the model, without a head."""
        return self.pretrained_model.push_to_hub(*args, **kwargs)

    def compute_reward_score(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: this needed a reward adapter.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(_REWARD_ADAPTER)


class AutoModelForSeq2SeqLMWithValueHead:
    """Refuse seq2seq models, which TRL <= 1.12 could train with PPO."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigurationError(_SEQ2SEQ)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(_SEQ2SEQ)


def unwrap(model: Any) -> Any:
    """Return the plain model inside a value-head wrapper, ours or one of the same shape, or ``model`` itself."""
    return model.pretrained_model if hasattr(model, "pretrained_model") else model


def create_reference_model(model: Any, num_shared_layers: int | None = None, pattern: str | None = None) -> Any:
    """Return a frozen copy of ``model`` in eval mode, as TRL's function of this name did.

    Args:
        model: A model or a value-head wrapper; a wrapper is returned for a wrapper.
        num_shared_layers: First layers that both share; they are frozen in ``model`` too.
        pattern: Name pattern of a layer, for architectures that TRL does not know.
    """
    from trl.experimental.utils import create_reference_model as create

    copied = create(unwrap(model), num_shared_layers=num_shared_layers, pattern=pattern)
    return AutoModelForCausalLMWithValueHead(copied).eval() if hasattr(model, "pretrained_model") else copied


def _load(path: str, *model_args: Any, own: dict[str, Any], **kwargs: Any) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if "use_auth_token" in kwargs:
        kwargs.setdefault("token", kwargs.pop("use_auth_token"))
    if own.get("load_in_8bit") or own.get("load_in_4bit"):
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_8bit=bool(own.get("load_in_8bit")), load_in_4bit=bool(own.get("load_in_4bit"))
        )
    if "torch_dtype" not in kwargs:
        kwargs.setdefault("dtype", torch.float32)
    if (Path(path) / "adapter_config.json").is_file():
        from peft import AutoPeftModelForCausalLM

        kwargs["is_trainable"] = own.get("is_trainable", True)
        model = AutoPeftModelForCausalLM.from_pretrained(path, *model_args, **kwargs)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, *model_args, **kwargs)
    if _holds_value_head(Path(path)):
        logger.warning("%s holds weights of a value head; they are left out, and saving will not write them.", path)
    return model


def _with_adapter(model: Any, peft_config: Any) -> Any:
    from peft import get_peft_model, prepare_model_for_kbit_training

    if getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False):
        model = prepare_model_for_kbit_training(model)
    return get_peft_model(model, peft_config)


def _holds_value_head(directory: Path) -> bool:
    """Return whether a local checkpoint has ``v_head`` weights, without loading any."""
    for index in directory.glob("*.index.json"):
        if any("v_head." in name for name in json.loads(index.read_text()).get("weight_map", {})):
            return True
    for path in directory.glob("*.safetensors"):
        from safetensors import safe_open

        with safe_open(str(path), framework="pt") as stored:
            if any("v_head." in name for name in stored.keys()):  # noqa: SIM118 (not a mapping)
                return True
    for path in directory.glob("pytorch_model*.bin"):
        if any("v_head." in name for name in torch.load(path, map_location="meta", weights_only=True)):
            return True
    return False
