"""The life of an adapter: loaded trainable whatever its name, anchored at its start, saved so that PEFT reads it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ScriptedRollouts
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from runs import adapter_state, fresh_lora, make, save_adapter, trainable_dtypes
from tiny import tiny_model
from transformers import AutoModelForCausalLM

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.memory.record import PolicyRecord, load_record


@pytest.fixture(scope="module")
def named_adapters(base: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: save_adapter(base, tmp_path_factory.mktemp(name), name) for name in ("default", "sft", "ref")}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def first_kl(trainer: Any) -> float:
    """Return the KL that was logged for the first step, before any update."""
    return trainer.state.log_history[0]["kl"]


@pytest.mark.parametrize("how", ["setting", "keyword", "model string", "beside a loaded base"])
def test_an_adapter_directory_is_trained_further(how: str, base: str, adapter: str, tmp_path: Path) -> None:
    if how == "setting":
        trainer = make(tmp_path, base, adapter=adapter)
    elif how == "keyword":
        trainer = make(tmp_path, base, keywords={"adapter": adapter})
    elif how == "model string":
        trainer = make(tmp_path, adapter)
    else:
        trainer = make(tmp_path, AutoModelForCausalLM.from_pretrained(base), adapter=adapter)
    before = adapter_state(trainer.model)
    assert any(value.abs().max() > 0.1 for value in before.values())  # the saved one, not a fresh one
    trainer.train()
    assert any(not torch.equal(before[name], value) for name, value in adapter_state(trainer.model).items())


@pytest.mark.parametrize("name", ["default", "sft", "ref"])
@pytest.mark.parametrize("given", ["directory", "PeftModel"])
def test_kl_is_zero_at_the_start_whatever_the_name(
    name: str, given: str, base: str, named_adapters: dict[str, str], tmp_path: Path
) -> None:
    directory = named_adapters[name]
    inside = directory if name == "default" else f"{directory}/{name}"
    if given == "directory":
        trainer = make(tmp_path, base, adapter=inside if name == "ref" else directory, beta=0.1, save_strategy="steps")
    else:
        loaded = AutoModelForCausalLM.from_pretrained(base)
        model = PeftModel.from_pretrained(loaded, inside, adapter_name=name, is_trainable=True)
        trainer = make(tmp_path, model, beta=0.1, save_strategy="steps")
    assert list(trainer.model.active_adapters) == ["default"]
    start = adapter_state(trainer.model)
    trainer.args.save_steps = 2
    trainer.state.save_steps = 2
    trainer.train()
    assert first_kl(trainer) == 0.0
    assert trainer.state.log_history[1]["kl"] > 0.0
    assert_same(adapter_state(trainer.model, "ref"), start)  # the anchor stays

    # a checkpoint is the trained adapter for plain PEFT, which needs no copy
    written = tmp_path / "checkpoint-2"
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(written))
    assert list(plain.peft_config) == ["default"]
    assert_same(adapter_state(plain), adapter_state(trainer.model))
    auto = AutoPeftModelForCausalLM.from_pretrained(str(written))
    assert_same(adapter_state(auto), adapter_state(trainer.model))


def test_the_anchor_can_be_the_base(base: str, adapter: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, base, adapter=adapter, beta=0.1, kl_reference="base", max_steps=1)
    assert list(trainer.model.peft_config) == ["default"]
    trainer.train()
    assert first_kl(trainer) > 1e-4  # the adapter is not the base


def test_a_new_adapter_can_be_anchored_where_it_starts(base: str, tmp_path: Path) -> None:
    """An adapter whose B is not zero starts away from the base."""
    away = make(tmp_path, base, peft_config=fresh_lora(), beta=0.1, max_steps=1)
    away.train()
    assert first_kl(away) > 1e-6
    here = make(tmp_path, base, peft_config=fresh_lora(), beta=0.1, kl_reference="start", max_steps=1)
    here.train()
    assert first_kl(here) == 0.0


@pytest.mark.parametrize("kl_reference", [None, "base"])
def test_resuming_keeps_the_anchor(kl_reference: str | None, base: str, adapter: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"beta": 0.1, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = make(tmp_path / "whole", base, adapter=adapter, kl_reference=kl_reference, **fields)
    whole.train()
    saved = tmp_path / "whole" / "checkpoint-2"
    assert load_record(saved) == PolicyRecord(kl_reference or "start")
    # The second half starts from the checkpoint's adapter and does not name the anchor: it must be the first run's.
    rollouts = ScriptedRollouts()
    rollouts.num_rows = 16  # where the first run stood
    rest = make(tmp_path / "rest", base, adapter=str(saved), rollouts=rollouts, **fields)
    rest.train(resume_from_checkpoint=str(saved))
    expected = [entry["kl"] for entry in whole.state.log_history if "kl" in entry]
    found = [entry["kl"] for entry in rest.state.log_history if "kl" in entry]
    assert found[2:] == pytest.approx(expected[2:], rel=1e-3)
    if kl_reference is None:
        assert_same(adapter_state(rest.model, "ref"), adapter_state(whole.model, "ref"))
    else:
        assert "ref" not in rest.model.peft_config


def test_resuming_against_another_anchor_is_refused(base: str, adapter: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"beta": 0.1, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    make(tmp_path, base, adapter=adapter, **fields).train()
    again = make(tmp_path, base, adapter=adapter, kl_reference="base", **fields)
    with pytest.raises(ConfigurationError, match=r"kl_reference='base' contradicts the checkpoint .*'start'"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_frozen_adapter_is_unfrozen_aloud(
    beta: float, base: str, adapter: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    assert not any(p.requires_grad for p in model.parameters())
    with caplog.at_level(logging.WARNING):
        trainer = make(tmp_path, model, beta=beta)
    assert "The adapter was frozen" in caplog.text
    before = adapter_state(trainer.model)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    saved = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "saved"))
    assert any(not torch.equal(before[name], value) for name, value in adapter_state(saved).items())


def test_a_model_without_a_trainable_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No tensor of the LlamaForCausalLM is trainable"):
        make(tmp_path, tiny_model().requires_grad_(False))


def test_errors_of_the_adapter_argument(base: str, adapter: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="peft_config, which makes a new adapter, contradicts it"):
        make(tmp_path, base, adapter=adapter, peft_config=fresh_lora())
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with pytest.raises(ConfigurationError, match="for a model that has an adapter already"):
        make(tmp_path, loaded, adapter=adapter)
    with pytest.raises(ConfigurationError, match=r"adapter='.*/empty' is no directory with an adapter_config.json"):
        make(tmp_path, base, adapter=str(tmp_path / "empty"))
    with pytest.raises(ConfigurationError, match="cannot be put on LlamaForCausalLM"):
        make(tmp_path, tiny_model(layers=1, hidden=32), adapter=adapter)
    with pytest.raises(ConfigurationError, match=r"adapter='x' contradicts adapter='y' of the configuration"):
        make(tmp_path, base, adapter="y", keywords={"adapter": "x"})


def test_two_adapters_in_one_directory_must_be_chosen_from(base: str, tmp_path: Path) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), fresh_lora(), adapter_name="one")
    model.add_adapter("two", fresh_lora())
    model.save_pretrained(str(tmp_path / "both"))
    with pytest.raises(ConfigurationError, match=r"holds 2 adapters \(one, two\); name the folder of one"):
        make(tmp_path, base, adapter=str(tmp_path / "both"))
    make(tmp_path, base, adapter=str(tmp_path / "both" / "two"))


def test_names_that_are_taken(base: str, tmp_path: Path) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), fresh_lora())
    model.add_adapter("ref", fresh_lora())
    with pytest.raises(ConfigurationError, match="has an adapter called 'ref' besides the active one"):
        make(tmp_path, model, beta=0.1)
    other = get_peft_model(AutoModelForCausalLM.from_pretrained(base), fresh_lora())
    other.add_adapter("sft", fresh_lora())
    other.set_adapter("sft")
    with pytest.raises(ConfigurationError, match="active adapter is called 'sft' and another one 'default'"):
        make(tmp_path, other)


def test_an_adapter_in_half_precision_is_trained_in_float32(base: str, adapter: str, tmp_path: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(loaded, adapter, is_trainable=True, autocast_adapter_dtype=False)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.bfloat16}
    assert trainable_dtypes(make(tmp_path, model, memory="lora")) == {torch.float32}


def edited_model(base: str) -> Any:
    """Return a model that is no longer what its name says, as after merging an adapter in memory."""
    model = AutoModelForCausalLM.from_pretrained(base)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model


def test_an_edited_model_is_its_own_reference(base: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, edited_model(base), beta=0.1)
    assert trainer.ref_model is not trainer.model
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())
    trainer.train()
    assert first_kl(trainer) == 0.0
    assert trainer.state.log_history[1]["kl"] > 0.0  # a copy: it does not move with the policy


def test_a_reference_by_name_on_request_is_trls(base: str, tmp_path: Path) -> None:
    """Negative control: re-read from its name, the reference is another model."""
    trainer = make(tmp_path, edited_model(base), beta=0.1, kl_reference="base", max_steps=1)
    trainer.train()
    assert first_kl(trainer) > 1e-3
    theirs = make(tmp_path, edited_model(base), ours=False, beta=0.1, max_steps=1)
    theirs.train()
    assert first_kl(theirs) == pytest.approx(first_kl(trainer), rel=0.05)  # a mean over micro-batches


def test_a_model_that_was_never_saved_can_have_a_kl_term(tmp_path: Path) -> None:
    trainer = make(tmp_path, tiny_model(), beta=0.1, max_steps=1)
    trainer.train()
    assert first_kl(trainer) == 0.0


def test_full_tuning_from_a_name_reads_the_reference_from_it(base: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, base, beta=0.1, max_steps=1)
    trainer.train()
    assert first_kl(trainer) == 0.0
