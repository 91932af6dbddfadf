"""Memory runs out in the middle of a step: the step is done again with less, and nobody can tell from the result."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import Record, ScriptedRollouts, build, gradient_gap, prompt_rows, scripted_reward
from out_of_memory import out_of_memory
from tiny import save_tiny
from trl import GRPOTrainer

from trl_grpo_ext.errors import MemoryBudgetError
from trl_grpo_ext.memory.oom import TokenBudget, Work, is_out_of_memory, recover

TOLERANCE = 1e-6
GROUP = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def ready(model: Any, directory: Any, **fields: Any) -> tuple[Any, Record]:
    """Return a trainer of two steps of 16 completions, cut into passes, and its record."""
    defaults = {"rollouts": ScriptedRollouts(), "gradient_accumulation_steps": 4, "max_tokens_per_micro_batch": 160}
    return build(True, directory, model=model, rows=prompt_rows(12), **{**defaults, **fields})


def train(
    model: Any, directory: Any, phase: str = "", at: tuple[int, ...] = (), *, samples: bool = False, **fields: Any
) -> tuple[Any, Record, list[Any]]:
    """Train two steps of 16 completions, out of memory at the given times; return trainer, record and completions."""
    injection = {name: fields.pop(name) for name in ("place", "error", "watch") if name in fields}
    completions: list[Any] = []

    def reward(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        completions.append(completion_ids)
        return scripted_reward(prompts, completion_ids)

    rollouts = None if samples else ScriptedRollouts()
    trainer, record = ready(model, directory, rollouts=rollouts, reward=reward, **fields)
    with out_of_memory(trainer, phase, at, **injection) if phase else nullcontext():
        trainer.train()
    return trainer, record, completions


def assert_same_gradients(mine: Record, other: Record, tolerance: float = TOLERANCE) -> None:
    assert len(mine.gradients) == len(other.gradients) > 0
    assert any(value.abs().max() > 1e-3 for value in other.gradients[0].values())
    gaps = [gradient_gap(a, b) for a, b in zip(mine.gradients, other.gradients, strict=True)]
    assert max(gaps) <= tolerance, gaps


def metric(record: Record, name: str) -> list[float]:
    return [entry[f"memory/{name}"] for entry in record.logs if f"memory/{name}" in entry]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(("place", "at"), [("forward", (1,)), ("backward", (0,)), ("backward", (1,))])
def test_gradient_is_that_of_the_undisturbed_run(
    place: str, at: tuple[int, ...], packed: bool, checkpoint: str, tmp_path: Any
) -> None:
    budget = 100 if packed else 160
    fields = {"shared_prefix_forward": packed, "max_tokens_per_micro_batch": budget}
    _, undisturbed, _ = train(checkpoint, tmp_path, **fields)
    trainer, record, _ = train(checkpoint, tmp_path, "train", at, place=place, **fields)
    assert_same_gradients(record, undisturbed)
    lowered = trainer._train_budget.max_tokens
    assert budget / 4 < lowered <= budget / 2
    assert metric(record, "oom_retries") == [1.0, 1.0]
    assert metric(record, "max_tokens_per_micro_batch") == [lowered, lowered]
    _, from_the_start, _ = train(checkpoint, tmp_path, **{**fields, "max_tokens_per_micro_batch": lowered})
    assert_same_gradients(record, from_the_start, tolerance=0.0)
    for mine, other in zip(record.logs[:-1], undisturbed.logs[:-1], strict=True):
        for name in ("loss", "grad_norm", "entropy", "reward", "completions/mean_length"):
            assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=2e-6), name


def test_partial_gradients_exist_when_backward_fails(checkpoint: str, tmp_path: Any) -> None:
    """The case above drops something: layers after the failing one have a gradient by then."""
    seen: list[bool] = []
    holder: list[Any] = []

    def look() -> None:
        seen.append(any(p.grad is not None and bool(p.grad.any()) for p in holder[0].model.parameters()))

    trainer, record = ready(checkpoint, tmp_path)
    holder.append(trainer)
    with out_of_memory(trainer, "train", (1,), place="backward", watch=look):
        trainer.train()
    assert seen == [True]
    assert len(record.gradients) == 2


def test_comparison_notices_gradients_that_stay(
    checkpoint: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without dropping them the partial gradients count twice."""
    from trl_grpo_ext.learner.window_retry import WindowStart

    _, undisturbed, _ = train(checkpoint, tmp_path)
    monkeypatch.setattr(WindowStart, "return_to", lambda self, window: window.forget_scores())
    _, record, _ = train(checkpoint, tmp_path, "train", (1,), place="backward")
    with pytest.raises(AssertionError, match="e-0"):
        assert_same_gradients(record, undisturbed)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_again_and_again(checkpointing: bool, checkpoint: str, tmp_path: Any) -> None:
    """Twice in the first step and once more in the second; each time in a backward."""
    fields = {"gradient_checkpointing": checkpointing, "shared_prefix_forward": True}
    _, undisturbed, _ = train(checkpoint, tmp_path, **fields)
    trainer, record, _ = train(checkpoint, tmp_path, "train", (0, 1, 11), place="backward", **fields)
    assert_same_gradients(record, undisturbed)
    assert trainer._train_budget.num_halvings == 3
    assert metric(record, "oom_retries") == [2.0, 3.0]


