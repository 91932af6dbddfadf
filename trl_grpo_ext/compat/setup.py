"""Prepare a PPO call: everything that must happen before TRL's constructor runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from trl import GRPOConfig
from trl.trainer.utils import create_model_from_path

from trl_grpo_ext.compat.batch import BatchPlan
from trl_grpo_ext.compat.call import ResolvedCall, normalize_call
from trl_grpo_ext.compat.config import PPOConfig
from trl_grpo_ext.compat.fields import Era
from trl_grpo_ext.compat.prompts import prepare_prompts
from trl_grpo_ext.compat.reference import check_reference, frozen_copy, is_peft, load_reference
from trl_grpo_ext.compat.report import compose_report
from trl_grpo_ext.compat.token_rewards import (
    MissingEosPenalty,
    TrainerScored,
    check_reward_module,
    embedding_rows,
)
from trl_grpo_ext.compat.tokens import largest_token_id, padding_tokenizer
from trl_grpo_ext.compat.translate import PPOSettings, translate
from trl_grpo_ext.compat.value_head import unwrap
from trl_grpo_ext.errors import ConfigurationError

_SEQ2SEQ = "Only causal language models can be trained here; the last TRL with seq2seq PPO is 1.12."


@dataclass
class PPOSetup:
    """What the trainer needs to know about the call it came from.

    Attributes:
        era: Whose methods the script will call.
        settings: What PPO did beyond GRPO.
        plan: How an update is cut; None when the configuration was GRPO's own.
        config: The user's configuration object.
        grpo: Keyword arguments for ``GroupRelativeTrainer``.
        beta: Weight of the KL term in the loss; the parent is built with 0 and gets it afterwards.
        reference: The reference model, or None: adapters are disabled, or none is needed.
        needs_reference: Whether any KL term is on.
        token_rewards: Column in ``reward_funcs`` and module, for reward models that score token ids.
        eos_penalty: Column and amount of the penalty for a response without EOS, or None.
        kl_column: Column of the KL penalty, or None.
        score_columns: Columns that are scores of the task, in the sense of ``objective/scores``.
        has_reward: Whether ``train()`` has something to learn from.
        tokenizer: The user's tokenizer, which is saved.
        dataset: The user's training data.
        data_collator: The user's collator.
        report: Text of the start-up report.
    """

    era: Era
    settings: PPOSettings
    plan: BatchPlan | None
    config: Any
    grpo: dict[str, Any]
    beta: float = 0.0
    reference: Any = None
    needs_reference: bool = False
    token_rewards: dict[int, nn.Module] = field(default_factory=dict)
    eos_penalty: tuple[int, MissingEosPenalty] | None = None
    kl_column: int | None = None
    score_columns: tuple[int, ...] = ()
    has_reward: bool = True
    tokenizer: Any = None
    dataset: Any = None
    data_collator: Any = None
    reward_model: Any = None
    report: str = ""


def prepare_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> PPOSetup:
    """Return the setup of a trainer call written for PPO.

    Raises:
        ConfigurationError: for arguments that cannot work; nothing has been moved or patched then.
        DataError: for a data set without a usable column.
    """
    call = normalize_call(args, kwargs)
    setup, notes, ignored = _settle_config(call)
    _check_presence(call, setup)
    setup.dataset, setup.data_collator = call.grpo.pop("train_dataset", None), call.data_collator
    model = _load_policy(call, setup)
    setup.tokenizer = call.grpo.pop("processing_class", None) or AutoTokenizer.from_pretrained(
        model.config._name_or_path, padding_side="left"
    )
    if hasattr(call.model, "pretrained_model"):
        ignored = ("value head", *ignored)
    _prepare_rewards(call, setup, model)
    _prepare_reference(call, setup, model)
    rows = embedding_rows(model)
    setup.grpo["processing_class"] = padding_tokenizer(setup.tokenizer, rows)
    if setup.grpo["processing_class"] is not setup.tokenizer:
        notes = (*notes, f"the pad token is outside the embedding of {rows} rows, so rows are padded with EOS")
    _prepare_data(setup, call.grpo.pop("eval_dataset", None))
    if call.era == "v2" and call.data_collator is not None and "WithPadding" not in type(call.data_collator).__name__:
        notes = (*notes, f"data_collator {type(call.data_collator).__name__} is not used: prompts are padded inside")
    setup.grpo = {"model": model, **call.grpo, **setup.grpo}
    setup.report = compose_report(
        setup.era,
        setup.plan,
        world_size=setup.grpo["args"].world_size,
        kl=_describe_kl(setup, model),
        notes=notes,
        ignored=(*call.ignored, *ignored),
    )
    return setup


def _settle_config(call: ResolvedCall) -> tuple[PPOSetup, tuple[str, ...], tuple[str, ...]]:
    config = PPOConfig() if call.args is None else call.args
    if isinstance(config, PPOConfig):
        config.settle(call.era)
        if call.num_generations is not None:
            config.num_generations = call.num_generations
        dataset = call.grpo.get("train_dataset")
        num_rows = len(dataset) if isinstance(dataset, Sized) else None
        result = translate(config, world_size=config.world_size, num_rows=num_rows)
        setup = PPOSetup(call.era, result.settings, result.plan, config, {"args": result.args}, beta=result.args.beta)
        return setup, result.notes, result.ignored
    if isinstance(config, GRPOConfig):
        if call.num_generations not in (None, config.num_generations):
            raise ConfigurationError(
                f"num_generations={call.num_generations} and {type(config).__name__}(num_generations="
                f"{config.num_generations}) differ. Set it in the configuration."
            )
        return PPOSetup("v2", PPOSettings(), None, config, {"args": config}, beta=config.beta), (), ()
    raise ConfigurationError(
        f"The configuration is a {type(config).__name__}. Pass trl_grpo_ext.compat.ppo.PPOConfig, or a "
        "GroupRelativeConfig."
    )


def _check_presence(call: ResolvedCall, setup: PPOSetup) -> None:
    if call.model is None:
        raise ConfigurationError("No model: pass the policy as model (old name: policy).")
    if setup.era == "v2" and call.grpo.get("train_dataset") is None:
        raise ConfigurationError("`train_dataset` is required.")


def _load_policy(call: ResolvedCall, setup: PPOSetup) -> Any:
    model = unwrap(call.model)
    if isinstance(model, str):
        args = setup.grpo["args"]
        init = dict(args.model_init_kwargs or {})
        if call.grpo.get("quantization_config") is not None:
            init["quantization_config"] = call.grpo.pop("quantization_config")
        if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
            init["device_map"] = None
        model = create_model_from_path(model, **init)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigurationError(_SEQ2SEQ)
    adapter = setup.settings.model_adapter_name
    if adapter is not None and is_peft(model):
        model.set_adapter(adapter)
    return model


def _prepare_rewards(call: ResolvedCall, setup: PPOSetup, model: Any) -> None:
    """Fill in the reward functions: the user's, placeholders for what the trainer scores, PPO's penalties."""
    processors = call.grpo.pop("reward_processing_classes", None)
    given = call.reward_model if call.reward_model is not None else call.reward_funcs
    listed = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    classes = list(processors) if isinstance(processors, list | tuple) else [processors] * max(len(listed), 1)
    inner = getattr(setup.tokenizer, "tokenizer", setup.tokenizer)
    setup.has_reward, setup.reward_model = bool(listed), call.reward_model
    funcs: list[Any] = []
    for column, reward in enumerate(listed):
        if call.reward_model is not None and isinstance(reward, str):
            reward = AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1)
        by_text = isinstance(reward, PreTrainedModel) and column < len(classes) and classes[column] is not None
        if call.reward_model is not None and isinstance(reward, nn.Module) and not by_text:
            check_reward_module(reward, largest_token_id(setup.tokenizer), type(inner).__name__)
            setup.token_rewards[column] = reward
            funcs.append(TrainerScored(_module_name(reward)))
        else:
            funcs.append(reward)
    if not listed:
        funcs.append(TrainerScored("score"))
    extra = 0
    if setup.settings.missing_eos_penalty:
        setup.eos_penalty = (len(funcs), MissingEosPenalty(inner.eos_token_id, setup.settings.missing_eos_penalty))
        funcs.append(TrainerScored("missing_eos_penalty"))
        extra += 1
    setup.score_columns = tuple(range(len(funcs)))
    if setup.settings.kl_in_reward and setup.settings.kl_coef > 0:
        setup.kl_column = len(funcs)
        funcs.append(TrainerScored("kl_penalty"))
        extra += 1
    setup.grpo["reward_funcs"] = funcs
    if processors is not None:
        setup.grpo["reward_processing_classes"] = classes[: len(listed) or 1] + [None] * extra
    args = setup.grpo["args"]
    if args.reward_weights is not None and extra:
        args.reward_weights = [*args.reward_weights, *[1.0] * extra]


def _prepare_reference(call: ResolvedCall, setup: PPOSetup, model: Any) -> None:
    setup.needs_reference = setup.kl_column is not None or setup.beta != 0.0
    reference = call.ref_model
    if reference is not None:
        reference = unwrap(reference)
        if isinstance(reference, str) and setup.needs_reference:
            reference = load_reference(reference, model, setup.grpo["args"].model_init_kwargs)
        if not isinstance(reference, str):
            check_reference(reference, model)
    will_be_peft = is_peft(model) or call.grpo.get("peft_config") is not None
    if setup.needs_reference and reference is None and not will_be_peft:
        reference = frozen_copy(model, call.num_shared_layers)
    setup.reference = reference if setup.needs_reference else None


def _prepare_data(setup: PPOSetup, eval_dataset: Any) -> None:
    if setup.era == "classic":
        # The script iterates trainer.dataloader; TRL's constructor wants enough rows for one generation all the same.
        rows = setup.plan.prompts if setup.plan is not None else 1
        world = setup.grpo["args"].world_size
        setup.grpo["train_dataset"] = Dataset.from_list([{"prompt": "-"}] * rows * world)
        return
    setup.grpo["train_dataset"] = prepare_prompts(setup.dataset, setup.tokenizer)
    if eval_dataset is not None:
        setup.grpo["eval_dataset"] = prepare_prompts(eval_dataset, setup.tokenizer)


def _describe_kl(setup: PPOSetup, model: Any) -> str:
    if setup.beta:
        where = f"KL {setup.beta:g} (k3) in the loss"
    elif setup.kl_column is not None:
        settings = setup.settings
        adaptive = f", adaptive, target {settings.kl_target:g}" if settings.kl_target is not None else ""
        where = f"KL {settings.kl_coef:g} ({settings.kl_estimator}{adaptive}) in the reward"
    else:
        return "no KL penalty"
    if setup.reference is None:
        adapter = setup.settings.ref_adapter_name
        against = f"adapter {adapter!r}" if adapter else "the base model without adapters"
        return f"{where}, against {against}"
    return where


def _module_name(model: Any) -> str:
    path = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    return os.path.basename(path.rstrip("/")) or "reward_model"
