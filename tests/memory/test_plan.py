"""Plans: what is chosen, that the order of levers and ``allow`` are kept, and that doubt is said."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_config

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.memory.bound import lower_bound
from trl_grpo_ext.memory.closed_forms import GIB
from trl_grpo_ext.memory.job import Job, job_of
from trl_grpo_ext.memory.mode import MemoryMode
from trl_grpo_ext.memory.plan import MemoryPlan, plan_memory
from trl_grpo_ext.memory.search import predicted_seconds
from trl_grpo_ext.memory.shapes import known_models, read_config, shape_of

ROOT = Path(__file__).parents[2]
SETTINGS = SimpleNamespace(
    per_device_train_batch_size=8, gradient_accumulation_steps=4, max_completion_length=1024, num_generations=8
)


def quick(model: Any, gib: float, peft: Any = None, config: Any = SETTINGS, **kwargs: Any) -> MemoryPlan:
    return plan_memory(model, config, peft, budget_gib=gib, prompt_len=512, **{"tier": "T1", **kwargs})


def test_known_models_have_their_published_sizes() -> None:
    """Parameters as the model cards state them, in millions; biases and norms of heads are left out."""
    published = {"Qwen2.5-0.5B": 494, "Qwen2.5-7B": 7616, "Llama-3.1-8B": 8030, "Qwen3-4B": 4022, "SmolLM2-135M": 134.5}
    for name, millions in published.items():
        assert shape_of(read_config(name)).parameters / 1e6 == pytest.approx(millions, rel=2e-3), name
    assert all(shape_of(config).is_counted for config in known_models().values())


@pytest.mark.parametrize("memory", ["full", "lora", "qlora", "qlora-8bit"])
def test_the_bound_is_below_the_simulation_and_counts_the_weights(memory: str) -> None:
    config = SimpleNamespace(**vars(SETTINGS), memory=memory)
    bound = quick("Qwen2.5-0.5B", 80, {"r": 16}, config, tier="T0")
    plan = quick("Qwen2.5-0.5B", 80, {"r": 16}, config, mode=memory)
    assert bound.fits == "uncertain"
    assert bound.tier == "T0"
    assert bound.process <= plan.process
    assert bound.phases["train"]["weights"] == pytest.approx(plan.phases["forward"]["weights"], rel=2e-3)


def test_a_full_plan_agrees_with_the_extrapolation() -> None:
    full = quick("SmolLM2-135M", 24, tier="T2")
    shallow = quick("SmolLM2-135M", 24, mode=full.mode)
    assert (full.tier, shallow.tier) == ("T2", "T1")
    # Rounding every block to 512 bytes is all that the extrapolation leaves out.
    assert shallow.peak == pytest.approx(full.peak, rel=0.01)
    assert full.peak <= full.reserved <= full.process
    for phase, parts in full.phases.items():
        assert sum(parts.values()) <= full.process, phase
        assert all(size > 0 for name, size in parts.items() if name != "reserved, unused")


def test_a_roomy_card_gives_nothing_up() -> None:
    plan = quick("SmolLM2-135M", 80)
    assert plan.fits == "yes"
    assert plan.mode.optim == "adamw_torch_fused"
    assert not plan.mode.gradient_checkpointing
    assert not plan.mode.activation_offload
    assert plan.mode.tuning == "full"
    assert plan.margin > 0


def test_levers_come_in_their_order() -> None:
    """As the card shrinks: checkpointing or smaller passes, then 8-bit states; never another tuning by itself."""
    order = []
    for gib in (80, 16, 9, 4):
        plan = quick("Qwen2.5-1.5B", gib, with_alternatives=False)
        assert plan.mode.tuning == "full"
        assert plan.mode.base == "bfloat16"
        order.append((plan.fits, plan.mode.gradient_checkpointing, plan.mode.optim))
        if plan.fits == "yes":
            assert plan.process <= 0.9 * gib * GIB
    assert order[0] == ("yes", False, "adamw_torch_fused")
    assert order[-1][0] == "no"
    stages = ["adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"]
    chosen = [stages.index(optim) for fits, _, optim in order if fits == "yes"]
    assert chosen == sorted(chosen)
    assert chosen[-1] > 0


def test_allow_is_needed_and_used() -> None:
    refused = quick("Qwen2.5-7B", 24)
    assert refused.fits == "no"
    assert refused.mode.tuning == "full"
    assert 1 <= len(refused.alternatives) <= 3
    assert "trainer.memory: lora" in refused.alternatives[0].change
    assert "allow=" not in refused.explain()
    allowed = quick("Qwen2.5-7B", 24, allow=("lora",))
    assert (allowed.fits, allowed.mode.tuning, allowed.mode.base) == ("yes", "lora", "bfloat16")
    assert allowed.process / GIB == pytest.approx(refused.alternatives[0].process_gib)
    small = quick("Qwen2.5-7B", 12, allow=("lora", "qlora"))
    assert (small.fits, small.mode.base) == ("yes", "nf4")


def test_completions_and_groups_stay() -> None:
    plan = quick("SmolLM2-135M", 2, with_alternatives=False)
    assert plan.job.completion_tokens == 1024
    assert plan.job.num_generations == 8
    changed = plan.apply(SimpleNamespace(**vars(SETTINGS), memory=None, optim="adamw_torch"))
    assert (changed.max_completion_length, changed.num_generations) == (1024, 8)


def test_a_cheaper_mode_that_fits_is_preferred() -> None:
    """No mode of the neutral levers that fits is predicted to be faster than the one that was chosen."""
    plan = quick("Qwen2.5-0.5B", 12)
    shape, chosen = shape_of(read_config("Qwen2.5-0.5B")), plan.mode
    seconds = predicted_seconds(shape, plan.job, chosen)
    for change in (
        {"gradient_checkpointing": False},
        {"max_tokens_per_micro_batch": 2048, "activation_offload": False},
    ):
        other = replace(chosen, **change)
        if other != chosen and predicted_seconds(shape, plan.job, other) < seconds:
            assert quick("Qwen2.5-0.5B", 12, mode=other).fits == "no", change


def test_what_the_user_fixed_stays() -> None:
    memory = {"tuning": "full", "gradient_checkpointing": True, "max_tokens_per_micro_batch": 2048}
    plan = quick("SmolLM2-135M", 80, config=SimpleNamespace(**vars(SETTINGS), memory=memory))
    assert plan.mode.gradient_checkpointing
    assert plan.mode.max_tokens_per_micro_batch == 2048


def test_what_is_written_is_fixed_without_a_mode() -> None:
    written = SimpleNamespace(**vars(SETTINGS), gradient_checkpointing=False, optim="adamw_bnb_8bit")
    mode = quick("SmolLM2-135M", 3, config=written, with_alternatives=False).mode
    assert (mode.gradient_checkpointing, mode.optim) == (False, "adamw_8bit")


def test_as_configured_plans_what_will_run_and_names_the_line_that_would_fit() -> None:
    """6 GiB: too few without checkpointing, which the planner must not assume, but enough with other settings."""
    written = SimpleNamespace(**vars(SETTINGS), gradient_checkpointing=False, max_tokens_per_micro_batch=8192)
    plan = quick("SmolLM2-135M", 6, config=written, mode="as-configured")
    assert plan.fits == "no"
    assert not plan.mode.gradient_checkpointing
    assert plan.mode.max_tokens_per_micro_batch == 8192
    (change,) = plan.alternatives
    assert set(change.settings) <= {"gradient_checkpointing", "max_tokens_per_micro_batch", "optim", "memory"}
    assert all(f"trainer.{name}: " in change.change for name in change.settings)
    followed = SimpleNamespace(**{**vars(written), **change.settings})
    assert quick("SmolLM2-135M", 6, config=followed, mode="as-configured").fits == "yes"


def test_uncounted_optimisers_are_a_doubt() -> None:
    plan = quick("SmolLM2-135M", 80, config=SimpleNamespace(**vars(SETTINGS), optim="adafactor"))
    assert plan.fits == "uncertain"
    assert any("adafactor" in line for line in plan.assumptions)


def test_two_copies_of_the_weights_with_vllm() -> None:
    """A 7B with an adapter and vLLM hold 14 GiB each: impossible on 24, so the trainer samples itself."""
    plan = quick("Qwen2.5-7B", 24, {"r": 16}, engine="vllm", with_alternatives=False)
    assert plan.mode.vllm_gpu_memory_utilization is None
    roomy = quick("Qwen2.5-7B", 80, {"r": 16}, engine="vllm")
    share = roomy.mode.vllm_gpu_memory_utilization
    assert share is not None
    assert roomy.phases["generate"]["vLLM"] == round(share * 80 * GIB)
    assert roomy.fits == "uncertain", "what vLLM needs beside weights and cache is a guess, and so said"


def test_reference_model_only_with_kl_and_full_tuning() -> None:
    config = SimpleNamespace(**vars(SETTINGS), beta=0.04)
    full, lora = quick("SmolLM2-135M", 80, None, config), quick("SmolLM2-135M", 80, {"r": 8}, config)
    assert full.phases["forward"]["reference"] == pytest.approx(full.phases["forward"]["weights"], rel=1e-3)
    assert "reference" not in lora.phases["forward"]


def test_doubt_is_said() -> None:
    config = tiny_config("llama").to_dict()
    config["layer_types"] = ["linear_attention", "full_attention"]
    plan = quick(config, 24, tier="T0")
    assert plan.fits == "uncertain"
    assert any("linear_attention" in line for line in plan.assumptions)


def test_a_failing_simulation_leaves_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("aten::novel has no meta kernel")

    monkeypatch.setattr("trl_grpo_ext.memory.estimate.simulate", fail)
    monkeypatch.setattr("trl_grpo_ext.memory.estimate._shallow_runs_kept", {})
    plan = quick("SmolLM2-135M", 24)
    assert (plan.fits, plan.tier) == ("uncertain", "T0")
    assert any("aten::novel" in line for line in plan.assumptions)
    assert quick("Qwen2.5-14B", 8).fits == "no", "what exceeds the bound does not fit, whatever else is unknown"


def test_sizes_are_read_from_trl_too() -> None:
    config = SimpleNamespace(
        per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4, max_completion_length=64
    )
    job = job_of(config, prompt_tokens=32)
    assert (job.num_completions, job.micro_batch_tokens, job.generation_tokens) == (8, 4096, 32768)
    assert job.largest_pass(0) == ((4,), 2)
    # 32 + 4 x 64 = 288 tokens a group: both in one pass of 4096, one alone in 300, three rows and one in 250.
    assert job.largest_pass(4096) == ((4, 4), 1)
    assert job.largest_pass(300) == ((4,), 2)
    assert job.largest_pass(250) == ((3,), 4)
    assert job.generation_batch(576) == ((4, 4), 1)
    assert job.generation_batch(300) == ((4,), 2)
    assert job.generation_batch(170) == ((2,), 4)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"gib": 0}, "budget_gib"),
        ({"gib": 24, "headroom": 1.0}, "headroom"),
        ({"gib": 24, "allow": ("qlorra",)}, "Did you mean 'qlora'"),
        ({"gib": 24, "model": "Qwen2.5-7b-Instructt"}, "Did you mean"),
        ({"gib": 24, "mode": "lorra"}, "Did you mean 'lora'"),
    ],
)
def test_wrong_calls(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        quick(kwargs.pop("model", "Qwen2.5-0.5B"), kwargs.pop("gib"), **kwargs)


def test_groups_must_divide() -> None:
    with pytest.raises(ConfigurationError, match="groups of 8"):
        Job(prompt_tokens=1, completion_tokens=1, num_completions=12)


def test_plan_as_data_and_as_recipe() -> None:
    import yaml

    plan = quick("SmolLM2-135M", 24, {"r": 8})
    data = json.loads(json.dumps(plan.to_json()))
    assert data["fits"] == "yes"
    assert data["margin"] == round(24 * GIB * 0.9) - data["process"]
    recipe = yaml.safe_load(plan.yaml())
    assert MemoryMode(**recipe["trainer"]["memory"]) == plan.mode
    assert recipe["peft"] == {"r": 8}
    # Laid over a recipe, nothing of what it said before is left.
    assert recipe["trainer"]["gradient_checkpointing"] is plan.mode.gradient_checkpointing
    assert recipe["trainer"]["optim"] == plan.mode.optim
    kept = quick("SmolLM2-135M", 24, {"r": 8, "lora_alpha": 32}, tier="T0")
    assert yaml.safe_load(kept.yaml())["peft"] == {"r": 8, "lora_alpha": 32}
    full = yaml.safe_load(quick("SmolLM2-135M", 24, tier="T0").yaml())
    assert "peft" in full
    assert full["peft"] is None
    assert recipe["model"]["name"] == "HuggingFaceTB/SmolLM2-135M"
    assert "Fits" in plan.explain()
    assert {"generate", "train", "optimizer"} <= set(plan.planned_gib)
    assert max(plan.planned_gib.values()) <= plan.process / GIB


def test_bound_needs_no_torch() -> None:
    code = (
        "import sys; from trl_grpo_ext.memory.plan import plan_memory; "
        "p = plan_memory('Qwen2.5-7B', budget_gib=8, prompt_len=512, tier='T0'); print(p.fits, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.split() == ["no", "False"], done.stderr


def test_more_never_lowers_the_bound() -> None:
    shape = shape_of(read_config("Qwen2.5-3B"))

    def bound(job: Job, mode: MemoryMode = MemoryMode()) -> int:  # noqa: B008
        return max(sum(parts.values()) for parts in lower_bound(shape, mode, job).values())

    job = Job(prompt_tokens=512, completion_tokens=1024)
    assert bound(replace(job, completion_tokens=2048)) > bound(job)
    assert bound(replace(job, rank=32)) > bound(job)
    assert bound(job) > bound(job, MemoryMode(base="int8")) > bound(job, MemoryMode(base="nf4"))
    assert bound(job, MemoryMode(tuning="full")) > bound(job, MemoryMode(tuning="full", optim="adamw_8bit"))
