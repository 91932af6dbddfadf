"""Sort out which trainer a call was written for: GRPO's, PPO's of TRL 0.9.3 to 1.12 (v2) or up to 0.11 (classic).

Pure functions on the arguments as they were given. Objects are recognised by what they can do, so that no library has
to be imported here; nothing else in the package looks at the old names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from trl_grpo_ext.compat.fields import Era
from trl_grpo_ext.errors import ConfigurationError, nearest

Init = TypeVar("Init", bound=Callable[..., None])

V2_ORDER = (
    "args",
    "processing_class",
    "model",
    "ref_model",
    "reward_model",
    "train_dataset",
    "value_model",
    "data_collator",
    "eval_dataset",
    "optimizers",
    "callbacks",
    "peft_config",
)
CLASSIC_ORDER = (
    "config",
    "model",
    "ref_model",
    "tokenizer",
    "dataset",
    "optimizer",
    "data_collator",
    "num_shared_layers",
    "lr_scheduler",
    "training_data_collator",
)
GRPO_ORDER = (
    "model",
    "reward_funcs",
    "args",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "reward_processing_classes",
    "callbacks",
    "optimizers",
    "quantization_config",
    "peft_config",
    "tools",
    "rollout_func",
    "environment_factory",
)
# Old name -> name used from here on.
ALIASES = {
    "config": "args",
    "tokenizer": "processing_class",
    "policy": "model",
    "ref_policy": "ref_model",
    "dataset": "train_dataset",
}
# Only the PPO trainers had these, so one of them says that the call is meant for PPO.
PPO_ONLY = frozenset(
    {
        *ALIASES,
        "ref_model",
        "reward_model",
        "value_model",
        "data_collator",
        "training_data_collator",
        "optimizer",
        "lr_scheduler",
        "num_shared_layers",
        "num_generations",
    }
)
CLASSIC_KEYWORDS = frozenset(
    {"tokenizer", "dataset", "optimizer", "lr_scheduler", "num_shared_layers", "training_data_collator"}
)
# Arguments that carry nothing into the new trainer and are said so once, in the start-up report.
CRITIC_ARGUMENTS = ("value_model",)
# Keywords of the trainer that neither era nor TRL had.
OUR_KEYWORDS = ("memory", "adapter")
_KNOWN = frozenset({*V2_ORDER, *CLASSIC_ORDER, *GRPO_ORDER, *PPO_ONLY, *OUR_KEYWORDS})


class UnknownArgumentError(ConfigurationError, TypeError):
    """A keyword that neither GRPO nor PPO of either era knows."""


class ResolvedCall(NamedTuple):
    """A trainer call in one vocabulary.

    Attributes:
        era: Whose methods the script will call.
        args: The configuration object, or None.
        model: The policy as given: a model, a value-head wrapper, a path, or None.
        ref_model: The frozen reference as given, or None.
        reward_model: A module, a path, a callable or a list of them, or None.
        reward_funcs: As in GRPO, or None.
        num_shared_layers: Layers shared between policy and automatic reference.
        num_generations: Group size as the user set it.
        data_collator: The old collator.
        ignored: Critic arguments that were given.
        grpo: Everything else, under GRPO's names.
    """

    era: Era
    args: Any
    model: Any
    ref_model: Any
    reward_model: Any
    reward_funcs: Any
    num_shared_layers: int | None
    num_generations: int | None
    data_collator: Any
    ignored: tuple[str, ...]
    grpo: dict[str, Any]


def is_config(value: Any) -> bool:
    """Return whether ``value`` is a configuration of some trainer."""
    return hasattr(value, "per_device_train_batch_size") and hasattr(value, "learning_rate")


def is_ppo_config(value: Any) -> bool:
    """Return whether ``value`` is a ``PPOConfig`` of ours (or a subclass)."""
    return is_config(value) and hasattr(type(value), "num_ppo_epochs")


def is_model(value: Any) -> bool:
    """Return whether ``value`` is a module or a value-head wrapper."""
    return callable(getattr(value, "forward", None)) or hasattr(value, "pretrained_model")


def is_language_model(value: Any) -> bool:
    """Return whether ``value`` generates text: a wrapper, or a module with an output embedding."""
    if hasattr(value, "pretrained_model"):
        return True
    outputs = getattr(value, "get_output_embeddings", None)
    return is_model(value) and callable(outputs) and outputs() is not None


def is_processor(value: Any) -> bool:
    """Return whether ``value`` is a tokenizer or a processor."""
    return not is_model(value) and (hasattr(value, "batch_decode") or hasattr(value, "tokenizer"))


def is_ppo_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of ``GroupRelativeTrainer`` is written for a PPO trainer.

    True for a configuration in first place, two language models in the first two places (TRL < 0.2), a ``PPOConfig``
    as ``args``, or a keyword that only PPO knows. Everything else is a GRPO call and left alone.
    """
    if args and is_config(args[0]):
        return True
    if len(args) > 1 and is_language_model(args[0]) and is_language_model(args[1]):
        return True
    in_grpo_place = args[2] if len(args) > 2 else None
    return is_ppo_config(kwargs.get("args", in_grpo_place)) or not PPO_ONLY.isdisjoint(kwargs)


