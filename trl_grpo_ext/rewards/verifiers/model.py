"""``model``: a reward model, scored by TRL's own path.

A reward model needs the trainer's device and its batching, so it does not run in the reward workers. TRL takes the
name of a sequence-classification model among its ``reward_funcs`` and does the rest.
"""

from __future__ import annotations

from trl_grpo_ext.errors import ConfigurationError


def build(*, model: str) -> str:
    """Return the marker TRL takes for a reward model: its name on the hub, or a local folder.

    Args:
        model: a model for sequence classification with one label.

    Raises:
        ConfigurationError: if the name is empty.
    """
    if not isinstance(model, str) or not model.strip():
        raise ConfigurationError(f"reward 'model': model={model!r} must be a model name or folder")
    return model.strip()
