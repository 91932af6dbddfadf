"""What a run leaves behind for people: a summary, a table of completions and a model card."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from trl_grpo_ext._version import __version__
from trl_grpo_ext.monitor.evaluate import EvalResult, Example

_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "reasoning-gym")


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {"trl-grpo-ext": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def examples_markdown(before: Sequence[Example] | None, after: Sequence[Example], limit: int) -> str:
    """Return a table of the same held-out prompts before and after training.

    Rows stand in the order of the data: nothing is picked by hand.
    """
    lines = [
        "# Completions on held-out prompts",
        "",
        f"The first {min(limit, len(after))} held-out rows. "
        "✓ strictly right, ~ right answer found in the text, ✗ wrong.",
        "",
        "| prompt | answer | before | after |",
        "|---|---|---|---|",
    ]
    for index, example in enumerate(after[:limit]):
        earlier = _cell(before[index]) if before is not None and index < len(before) else "–"
        lines.append(f"| {_escape(example.prompt)} | {_escape(example.answer)} | {earlier} | {_cell(example)} |")
    return "\n".join(lines) + "\n"


def _cell(example: Example) -> str:
    mark = "✓" if example.strict else "~" if example.lenient else "✗"
    return f"{mark} {_escape(example.completion)}"


def _escape(text: str, limit: int = 200) -> str:
    """Return text that stays in its table cell and is not read as Markdown or HTML."""
    text = " ⏎ ".join(text.strip().splitlines())
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    for char in "\\`*_|[]#$~":
        text = text.replace(char, "\\" + char)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def results_lines(before: EvalResult | None, after: EvalResult) -> list[str]:
    """Return the result table, one row per verdict, with 95 % Wilson intervals."""
    lines = ["| held-out accuracy | before | after |", "|---|---|---|"]
    for name in ("strict", "lenient"):
        earlier = str(getattr(before, name)) if before is not None else "–"
        lines.append(f"| {name} | {earlier} | {getattr(after, name)} |")
    earlier = f"{before.mean_tokens:.1f}" if before is not None else "–"
    lines.append(f"| tokens per completion | {earlier} | {after.mean_tokens:.1f} |")
    return lines


def model_card(
    *,
    name: str,
    base_model: str,
    licence: str | None,
    adapter: bool,
    source: str,
    counts: Mapping[str, int],
    rewards: Sequence[str],
    command: str,
    summary: Mapping[str, Any],
    before: EvalResult | None,
    after: EvalResult | None,
    recipe_yaml: str,
) -> str:
    """Return the README.md of the trained model, with the metadata block that the hub reads."""
    tags = ["trl", "grpo", "trl-grpo-ext", "generated_from_trainer"]
    head = ["---", f"base_model: {base_model}", f"library_name: {'peft' if adapter else 'transformers'}"]
    head += [f"license: {licence}"] if licence else []
    head += ["pipeline_tag: text-generation", "tags:", *(f"- {tag}" for tag in tags), "---", ""]
    kind = "LoRA adapter for" if adapter else "fine-tuned copy of"
    body = [f"# {name}", "", f"A {kind} {base_model}, trained with group-relative policy optimisation (GRPO).", ""]
    if summary.get("control"):
        body += ["**Control run: rewards were shuffled within each step, so that nothing could be learnt.**", ""]
    body += [
        "## Training",
        "",
        f"- Data: {source}; {counts['train']} training prompts, {counts['held_out']} held out, no question in both.",
        f"- Rewards: {', '.join(rewards)}.",
        f"- {summary['steps']} steps in {summary['train_seconds']:.0f} s, seed {summary['seed']}.",
        f"- Command: `{command}`",
        "",
    ]
    if after is not None:
        intro = "Greedy decoding on the held-out prompts; 95 % Wilson intervals."
        body += ["## Results", "", intro, "", *results_lines(before, after), ""]
    body += ["## Recipe", "", "```yaml", recipe_yaml.strip(), "```", ""]
    packages = ", ".join(f"{package} {version}" for package, version in summary["versions"].items())
    body += ["## Versions", "", packages, ""]
    return "\n".join(head + body)