def normalize_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ResolvedCall:
    """Return a PPO call of either era, or a GRPO call with PPO keywords, in one vocabulary.

    Args:
        args: Positional arguments: PPO order when the first is a configuration, GRPO order when it is a model.
        kwargs: Keyword arguments of either era, and GRPO's.

    Raises:
        UnknownArgumentError: for a keyword that no era knows; the message names the nearest.
        ConfigurationError: for two names of one argument, two reward sources, or a call of TRL < 0.2.
    """
    order, by_position = _positional_order(args)
    if len(args) > len(order):
        raise UnknownArgumentError(f"{len(args)} positional arguments; the trainer takes at most {len(order)}.")
    given: dict[str, Any] = {}
    for name, value in [*zip(order, args, strict=False), *kwargs.items()]:
        if name not in _KNOWN:
            raise UnknownArgumentError(f"Unknown argument {name!r}.{nearest(name, sorted(_KNOWN))}")
        target = ALIASES.get(name, name)
        if target in given and given[target][1] is not None and value is not None:
            raise ConfigurationError(f"Both {given[target][0]!r} and {name!r} are given. Keep one, {target!r}.")
        if target not in given or value is not None:
            given[target] = (name, value)
    names = {name for name, _ in given.values()}
    values = {target: value for target, (_, value) in given.items()}
    _check_rewards(values)
    era = _era(values, names, by_position)
    return _resolved(era, values)


def accepts_ppo_calls(init: Init) -> Init:
    """Decorate the trainer's ``__init__``: a call written for PPO turns the instance into a ``compat.ppo.PPOTrainer``.

    Every other call reaches ``init`` untouched.
    """

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 (it is the method)
        if is_ppo_call(args, kwargs):
            from trl_grpo_ext.compat.ppo_trainer import become_ppo_trainer

            become_ppo_trainer(self, args, kwargs)
        else:
            init(self, *args, **kwargs)

    return cast("Init", __init__)


def _positional_order(args: Sequence[Any]) -> tuple[tuple[str, ...], Era | None]:
    if not args:
        return V2_ORDER, None
    if is_model(args[0]) or isinstance(args[0], str):
        if len(args) > 1 and is_language_model(args[1]):
            raise ConfigurationError(
                "TRL < 0.2 call style (model, ref_model, ...): pass a PPOConfig first, "
                "PPOTrainer(config, model, ref_model, tokenizer)."
            )
        return GRPO_ORDER, None
    if not (is_config(args[0]) or args[0] is None):
        raise ConfigurationError(
            f"The first argument is a {type(args[0]).__name__}; it must be a PPOConfig (PPO order) or a model (GRPO "
            "order)."
        )
    rest = [value for value in args[1:3] if value is not None]
    if not rest:
        return V2_ORDER, None
    second = args[1] if len(args) > 1 else None
    if is_processor(second) or (second is None and is_model(rest[0])):
        return V2_ORDER, "v2"
    return CLASSIC_ORDER, "classic"


def _check_rewards(values: Mapping[str, Any]) -> None:
    if values.get("reward_model") is not None and values.get("reward_funcs") is not None:
        raise ConfigurationError(
            "Both reward_model and reward_funcs are given. Pass one; several rewards go into one list, "
            "reward_funcs=[model, function]."
        )


def _era(values: Mapping[str, Any], names: set[str], by_position: Era | None) -> Era:
    if values.get("reward_model") is not None or values.get("reward_funcs") is not None:
        return "v2"
    if by_position is not None:
        return by_position
    if names & {"value_model", "policy", "ref_policy", "optimizers", "eval_dataset"}:
        return "v2"
    hint = getattr(values.get("args"), "era_hint", None)
    if hint is not None:
        return cast("Era", hint)
    return "classic" if names & CLASSIC_KEYWORDS else "v2"


def _resolved(era: Era, values: dict[str, Any]) -> ResolvedCall:
    optimizer, scheduler = values.pop("optimizer", None), values.pop("lr_scheduler", None)
    if optimizer is not None or scheduler is not None:
        if values.get("optimizers") not in (None, (None, None)):
            raise ConfigurationError("Both 'optimizer' and 'optimizers' are given. Keep one, 'optimizers'.")
        values["optimizers"] = (optimizer, scheduler)
    values.pop("training_data_collator", None)  # padded queries and responses itself; nothing here needs it
    ignored = tuple(name for name in CRITIC_ARGUMENTS if values.pop(name, None) is not None)
    taken = {
        name: values.pop(name, None)
        for name in (
            "args",
            "model",
            "ref_model",
            "reward_model",
            "reward_funcs",
            "num_shared_layers",
            "num_generations",
            "data_collator",
        )
    }
    return ResolvedCall(era=era, ignored=ignored, grpo={k: v for k, v in values.items() if v is not None}, **taken)
