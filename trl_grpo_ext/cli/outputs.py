"""Write what a run leaves behind; every file whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from trl_grpo_ext.cli.prepare import Prepared
from trl_grpo_ext.cli.rundir import RunDirectory
from trl_grpo_ext.errors import MissingDependencyError
from trl_grpo_ext.models import published_as
from trl_grpo_ext.monitor.evaluate import EvalResult, Example, Rate
from trl_grpo_ext.monitor.files import write_json, write_text
from trl_grpo_ext.monitor.metrics_log import read_metrics
from trl_grpo_ext.monitor.plot import plot_run
from trl_grpo_ext.monitor.report import examples_markdown, model_card, versions


def save_before(path: Path, result: EvalResult) -> None:
    """Keep the evaluation before training, so that a resumed run need not repeat it with a trained model."""
    examples = [example.__dict__ for example in result.examples]
    write_json(path, {**result.to_dict(), "examples": examples})


def load_before(path: Path) -> EvalResult | None:
    """Return what ``save_before`` wrote, or None."""
    if not path.is_file():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    for name in ("strict", "lenient"):
        values[name].pop("share")
        values[name] = Rate(**values[name])
    values["examples"] = tuple(Example(**example) for example in values["examples"])
    return EvalResult(**values)


def save_model(trainer: Any, folder: Path) -> None:
    """Save adapter or model with its tokenizer into ``folder``: written beside it first, then renamed file by file."""
    temporary = folder / ".saving.tmp"
    main = trainer.accelerator.is_main_process
    if main:
        shutil.rmtree(temporary, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(temporary))
    trainer.accelerator.wait_for_everyone()
    if main:
        for path in sorted(temporary.iterdir()):
            if path.is_dir():  # the copy of the starting adapter; a folder does not replace one that is not empty
                shutil.rmtree(folder / path.name, ignore_errors=True)
            os.replace(path, folder / path.name)
        temporary.rmdir()


def write_results(
    directory: RunDirectory,
    prepared: Prepared,
    summary: dict[str, Any],
    before: EvalResult | None,
    after: EvalResult | None,
    accuracy_keys: dict[str, str],
    *,
    adapter: bool,
) -> None:
    """Write plot, examples, model card and, last, ``summary.json``: where it lies, the run is finished.

    Args:
        directory: of the run.
        prepared: what was run.
        summary: facts of the run; results, data counts and versions are added to it.
        before: evaluation before training.
        after: evaluation after training.
        accuracy_keys: {label: metric key} for the plot.
        adapter: True if the result is an adapter.
    """
    recipe = prepared.recipe
    summary["before"] = before.to_dict() if before is not None else None
    summary["after"] = after.to_dict() if after is not None else None
    summary["data"] = {"source": recipe.data.source, **prepared.splits.counts._asdict()}
    summary["rewards"] = dict(zip(prepared.rewards.names, prepared.rewards.weights, strict=True))
    summary["versions"] = versions()
    name = recipe.name + (" (control)" if summary["control"] else "")
    try:
        plot_run(
            directory.plot,
            read_metrics(directory.metrics),
            title=f"{name}: {recipe.model.name}, seed {summary['seed']}",
            accuracy_keys=accuracy_keys,
            before=None if before is None else {"strict": before.strict.share, "lenient": before.lenient.share},
            after=None if after is None else {"strict": after.strict.share, "lenient": after.lenient.share},
        )
    except MissingDependencyError as error:
        summary["plot"] = str(error)
    if after is not None:
        earlier = before.examples if before is not None else None
        write_text(directory.examples, examples_markdown(earlier, after.examples, recipe.eval.examples))
    published = published_as(recipe.model.name)
    card = model_card(
        name=name,
        base=recipe.model.name,
        published=published.name,
        licence=published.licence,
        adapter=adapter,
        source=recipe.data.source,
        counts=prepared.splits.counts._asdict(),
        rewards=[f"{reward} ({weight:g})" for reward, weight in summary["rewards"].items()],
        command=summary["command"],
        summary=summary,
        before=before,
        after=after,
        recipe_yaml=directory.recipe_copy.read_text(encoding="utf-8"),
    )
    write_text(directory.card, card)
    write_json(directory.summary, summary)