def test_dropout_masks_are_those_of_the_undisturbed_run(checkpoint: str, tmp_path: Any) -> None:
    from peft import LoraConfig

    def run(*injection: Any, **fields: Any) -> tuple[Any, Record]:
        torch.manual_seed(5)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.3)
        trainer, record, _ = train(checkpoint, tmp_path, *injection, peft_config=lora, **fields)
        return trainer, record

    trainer, record = run("train", (1,), place="backward")
    _, same = run(max_tokens_per_micro_batch=trainer._train_budget.max_tokens)
    assert_same_gradients(record, same, tolerance=0.0)
    _, other = run(max_tokens_per_micro_batch=trainer._train_budget.max_tokens, seed=12)
    assert gradient_gap(record.gradients[0], other.gradients[0]) > 1e-3, "the masks make no difference here"


def test_gradients_that_were_there_survive(checkpoint: str, tmp_path: Any) -> None:
    """A callback that adds a gradient of its own before the step, as a regulariser may."""
    from transformers import TrainerCallback

    class Adds(TrainerCallback):
        def on_step_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.01)

    def run(*injection: Any, **fields: Any) -> Record:
        trainer, record = ready(checkpoint, tmp_path, **fields)
        trainer.add_callback(Adds())
        with out_of_memory(trainer, *injection, place="backward") if injection else nullcontext():
            trainer.train()
        return record

    assert_same_gradients(run("train", (1,)), run())


