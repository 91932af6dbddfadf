"""Bring an adapter into the state in which it can be trained: loaded, called "default", unfrozen, in float32."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trl_grpo_ext.errors import ConfigurationError

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger(__name__)

TRAINED = "default"
"""Name of the adapter that is trained: TRL looks for it, and ``save_pretrained`` writes it to the root of a directory,
where ``PeftModel.from_pretrained`` finds it. Any other name lands in a folder of its own."""
REFERENCE = "ref"
"""Name under which TRL keeps a frozen copy of the starting adapter, which the KL term is measured against."""
CONFIG_FILE = "adapter_config.json"


def is_peft_model(model: Any) -> bool:
    """Return whether ``model`` is a ``peft.PeftModel``."""
    try:
        from peft import PeftModel
    except ImportError:
        return False
    return isinstance(model, PeftModel)


def default_lora() -> LoraConfig:
    """Return the adapter of the modes that train one: rank 16 on every linear layer but the head, without dropout.

    Dropout would give the shared prompt of a group one mask and completions sampled one by one another, so that
    log-probabilities no longer belong to the policy that sampled.
    """
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")


def find_adapter(name: str) -> Path | None:
    """Return the directory below ``name`` that holds an adapter, or None where ``name`` is no local adapter.

    An adapter that was saved under a name other than "default" lies in a folder of that name, which is found too where
    there is only one. TRL's copy for the KL term does not count.

    Raises:
        ConfigurationError: if several adapters lie there and none at the root.
    """
    root = Path(name).expanduser()
    if (root / CONFIG_FILE).is_file():
        return root
    if not root.is_dir():
        return None
    inside = sorted(path.parent for path in root.glob(f"*/{CONFIG_FILE}") if path.parent.name != REFERENCE)
    if len(inside) > 1:
        raise ConfigurationError(
            f"adapter={name!r} holds {len(inside)} adapters ({', '.join(path.name for path in inside)}); name the "
            f"folder of one, for example {str(inside[0])!r}."
        )
    return inside[0] if inside else None


def base_of_adapter(name: str) -> str:
    """Return the model that an adapter (a directory or a hub id) was trained on, as its configuration names it.

    Raises:
        ConfigurationError: if there is no adapter, or it does not name its base.
    """
    from peft import PeftConfig

    try:
        base = PeftConfig.from_pretrained(_source(name)).base_model_name_or_path
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"adapter={name!r} cannot be read: {error}") from error
    if not base:
        raise ConfigurationError(
            f"adapter={name!r} does not name its base model; give the base as model= and this as adapter=."
        )
    return str(base)


def config_of(model: Any, peft_config: Any, adapter: str | None) -> Any:
    """Return the configuration of the adapter that a run trains, wherever it comes from, or None without one."""
    if adapter is not None:
        from peft import PeftConfig

        return PeftConfig.from_pretrained(_source(adapter))
    if is_peft_model(model):
        return model.active_peft_config
    return peft_config


def load_adapter(base: nn.Module, name: str) -> Any:
    """Return ``base`` with the adapter ``name`` on it, trainable, in float32 and under the name "default".

    Args:
        base: A transformers model without adapter, quantised or not.
        name: A directory or a hub id.

    Raises:
        ConfigurationError: if it cannot be read or does not fit the model.
    """
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(base, _source(name), adapter_name=TRAINED, is_trainable=True)
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        raise ConfigurationError(f"adapter={name!r} cannot be put on {type(base).__name__}: {error}") from error


def _source(name: str) -> str:
    found = find_adapter(name)
    if found is not None:
        return str(found)
    path = Path(name).expanduser()
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigurationError(f"adapter={name!r} is no directory with an {CONFIG_FILE} in it.")
    return name


def adopt_adapter(model: Any) -> None:
    """Make the active adapter of ``model`` the one that is trained: called "default" and not frozen; warn of a change.

    Args:
        model: A ``PeftModel``; changed in place.

    Raises:
        ConfigurationError: unless exactly one adapter is active, or if its name cannot be changed to "default" because
            another adapter has it.
    """
    active = list(model.active_adapters)
    if len(active) != 1:
        raise ConfigurationError(
            f"The PeftModel has {len(active)} active adapters ({', '.join(active) or 'none'}); exactly one is trained. "
            "Call model.set_adapter(NAME) first."
        )
    if active[0] != TRAINED:
        _rename(model, active[0])
    if not any(parameter.requires_grad for parameter in model.parameters()):
        _unfreeze(model)


def _rename(model: Any, name: str) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    if TRAINED in model.peft_config:
        raise ConfigurationError(
            f"The active adapter is called {name!r} and another one {TRAINED!r}, the name under which TRL and plain "
            f"PEFT look for the adapter that is trained. Call model.delete_adapter({TRAINED!r}) first, or activate it."
        )
    config = model.peft_config[name]
    trained = any(parameter.requires_grad for parameter in model.parameters())
    state = get_peft_model_state_dict(model, adapter_name=name)
    model.add_adapter(TRAINED, config)
    set_peft_model_state_dict(model, state, adapter_name=TRAINED)
    model.set_adapter(TRAINED, inference_mode=not trained)
    model.delete_adapter(name)
    logger.warning(
        "The adapter %r is called %r from now on: TRL and plain PEFT look for the trained adapter under that name.",
        name,
        TRAINED,
    )


def _unfreeze(model: Any) -> None:
    config = model.peft_config[TRAINED]
    config.inference_mode = False
    model.set_adapter(TRAINED)
    if config.is_prompt_learning:
        model.prompt_encoder[TRAINED].requires_grad_(True)
    logger.warning(
        "The adapter was frozen (loaded without is_trainable=True), so nothing would have been trained. It is "
        "trainable now."
    )


def check_reference_name(model: Any) -> None:
    """Raise ConfigurationError if an adapter of the user's already has the name of the copy for the KL term."""
    if REFERENCE in model.peft_config:
        raise ConfigurationError(
            f"The PeftModel has an adapter called {REFERENCE!r} besides the active one. With beta > 0 that name is "
            f"taken by the frozen copy of the starting adapter. Call model.delete_adapter({REFERENCE!r}) first."
        )


def copy_as_reference(model: Any) -> None:
    """Add a frozen copy of the trained adapter, in its present state, as the reference of the KL term."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    state = {name: value.clone() for name, value in get_peft_model_state_dict(model, adapter_name=TRAINED).items()}
    model.add_adapter(REFERENCE, model.peft_config[TRAINED])
    set_peft_model_state_dict(model, state, adapter_name=REFERENCE)


def check_trainable(model: nn.Module) -> None:
    """Raise ConfigurationError if not one tensor of ``model`` is trainable."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError(
            f"No tensor of the {type(model).__name__} is trainable, so nothing would be learnt. Leave some weights "
            "with requires_grad=True, or train an adapter: peft_config=LoraConfig(...)."
        )


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of everything that is trained."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


class Float32Adapters:
    """Keep what is trained in float32 through TRL's constructor.

    On a quantised base TRL rounds adapters to bfloat16, whose steps of 1/256 of a value swallow an update of 1e-6
    whole (see ``docs/memory.md``). An adapter that was there before gets its own digits back, not the rounded ones.

    Args:
        model: The model given to the constructor, or None where it is loaded there; a new adapter starts from rounded
            random values, which is no loss.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._before = {} if model is None else {name: p.data.float() for name, p in trainable(model)}

    def restore(self, model: nn.Module) -> None:
        """Give every trainable tensor of ``model`` its float32 values."""
        for name, parameter in trainable(model):
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = self._before.get(name, parameter.data).to(parameter.device, torch.float32)
        self._before = {}
