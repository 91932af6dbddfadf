"""Canaries: one per seam, failing with its name when TRL moves the ground under an override."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import requires, version
from typing import Any

import pytest
import torch
import transformers.trainer
from harness import ScriptedRollouts, build, prompt_rows
from packaging.requirements import Requirement
from tiny import tiny_model
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_ext import GroupRelativeConfig, GroupRelativeTrainer
from trl_grpo_ext.errors import SeamError
from trl_grpo_ext.seams import ATTRIBUTES, SEAMS, Seam, check_seams

BY_NAME = {seam.name: seam for seam in SEAMS}


def squeezed(text: str) -> str:
    """Return the text without blanks, so that a reformatted TRL is the same TRL."""
    return re.sub(r"\s+", "", text)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("seams")
    trainer, _ = build(False, directory, model=tiny_model(layers=1), rows=prompt_rows(8), rollouts=ScriptedRollouts())
    trainer.create_optimizer_and_scheduler(num_training_steps=1)
    return trainer


@pytest.mark.parametrize("name", BY_NAME)
def test_signature(name: str) -> None:
    check_seams(seams=[BY_NAME[name]])


@pytest.mark.parametrize("name", BY_NAME)
def test_lines_relied_on(name: str) -> None:
    source = squeezed(inspect.getsource(inspect.unwrap(getattr(GRPOTrainer, name))))
    missing = [line for line in BY_NAME[name].relies_on if squeezed(line) not in source]
    assert not missing, (
        f"seam GRPOTrainer.{name} of TRL {version('trl')}: {missing} is gone, and our override needs it "
        f"({BY_NAME[name].why})"
    )


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_attribute(attribute: str, trainer: Any) -> None:
    assert hasattr(trainer, attribute), f"seam attribute GRPOTrainer.{attribute} is gone in TRL {version('trl')}"


OVERRIDDEN = [s.name for s in SEAMS if getattr(GroupRelativeTrainer, s.name).__module__.startswith("trl_grpo_ext")]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_our_override_takes_the_same_call(name: str) -> None:
    """Names and order: TRL calls it by either. What an override passes on unseen, it may take as keywords."""
    ours = inspect.signature(getattr(GroupRelativeTrainer, name))
    kinds = {parameter.kind for parameter in ours.parameters.values()}
    names = BY_NAME[name].parameters
    ours.bind(None, **dict.fromkeys(names))
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        named = [
            n for n in list(ours.parameters)[1:] if ours.parameters[n].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        assert tuple(named) == names[: len(named)], f"seam {name}"
        assert len(named) == len(names) or inspect.Parameter.VAR_KEYWORD in kinds, f"seam {name}"


def test_overridden_seams_are_found() -> None:
    assert {"__init__", "training_step", "_calculate_rewards", "_get_per_token_logps_and_entropies"} <= set(OVERRIDDEN)


def test_table_names_every_override() -> None:
    """A method of TRL's trainer that we override is a seam, whatever file the override lives in."""
    public = {"train", "evaluate", "save_model", "__init__"}  # transformers' public interface, except the constructor
    ours = [home for home in GroupRelativeTrainer.__mro__ if home.__module__.startswith("trl_grpo_ext")]
    overridden = {name for home in ours for name, value in vars(home).items() if inspect.isfunction(value)}
    shared = {name for name in overridden if hasattr(GRPOTrainer, name)} - public - set(dir(object))
    assert shared <= set(BY_NAME), f"not in trl_grpo_ext.seams.SEAMS: {sorted(shared - set(BY_NAME))}"


def test_training_loop_of_transformers() -> None:
    """Our `training_step` collects micro-batches until the loop says that gradients are synchronised."""
    source = squeezed(inspect.getsource(transformers.trainer))
    for line in (
        "self.current_gradient_accumulation_steps = len(batch_samples)",
        "self.accelerator.gradient_state._set_sync_gradients(do_sync_step)",
        "tr_loss_step = self.training_step(model, inputs, num_items_in_batch)",
    ):
        assert squeezed(line) in source, (
            f"seam training loop of transformers {transformers.__version__}: {line} is gone"
        )


def test_loss_is_scaled_by_trl_and_not_again(trainer: Any) -> None:
    """The window calls `compute_loss` and goes backward without transformers' own division by accumulation."""
    assert GRPOTrainer.loss_is_scaled_for_ga is True, "seam loss_is_scaled_for_ga"


def test_generation_batch_in_prompt_order(trainer: Any) -> None:
    """Seam _generate_and_score_completions: row i of its output answers prompt i, one tensor row each."""
    prompts = [row for row in prompt_rows(2) for _ in range(4)]
    trainer.model.train()
    output = trainer._generate_and_score_completions([dict(row) for row in prompts])
    scripted = ScriptedRollouts()
    for index in range(8):
        length = int(output["completion_mask"][index].sum())
        assert output["completion_ids"][index, :length].tolist() == scripted.completion(index)
    assert {name for name, value in output.items() if value.ndim and len(value) != 8} == set()
    assert output["num_items_in_batch"] == output["completion_mask"].sum()


def test_extra_rows_travel_with_the_batch(trainer: Any) -> None:
    """Seam _prepare_inputs: a tensor added to the generation batch is shuffled and split like TRL's own."""
    score = trainer._generate_and_score_completions

    def marked(inputs: Any) -> Any:
        output = score(inputs)
        output["mark"] = output["completion_ids"][:, 0].clone()
        return output

    trainer._generate_and_score_completions = marked
    trainer._buffered_inputs, trainer._step = None, 0
    try:
        trainer.model.train()
        batch = trainer._prepare_inputs([dict(row) for row in prompt_rows(2) for _ in range(4)])
    finally:
        del trainer._generate_and_score_completions
    assert len(batch["mark"]) == trainer.args.per_device_train_batch_size == 4
    assert torch.equal(batch["mark"], batch["completion_ids"][:, 0])


def test_missing_method_is_named() -> None:
    class Empty:
        pass

    with pytest.raises(SeamError, match=r"Empty\.__call_me__ of TRL .* does not exist.*because it rings"):
        check_seams(Empty, [Seam("__call_me__", (), (), "it rings")])


def test_changed_signature_is_named() -> None:
    class Changed(GRPOTrainer):
        def _prepare_inputs(self, batch: Any, extra: Any) -> Any: ...

    with pytest.raises(SeamError, match=r"Changed\._prepare_inputs .* takes \(batch, extra\), expected \(generation_b"):
        check_seams(Changed)


def test_installed_trl_is_in_the_supported_range() -> None:
    (ours,) = [Requirement(text) for text in requires("trl-grpo-ext") or [] if Requirement(text).name == "trl"]
    assert ours.specifier.contains(version("trl")), f"TRL {version('trl')} is not in {ours.specifier}"
    assert "trl>=1.16,<2" in inspect.getsource(check_seams), "the advice of check_seams names the supported range"


def test_config_keeps_trl_s_fields() -> None:
    """Every field of TRL keeps its name and default."""
    theirs, ours = GRPOConfig.__dataclass_fields__, GroupRelativeConfig.__dataclass_fields__
    assert set(theirs) <= set(ours)
    changed = [name for name, field in theirs.items() if field.default != ours[name].default]
    assert changed == []
    added = set(ours) - set(theirs)
    assert not added & {name for name in dir(GRPOTrainer) if not name.startswith("__")}
