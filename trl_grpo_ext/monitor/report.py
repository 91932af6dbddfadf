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
    base: str,
    published: str | None,
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
    """Return the README.md of the trained model.

    Args:
        name: of the model, for the title.
        base: the base model as the recipe names it.
        published: its name on the hub, or None.
        licence: its licence, or None where that is not known.
        adapter: True if the result is an adapter.
        source: of the data.
        counts: of the data.
        rewards: as they are to be named.
        command: that trained it.
        summary: facts of the run.
        before: evaluation before training.
        after: evaluation after training.
        recipe_yaml: the recipe.
    """
    kind = "LoRA adapter for" if adapter else "fine-tuned copy of"
    about = f"A {kind} {published or base}, trained with group-relative policy optimisation (GRPO)."
    body = [f"# {name}", "", about, ""]
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
    body += _versions_lines(summary["versions"])
    return "\n".join(_front_matter(published, licence, "peft" if adapter else "transformers") + body)


def merged_card(
    *,
    name: str,
    base: str,
    published: str | None,
    licence: str | None,
    adapter: str,
    dtype: str,
    as_quantised: bool,
    command: str,
) -> str:
    """Return the README.md of a model that an adapter was merged into.

    Args:
        name: of the model, for the title.
        base: the base model as it was loaded.
        published: its name on the hub, or None.
        licence: its licence, or None where that is not known.
        adapter: where the adapter lay.
        dtype: of the merged weights.
        as_quantised: whether the base's weights are those that quantisation left in training.
        command: that merged it.
    """
    seen = ", as it was quantised in training, made ordinary numbers again" if as_quantised else ""
    body = [
        f"# {name}",
        "",
        f"{published or base} with an adapter merged into its weights, trained with group-relative policy optimisation "
        "(GRPO). It needs neither PEFT nor bitsandbytes.",
        "",
        f"- Base model: {published or base}{seen}.",
        f"- Adapter: `{adapter}`.",
        f"- Weights: {dtype}.",
        f"- Licence: {licence or 'not known here; see that of the base model'}.",
        f"- Command: `{command}`",
        "",
        *_versions_lines(versions()),
    ]
    return "\n".join(_front_matter(published, licence, "transformers") + body)


def _front_matter(published: str | None, licence: str | None, library: str) -> list[str]:
    """Return the metadata block that the hub reads; it takes a base model for a hub id, so that no directory may do."""
    head = ["---", *([f"base_model: {published}"] if published else []), f"library_name: {library}"]
    head += [f"license: {licence}"] if licence else []
    tags = ("trl", "grpo", "trl-grpo-ext", "generated_from_trainer")
    return [*head, "pipeline_tag: text-generation", "tags:", *(f"- {tag}" for tag in tags), "---", ""]


def _versions_lines(found: Mapping[str, str]) -> list[str]:
    return ["## Versions", "", ", ".join(f"{package} {version}" for package, version in found.items()), ""]
