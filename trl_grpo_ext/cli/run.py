"""Train and evaluate a prepared recipe. It imports torch; what can be refused without, ``prepare`` refuses."""

from __future__ import annotations

import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import PrinterCallback, TrainerState, set_seed

from trl_grpo_ext.cli import STARTED, command_line
from trl_grpo_ext.cli.control import ShuffledRewardsTrainer
from trl_grpo_ext.cli.generate import SAMPLING_DEFAULTS, generate_completions
from trl_grpo_ext.cli.outputs import load_before, save_before, save_model, write_results
from trl_grpo_ext.cli.prepare import Prepared
from trl_grpo_ext.cli.rundir import RunDirectory
from trl_grpo_ext.config import GroupRelativeConfig
from trl_grpo_ext.data.splits import to_dataset
from trl_grpo_ext.errors import ConfigurationError, GroupRelativeError
from trl_grpo_ext.memory.adapter import find_adapter, is_peft_model
from trl_grpo_ext.memory.record import load_record
from trl_grpo_ext.memory.trainable import lora_config
from trl_grpo_ext.models import load_tokenizer, resolve_model
from trl_grpo_ext.monitor.callbacks import CheckpointMarker, MetricsWriter, ProgressCallback
from trl_grpo_ext.monitor.evaluate import EvalResult, evaluate
from trl_grpo_ext.monitor.metrics_log import MetricsLog
from trl_grpo_ext.monitor.progress import ProgressDisplay
from trl_grpo_ext.policy.load import load_base
from trl_grpo_ext.recipe import Recipe
from trl_grpo_ext.rewards.registry import unique_names
from trl_grpo_ext.trainer import GroupRelativeTrainer

# Weight 0: counted and logged on every training completion, without a say in the gradient.
MONITORS = ("accuracy_strict", "accuracy_lenient")


def run_training(
    prepared: Prepared, directory: RunDirectory, *, control: bool = False, resume: bool = False, plan: Any = None
) -> dict[str, Any]:
    """Train a prepared recipe, evaluate it before and after, and write every result; return the summary.

    Args:
        prepared: from ``prepare``.
        directory: an opened run directory.
        control: True permutes the rewards within each step, so that nothing can be learnt.
        resume: True keeps the evaluation before training that an earlier part of the run made.
        plan: a ``MemoryPlan`` to log beside the memory that is used.
    """
    console = Console(stderr=False)
    _quieten()
    recipe = prepared.recipe
    set_seed(int(recipe.trainer.get("seed", 42)))
    args = trainer_config(recipe, directory.path)
    directory.begin(recipe, control=control)
    say = _say_on_main(console, args)
    counts = prepared.splits.counts
    say(
        f"{recipe.name}: {counts.train} training and {counts.held_out} held-out prompts from {recipe.data.source} "
        f"({counts.read} rows, {counts.duplicates} duplicates)"
    )
    log = MetricsLog(directory.metrics)
    trainer = _build_trainer(prepared, args, control, [CheckpointMarker(), MetricsWriter(log)], say)
    if plan is not None:
        trainer.compare_memory_with(plan)
    display = ProgressDisplay(console, accuracy_key=_metric_key(trainer, MONITORS[0]))
    trainer.add_callback(ProgressCallback(display))

    before = load_before(directory.before) if resume else None
    if before is None and recipe.eval.before:
        before = _evaluate_trainer(trainer, prepared, say, "before training")
        if before is not None and args.process_index == 0:
            save_before(directory.before, before)

    step = None if directory.checkpoint is None else int(directory.checkpoint.name.split("-")[-1])
    if args.process_index == 0:
        log.start(step)
    if step is not None:
        say(f"resuming from {directory.checkpoint}")
    try:
        if step is not None and 0 < args.max_steps <= step and not _is_sharded(trainer):
            _take_over(trainer, directory.checkpoint)
        else:
            trainer.train(resume_from_checkpoint=None if directory.checkpoint is None else str(directory.checkpoint))
    except KeyboardInterrupt:
        display.stop()
        say(f"interrupted at step {trainer.state.global_step}; continue with --resume")
        raise
    train_seconds = log.elapsed_s()
    save_model(trainer, directory.path)
    after = _evaluate_trainer(trainer, prepared, say, "after training")
    summary = {
        "recipe": recipe.name,
        "model": recipe.model.name,
        "control": control,
        "seed": args.seed,
        "steps": trainer.state.global_step,
        "asked": {"max_steps": args.max_steps, "num_train_epochs": args.num_train_epochs},
        "train_seconds": round(train_seconds, 1),
        "wall_seconds": round(time.monotonic() - STARTED, 1),
        "command": command_line(),
        "machine": _machine(),
    }
    if args.process_index == 0:
        accuracy_keys = {
            label: key
            for label, name in zip(("strict", "lenient"), MONITORS, strict=True)
            if (key := _metric_key(trainer, name)) is not None
        }
        write_results(directory, prepared, summary, before, after, accuracy_keys, adapter=is_peft_model(trainer.model))
        if before is not None and after is not None:
            say(f"held-out strict {before.strict} → {after.strict}, lenient {before.lenient} → {after.lenient}")
        say(f"done in {summary['wall_seconds']:.0f} s: {directory.path}")
    return summary


