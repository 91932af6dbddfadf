"""Compare rollouts of the engine with TRL's ``model.generate``: same process, alternating, processor time.

    python tests/bench/bench_rollout.py --model /tmp/smollm2 --jobs short long --dtypes bf16 fp32 --repeats 3

``--model`` is any supported causal language model. Jobs are those of docs/engine_rollout.md. The model is set up as
TRL does: LoRA r 16 on all linear layers in float32, and with bf16 a bfloat16 base under bfloat16 autocast around
``forward``; ``bf16-plain`` leaves the autocast out, as on a CPU, where TRL cannot have it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from types import MethodType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from trl_grpo_ext.rollout.engine import SamplingParams
from trl_grpo_ext.rollout.transformers_engine import TransformersRolloutEngine


@dataclass(frozen=True)
class Job:
    """A batch of rollouts. ``stop_share`` of the vocabulary ends a row, which spreads the lengths; 0: all run on."""

    num_prompts: int
    num_generations: int
    prompt_length: int
    max_new_tokens: int
    stop_share: float = 0.0


JOBS = {
    "short": Job(2, 8, 145, 64),
    "long": Job(2, 8, 440, 64),
    "wide": Job(8, 8, 145, 64),
    "spread": Job(2, 16, 150, 256, stop_share=0.01),
    "tiny": Job(2, 4, 24, 16),
}


def load(path: str, dtype: str, lora: bool) -> Any:
    """Return the model as TRL would hold it when it generates."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16 if dtype.startswith("bf16") else torch.float32
    )
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.01)
    if dtype in ("bf16", "fp32-autocast"):
        from accelerate.utils import convert_outputs_to_fp32

        autocast = torch.autocast("cpu", torch.bfloat16)
        model.forward = MethodType(convert_outputs_to_fp32(autocast(model.forward.__func__)), model)
    return model.train()


def prompts_of(job: Job, vocab_size: int) -> list[list[int]]:
    """Return random prompts of slightly different lengths, each repeated for its group."""
    generator = torch.Generator().manual_seed(0)
    rows: list[list[int]] = []
    for index in range(job.num_prompts):
        length = job.prompt_length - index * job.prompt_length // 40
        ids = torch.randint(100, vocab_size - 100, (length,), generator=generator).tolist()
        rows += [ids] * job.num_generations
    return rows


def generate_as_trl(model: Any, rows: list[list[int]], params: SamplingParams, pad: int) -> list[list[int]]:
    """Return completions by the calls of ``GRPOTrainer._generate_single_turn``."""
    width = max(map(len, rows))
    input_ids = torch.tensor([[pad] * (width - len(ids)) + ids for ids in rows])
    attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows])
    config = GenerationConfig(
        max_new_tokens=params.max_new_tokens,
        do_sample=True,
        pad_token_id=pad,
        eos_token_id=list(params.eos_token_ids) or None,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        disable_compile=True,
    )
    with torch.no_grad():
        output = model.generate(input_ids=input_ids, attention_mask=attention_mask, generation_config=config)
    eos = set(params.eos_token_ids)
    completions = []
    for ids in output[:, width:].tolist():
        end = next((i for i, token in enumerate(ids) if token in eos), len(ids) - 1)
        completions.append(ids[: end + 1])
    return completions


def run_job(name: str, job: Job, model: Any, decoder: str, repeats: int) -> dict[str, Any]:
    """Return medians of processor seconds and ratios, alternating the two sides."""
    vocab_size = model.config.vocab_size
    rows = prompts_of(job, vocab_size)
    generator = torch.Generator().manual_seed(1)
    stops = torch.randperm(vocab_size - 3, generator=generator)[: int(job.stop_share * vocab_size)] + 3
    params = SamplingParams(max_new_tokens=job.max_new_tokens, eos_token_ids=tuple(stops.tolist()) or (vocab_size - 1,))
    engine = TransformersRolloutEngine(decoder=decoder)
    engine.generate(model, rows[:2], SamplingParams(max_new_tokens=20))  # the one-off check of the packed path
    seconds: dict[str, list[float]] = {"trl": [], "engine": []}
    per_token: dict[str, list[float]] = {"trl": [], "engine": []}
    stats = None
    for repeat in range(repeats):
        for side in ("trl", "engine"):
            torch.manual_seed(repeat)
            start_s = time.process_time()
            if side == "trl":
                num_tokens = sum(map(len, generate_as_trl(model, rows, params, pad=2)))
            else:
                batch = engine.generate(model, rows, params)
                stats, num_tokens = batch.stats, batch.stats.num_tokens
            seconds[side].append(time.process_time() - start_s)
            per_token[side].append(seconds[side][-1] / num_tokens)
    assert stats is not None
    ratios = [trl / ours for trl, ours in zip(seconds["trl"], seconds["engine"], strict=True)]
    return {
        "job": name,
        **asdict(job),
        "trl_s": statistics.median(seconds["trl"]),
        "engine_s": statistics.median(seconds["engine"]),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "ratio_per_token": statistics.median(per_token["trl"]) / statistics.median(per_token["engine"]),
        "decoder": stats.decoder,
        "decode_steps": stats.decode_steps,
        "row_steps": stats.row_steps,
        "num_tokens": stats.num_tokens,
    }


def main() -> None:
    """Run the jobs asked for and print one line each, then JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--jobs", nargs="+", default=["short", "long"], choices=sorted(JOBS))
    choices = ["bf16", "bf16-plain", "fp32", "fp32-autocast"]
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"], choices=choices)
    parser.add_argument("--decoder", default="auto", choices=["auto", "modules", "packed"])
    parser.add_argument("--no-lora", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for dtype in args.dtypes:
        model = load(args.model, dtype, not args.no_lora)
        for name in args.jobs:
            result = {"dtype": dtype, **run_job(name, JOBS[name], model, args.decoder, args.repeats)}
            results.append(result)
            print(
                f"{dtype:14s} {name:7s} TRL {result['trl_s']:7.2f} s  engine ({result['decoder']}) "
                f"{result['engine_s']:6.2f} s  ratio {result['ratio']:.2f} "
                f"[{result['ratio_low']:.2f}, {result['ratio_high']:.2f}]  per token {result['ratio_per_token']:.2f}",
                flush=True,
            )
        del model
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