def test_groups_stay_whole_where_they_fit(checkpoint: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = ScriptedRollouts()
    row_of = {tuple(rollouts.completion(row)): row for row in range(16)}
    passes: list[list[int]] = []
    forward = GRPOTrainer._get_per_token_logps_and_entropies

    def recording(self: Any, model: Any, input_ids: Any, attention_mask: Any, keep: int, *args: Any, **kw: Any) -> Any:
        if torch.is_grad_enabled():
            rows = zip(input_ids[:, -keep:].tolist(), attention_mask[:, -keep:].tolist(), strict=True)
            found = [tuple(i for i, m in zip(ids, mask, strict=True) if m) for ids, mask in rows]
            passes.append([row_of[ids] for ids in found])
        return forward(self, model, input_ids, attention_mask, keep, *args, **kw)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", recording)
    train(checkpoint, tmp_path, "train", (1,), max_steps=1, max_tokens_per_micro_batch=320)
    redone = passes[2:]
    assert sorted(row for rows in redone for row in rows) == list(range(16)), "each row exactly once"
    assert len(redone) > 2
    for rows in redone:
        groups = {row // GROUP for row in rows}
        assert len(rows) == GROUP * len(groups), "a group was cut although it fits"


def test_sampling_again_gives_what_the_lower_budget_would_have_given(checkpoint: str, tmp_path: Any) -> None:
    for fields in ({"rollout_engine": "auto"}, {"rollout_engine": "auto", "rollout_seeded": True}, {}):
        fields = {"max_tokens_per_generation_batch": 1024, "gradient_checkpointing": True, **fields}
        trainer, record, completions = train(checkpoint, tmp_path, "generate", (0,), samples=True, **fields)
        lowered = trainer._generation_budget.max_tokens
        assert lowered < 512
        assert trainer.model.is_gradient_checkpointing, "TRL leaves it off after an error"
        fields["max_tokens_per_generation_batch"] = lowered
        _, undisturbed, expected = train(checkpoint, tmp_path, samples=True, **fields)
        assert completions == expected
        assert_same_gradients(record, undisturbed, tolerance=0.0)
        assert metric(record, "max_tokens_per_generation_batch") == [lowered, lowered]
        assert metric(record, "oom_retries") == [1.0, 1.0]


def test_seeded_completions_do_not_notice(checkpoint: str, tmp_path: Any) -> None:
    fields = {"rollout_engine": "auto", "rollout_seeded": True}
    _, undisturbed, expected = train(checkpoint, tmp_path, samples=True, **fields)
    _, record, completions = train(checkpoint, tmp_path, "generate", (0, 1, 2), samples=True, **fields)
    assert completions == expected
    assert_same_gradients(record, undisturbed)


def test_sampling_without_a_budget_gets_one(checkpoint: str, tmp_path: Any) -> None:
    fields = {"max_tokens_per_generation_batch": 0, "samples": True}
    trainer, _, completions = train(checkpoint, tmp_path, "generate", (3,), **fields)
    assert trainer._generation_budget.max_tokens is not None
    _, _, expected = train(checkpoint, tmp_path, samples=True, generation_kwargs={"do_sample": True})
    assert [len(batch) for batch in completions] == [len(batch) for batch in expected]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_reference_pass(packed: bool, checkpoint: str, tmp_path: Any) -> None:
    fields = {"beta": 0.1, "num_iterations": 2, "max_steps": 4, "shared_prefix_forward": packed}
    _, undisturbed, _ = train(checkpoint, tmp_path, **fields)
    trainer, record, _ = train(checkpoint, tmp_path, "score", (0, 2), **fields)
    assert_same_gradients(record, undisturbed)
    assert trainer._score_budget.num_halvings == 2
    assert trainer._train_budget.num_halvings == 0
    assert record.logs[0]["kl"] == pytest.approx(undisturbed.logs[0]["kl"], rel=1e-4, abs=1e-7)


def test_budget_exhausted(checkpoint: str, tmp_path: Any) -> None:
    every_time = tuple(range(1000))
    with pytest.raises(MemoryBudgetError) as caught:
        train(checkpoint, tmp_path, "train", every_time, oom_max_halvings=1)
    message = str(caught.value)
    assert "in the training step with max_tokens_per_micro_batch=" in message
    assert "after 1 halvings" in message
    assert "gradient_checkpointing; an adapter (memory: lora)" in message
    with pytest.raises(MemoryBudgetError, match="a single row cannot be cut: CUDA out of memory"):
        train(checkpoint, tmp_path, "train", every_time, oom_max_halvings=20)
    with pytest.raises(MemoryBudgetError, match=r"in sampling with max_tokens_per_generation_batch=.* cannot be cut"):
        train(checkpoint, tmp_path, "generate", every_time, oom_max_halvings=20, samples=True)
    with pytest.raises(MemoryBudgetError, match="in scoring completions with max_tokens_per_micro_batch="):
        train(checkpoint, tmp_path, "score", every_time, oom_max_halvings=20, beta=0.1)


def test_off(checkpoint: str, tmp_path: Any) -> None:
    for phase in ("train", "generate"):
        with pytest.raises(torch.OutOfMemoryError):
            train(checkpoint, tmp_path, phase, (0,), oom_max_halvings=0, samples=True)


def test_where_nothing_can_be_cut_the_error_says_what_to_do(checkpoint: str, tmp_path: Any) -> None:
    """TRL's own micro-batches; and the optimiser's step, which no budget can make smaller."""
    with pytest.raises(MemoryBudgetError, match=r"in the phase 'train': CUDA out of memory.*Cheapest first"):
        train(checkpoint, tmp_path, "train", (0,), max_tokens_per_micro_batch=0)
    trainer, _ = build(True, tmp_path, model=checkpoint, rows=prompt_rows(12), rollouts=ScriptedRollouts())
    trainer.create_optimizer()

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer.optimizer.register_step_pre_hook(fail)
    with pytest.raises(MemoryBudgetError, match=r"in the phase 'optimizer'.*memory: lora"):
        trainer.train()


def test_a_bug_is_no_lack_of_memory(checkpoint: str, tmp_path: Any) -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        train(checkpoint, tmp_path, "train", (0,), error=lambda: RuntimeError("a bug"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 18.00 GB)"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
        (torch.distributed.DistBackendError("NCCL error: unhandled cuda error: out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_real_allocation_failure_counts() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_recover_halves_the_work_and_not_a_budget_far_above_it() -> None:
    tried: list[int | None] = []

    def attempt(max_tokens: int | None) -> int:
        tried.append(max_tokens)
        if max_tokens is None or max_tokens > 30:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return 7

    for configured, expected in ((None, [None, 50, 25]), (4096, [4096, 50, 25]), (64, [64, 32, 16])):
        tried.clear()
        budget = TokenBudget("generate", "budget", configured, max_halvings=4)
        assert recover(budget, attempt, lambda: Work(held_tokens=100, row_tokens=10)) == 7
        assert tried == expected
        assert budget.max_tokens == expected[-1]
    with pytest.raises(MemoryBudgetError, match="a single row cannot be cut"):
        recover(TokenBudget("generate", "budget", 64, 9), attempt, lambda: Work(held_tokens=100, row_tokens=40))


def test_a_resumed_run_remembers(checkpoint: str, tmp_path: Any) -> None:
    fields = {"save_strategy": "steps", "save_steps": 1, "samples": True, "rollout_engine": "auto"}
    trainer, _, _ = train(checkpoint, tmp_path, "train", (0, 1), place="backward", **fields)
    lowered = trainer._train_budget.max_tokens
    assert lowered < 160
    resumed, _ = build(
        True,
        tmp_path,
        model=checkpoint,
        rows=prompt_rows(12),
        max_steps=3,
        gradient_accumulation_steps=4,
        max_tokens_per_micro_batch=160,
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 3
    assert resumed._train_budget.max_tokens == lowered
    assert resumed._train_budget.num_halvings == 2
    assert resumed._generation_budget.num_halvings == 0


def test_it_is_said_once(checkpoint: str, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trl_grpo_ext.memory.oom"):
        train(checkpoint, tmp_path, "train", (0,))
    lines = [line for line in caplog.messages if "Out of memory" in line]
    assert len(lines) == 1
    assert "max_tokens_per_micro_batch=160. Doing it again with max_tokens_per_micro_batch=" in lines[0]