def run_evaluation(
    prepared: Prepared,
    checkpoint: Path | None,
    *,
    num_samples: int = 0,
    seed: int = 0,
    quiet: bool = False,
    as_trained: bool = True,
) -> EvalResult:
    """Return the accuracy of a checkpoint (None: of the untrained model) on the held-out rows.

    Args:
        prepared: from ``prepare``.
        checkpoint: a folder with an adapter or a whole model.
        num_samples: 0 decodes greedily, otherwise completions per prompt at the trainer's temperature.
        seed: of the sampling.
        quiet: True prints nothing on the way.
        as_trained: as in ``load_policy``.
    """
    _quieten()
    console = Console(stderr=True, quiet=quiet)
    recipe = prepared.recipe
    if prepared.strict is None or prepared.lenient is None:
        raise ConfigurationError("the held-out rows have no answer to compare with; set data.answer")
    model = load_policy(
        recipe,
        checkpoint,
        announce=lambda line: console.print(line, highlight=False, markup=False),
        as_trained=as_trained,
    )
    tokenizer = _tokenizer(recipe, checkpoint)
    rows = prepared.splits.held_out[: recipe.eval.limit]
    chosen = {name: recipe.trainer[name] for name in SAMPLING_DEFAULTS if recipe.trainer.get(name) is not None}

    def generate(prompts: list[Any]) -> Any:
        return generate_completions(
            model,
            tokenizer,
            prompts,
            max_new_tokens=_max_new_tokens(recipe),
            batch_size=recipe.eval.batch_size,
            sampling=chosen if num_samples else None,
            seed=seed,
            template_kwargs=recipe.trainer.get("chat_template_kwargs"),
            announce=lambda done, total: console.print(f"{done}/{total} completions", highlight=False),
        )

    return evaluate(
        generate,
        rows,
        prepared.strict,
        prepared.lenient,
        num_samples=max(1, num_samples),
        greedy=num_samples == 0,
    )


def load_policy(
    recipe: Recipe, checkpoint: Path | None, *, announce: Any = lambda _line: None, as_trained: bool = True
) -> Any:
    """Return the recipe's model with the weights of a checkpoint, in evaluation mode, on the GPU if there is one.

    Args:
        recipe: names the base model.
        checkpoint: a folder with an adapter or a whole model; None for the base model itself.
        announce: called with one line before slow work.
        as_trained: True stores the base in the bits that the checkpoint's run trained on, whatever the recipe says of
            ``memory``; False goes by the recipe.
    """
    whole = checkpoint is not None and not (checkpoint / "adapter_config.json").is_file()
    base = str(checkpoint) if whole else resolve_model(recipe.model.name, announce=announce)
    kwargs = _model_init_kwargs(recipe)
    if whole:
        kwargs.pop("revision", None)
    # Without a checkpoint, what training starts from.
    adapter = None if whole else checkpoint or recipe.trainer.get("adapter")
    fp16 = bool(recipe.trainer.get("fp16"))
    record = load_record(checkpoint) if as_trained and checkpoint is not None and not whole else None
    model: Any = load_base(base, kwargs, recipe.trainer.get("memory"), fp16=fp16, record=record)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(find_adapter(str(adapter)) or adapter))
    return model.eval()


def trainer_config(recipe: Recipe, output_dir: Path) -> GroupRelativeConfig:
    """Return the trainer's settings: the recipe's over defaults that suit a command line.

    Raises:
        ConfigurationError: for a combination that TRL or transformers refuses.
    """
    values: dict[str, Any] = {"logging_steps": 1, "report_to": "none", "save_strategy": "steps"}
    if not torch.cuda.is_available() and not _other_accelerator():
        # TRL's default is bf16 autocast, which the CPU backend refuses; the weights keep the dtype they are loaded in.
        values |= {"use_cpu": True, "bf16": False}
    values |= {**recipe.trainer, "output_dir": str(output_dir), "disable_tqdm": True}
    values["model_init_kwargs"] = {**_model_init_kwargs(recipe), **(recipe.trainer.get("model_init_kwargs") or {})}
    try:
        return GroupRelativeConfig(**values)
    except GroupRelativeError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigurationError(f"trainer: {error}") from error


def _model_init_kwargs(recipe: Recipe) -> dict[str, Any]:
    model = recipe.model
    kwargs: dict[str, Any] = {"dtype": model.dtype}
    if model.attn_implementation is not None:
        kwargs["attn_implementation"] = model.attn_implementation
    if model.revision is not None:
        kwargs["revision"] = model.revision
    if model.trust_remote_code:
        kwargs["trust_remote_code"] = True
    return kwargs


def _tokenizer(recipe: Recipe, checkpoint: Path | None = None) -> Any:
    """Return the tokenizer, the checkpoint's own where it has one, fit for generation."""
    own = checkpoint is not None and (checkpoint / "tokenizer_config.json").is_file()
    return load_tokenizer(
        str(checkpoint) if own else recipe.model.name,
        revision=None if own else recipe.model.revision,
        trust_remote_code=recipe.model.trust_remote_code,
        chat=recipe.data.chat,
    )


def _build_trainer(
    prepared: Prepared, args: GroupRelativeConfig, control: bool, callbacks: list[Any], say: Any
) -> GroupRelativeTrainer:
    """Return the trainer with the recipe's rewards and, at weight 0, the accuracies to watch."""
    trainer_class = ShuffledRewardsTrainer if control else GroupRelativeTrainer
    trainer = trainer_class(**trainer_arguments(prepared, args, say), callbacks=callbacks)
    trainer.reward_func_names = unique_names(_reward_names(prepared))
    trainer.remove_callback(PrinterCallback)
    return trainer


def trainer_arguments(prepared: Prepared, args: GroupRelativeConfig, say: Any = lambda _line: None) -> dict[str, Any]:
    """Return the keyword arguments of a trainer, TRL's or ours, for a prepared recipe.

    Args:
        prepared: from ``prepare``.
        args: the trainer's settings; the weights of the rewards are written into it.
        say: called with a line before slow work.
    """
    recipe, rewards = prepared.recipe, prepared.rewards
    functions, weights = list(rewards.functions), list(rewards.weights)
    if _watches_accuracy(prepared):
        functions += [prepared.strict, prepared.lenient]
        weights += [0.0, 0.0]
    args.reward_weights = weights
    return {
        "model": resolve_model(recipe.model.name, announce=say),
        "reward_funcs": functions,
        "args": args,
        "train_dataset": to_dataset(prepared.splits.train),
        "processing_class": _tokenizer(recipe),
        "peft_config": None if recipe.peft is None else lora_config(recipe.peft),
    }


def _reward_names(prepared: Prepared) -> list[str]:
    return [*prepared.rewards.names, *(MONITORS if _watches_accuracy(prepared) else ())]


def _watches_accuracy(prepared: Prepared) -> bool:
    return prepared.recipe.eval.monitor and prepared.strict is not None


def _evaluate_trainer(trainer: GroupRelativeTrainer, prepared: Prepared, say: Any, when: str) -> EvalResult | None:
    """Return the accuracy of the trainer's model on the held-out rows, or None where there is nothing to compare.

    One process evaluates while the others wait: the set is small, and the figures are those of one process.
    """
    recipe, accelerator = prepared.recipe, trainer.accelerator
    rows = prepared.splits.held_out[: recipe.eval.limit]
    if not rows or prepared.strict is None or prepared.lenient is None:
        return None
    result = None
    if accelerator.is_main_process:
        say(f"evaluating {len(rows)} held-out prompts {when}")
        model = accelerator.unwrap_model(trainer.model)

        def generate(prompts: list[Any]) -> Any:
            return generate_completions(
                model,
                trainer.processing_class,
                prompts,
                max_new_tokens=_max_new_tokens(recipe),
                batch_size=recipe.eval.batch_size,
                template_kwargs=recipe.trainer.get("chat_template_kwargs"),
            )

        result = evaluate(generate, rows, prepared.strict, prepared.lenient)
        say(f"{when}: strict {result.strict}, lenient {result.lenient}, {result.seconds:.0f} s")
    accelerator.wait_for_everyone()
    return result


def _max_new_tokens(recipe: Recipe) -> int:
    return int(recipe.eval.max_new_tokens or recipe.trainer.get("max_completion_length") or 256)


def _metric_key(trainer: GroupRelativeTrainer, name: str) -> str | None:
    return f"rewards/{name}/mean" if name in trainer.reward_func_names else None


def _is_sharded(trainer: GroupRelativeTrainer) -> bool:
    return bool(trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)


def _take_over(trainer: GroupRelativeTrainer, checkpoint: Any) -> None:
    """Load weights and state of a checkpoint that has every step: ``train`` makes one more before it looks."""
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))


def _say_on_main(console: Console, args: Any) -> Any:
    def say(line: str) -> None:
        if args.process_index == 0:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    return say


def _other_accelerator() -> bool:
    return torch.backends.mps.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())


def _quieten() -> None:
    """Keep the screen for what matters: no bar per loaded file, no notice of a rename inside transformers."""
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\..*")
    logging.getLogger("transformers.trainer").setLevel(logging.ERROR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _machine() -> dict[str, Any]:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"cpus": os.cpu_count(), "torch_threads": torch.get_num_threads(), "gpus": names}
