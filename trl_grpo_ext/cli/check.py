"""``trl-grpo check``: find out before training whether the rewards pay right answers and nothing else."""

from __future__ import annotations

import dataclasses
import json
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trl_grpo_ext.errors import ConfigurationError, DataError, nearest
from trl_grpo_ext.recipe import Recipe
from trl_grpo_ext.rewards.columns import check_columns
from trl_grpo_ext.rewards.outcome import RewardOutcome
from trl_grpo_ext.rewards.probes import FORMS, Finding, Probe, probe_rewards
from trl_grpo_ext.rewards.registry import RewardSet
from trl_grpo_ext.rewards.runner import RewardRunner
from trl_grpo_ext.rewards.verifier import VerifierReward, completion_text

if TYPE_CHECKING:
    from trl_grpo_ext.cli.prepare import Prepared

_REWARDS_LOGGER = logging.getLogger("trl_grpo_ext.rewards")
_NOT_PASSED_ON = ("prompt", "completion", "completion_ids")
# References that say how to judge and not what is right.
_REFERENCES_THAT_ARE_NO_ANSWER = ("tests", "entry")
_USUAL_GOLD_COLUMNS = ("answer", "solution", "canonical_solution")
_MAX_FAILURE_SHARE = 0.02
_CHARS_PER_TOKEN = 4


@dataclass(frozen=True)
class CheckReport:
    """What a check found.

    Attributes:
        source: the data, in words.
        num_rows: rows looked at, of ``num_available``.
        findings: one per question asked.
        forms: {reward, or "total": form of answer it pays best}.
        columns: {reward: data-set columns it needs}.
        weights: {reward: weight in the total}.
        milliseconds: {reward: median time per sample}.
        prompts: up to three prompts as the model will see them.
        notes: what could not be checked, and why.
    """

    source: str
    num_rows: int
    num_available: int
    findings: list[Finding]
    forms: dict[str, str]
    columns: dict[str, tuple[str, ...]]
    weights: dict[str, float]
    milliseconds: dict[str, float]
    prompts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def failed(self, *, strict: bool = False) -> bool:
        """Return whether training should not start; ``strict`` counts warnings as well."""
        return any(finding.status == "fail" or (strict and finding.status == "warn") for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return {
            **dataclasses.asdict(self),
            "findings": [finding._asdict() for finding in self.findings],
            "failed": self.failed(),
        }


def check(
    recipe: Annotated[Path, typer.Argument(help="The recipe to check.", metavar="RECIPE.yaml")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, as for train.")] = None,
    rows: Annotated[int, typer.Option(help="Rows to look at, spread over the data.", min=1)] = 64,
    form: Annotated[
        list[str] | None, typer.Option(help="A further form of a right completion, with {answer} for the gold answer.")
    ] = None,
    gold: Annotated[str | None, typer.Option(help="Column with right answers, where the rewards do not say.")] = None,
    strict: Annotated[bool, typer.Option(help="Fail on warnings as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    gpu: Annotated[
        float | None, typer.Option(help="Memory of a card in GiB to plan for; the one that is there by default.")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also load the weights and sample: are completions cut off?")
    ] = False,
) -> None:
    """Check prompts, gold answers and rewards before training. Exit code 1 if training should not start."""
    from trl_grpo_ext.cli.preflight import run_preflight
    from trl_grpo_ext.cli.prepare import prepare
    from trl_grpo_ext.preflight.report import as_dicts, print_answers, worst

    prepared = prepare(recipe, overrides or [], for_training=False)
    report = check_prepared(prepared, num_rows=rows, forms=form or [], gold=gold)
    answers = run_preflight(prepared, gpu_gib=gpu, probe=probe).answers
    bad = worst(answers) == "red" or (strict and worst(answers) == "yellow")
    if as_json:
        values = report.as_dict()
        print(json.dumps({**values, "preflight": as_dicts(answers), "failed": values["failed"] or bad}, indent=2))
    else:
        print_report(report, Console())
        print_answers(answers, Console())
    if bad or report.failed(strict=strict):
        raise typer.Exit(1)


def check_prepared(
    prepared: Prepared, *, num_rows: int = 64, forms: Sequence[str] = (), gold: str | None = None, render: bool = True
) -> CheckReport:
    """Return what a full check of a recipe found.

    Args:
        prepared: recipe, rewards and rows.
        num_rows: rows looked at, spread evenly over the training split.
        forms: further templates of a right completion, with ``{answer}``.
        gold: column with right answers, for rewards that do not declare theirs.
        render: True also applies the model's chat template to three prompts.

    Raises:
        ConfigurationError: for a form without ``{answer}`` or a gold column that is not there.
        DataError: if a column that a reward needs is not there.
    """
    recipe, train = prepared.recipe, prepared.splits.train
    source = recipe.data.source
    report = check_rows(train, prepared.rewards, source=source, num_rows=num_rows, forms=forms, gold=gold)
    if render:
        prompts, notes = _render(recipe, [row["prompt"] for row in spread(train, 3)])
        report = dataclasses.replace(report, prompts=prompts, notes=[*report.notes, *notes])
    protection = [
        line for function in prepared.rewards.functions for line in getattr(function, "describe_protection", list)()
    ]
    return dataclasses.replace(report, notes=[*report.notes, *protection])


def quick_check(rows: Sequence[Mapping[str, Any]], rewards: RewardSet, *, source: str = "the data") -> CheckReport:
    """Return what a look at 16 rows found: the same questions, no rendering. ``train`` calls it first."""
    return check_rows(rows, rewards, source=source, num_rows=16)


def check_rows(
    rows: Sequence[Mapping[str, Any]],
    rewards: RewardSet,
    *,
    source: str = "the data",
    num_rows: int = 64,
    forms: Sequence[str] = (),
    gold: str | None = None,
) -> CheckReport:
    """Return what the rewards say about right and wrong completions of rows with ``prompt`` and reward columns.

    Raises:
        ConfigurationError: for a form without ``{answer}`` or a gold column that is not there.
        DataError: if there are no rows, or a column is missing.
    """
    if not rows:
        raise DataError(f"{source}: no rows to check")
    sample = spread(rows, num_rows)
    check_columns(list(sample[0]), rewards.columns)
    if gold is not None and gold not in sample[0]:
        raise ConfigurationError(f"--gold {gold}: the data have {', '.join(sample[0])}.{nearest(gold, sample[0])}")
    places = [place for place, function in enumerate(rewards.functions) if callable(function)]
    names = [rewards.names[place] for place in places]
    weights = [rewards.weights[place] for place in places]
    notes = [f"{name}: a reward model, not checked" for name in rewards.names if name not in names]
    findings: list[Finding] = []
    best: dict[str, str] = {}
    milliseconds: dict[str, float] = {}
    if places:
        every_form = {**FORMS, **_own_forms(forms)}
        with _Scorer(sample, [rewards.functions[place] for place in places], names) as scorer:
            for share in _shares(scorer, sample, gold, every_form):
                probe = Probe(
                    [_prompt_text(row["prompt"]) for row in sample],
                    share.golds,
                    names,
                    weights,
                    compares=share.compares,
                    declared=share.declared,
                    forms=every_form,
                )
                found, forms_found = probe_rewards(probe, scorer.score, share.sources)
                findings += found
                best.update(forms_found)
            findings = [*scorer.failures(), *findings]
            milliseconds = scorer.milliseconds()
    shown_weights = dict(zip(names, weights, strict=True))
    return CheckReport(
        source, len(sample), len(rows), findings, best, rewards.columns, shown_weights, milliseconds, notes=notes
    )


class _Share(NamedTuple):
    """Rewards whose gold answers stand in the same column."""

    golds: list[str | None]
    sources: list[str]
    compares: frozenset[str]
    declared: frozenset[str]


def _shares(
    scorer: _Scorer, rows: Sequence[Mapping[str, Any]], gold: str | None, forms: Mapping[str, str]
) -> list[_Share]:
    """Return the rewards by the column of their golds; the first share has the total and all that declare none."""
    declared: dict[str, list[str]] = {}
    for name, function in zip(scorer.names, scorer.functions, strict=True):
        kind = type(function)
        if isinstance(function, VerifierReward) and kind.own_reference not in (None, *_REFERENCES_THAT_ARE_NO_ANSWER):
            declared.setdefault(str(function.reference), []).append(name)
    columns = [*([gold] if gold else []), *declared, *(name for name in _USUAL_GOLD_COLUMNS if name in rows[0])]
    main = columns[0] if columns else None
    golds = _texts(rows, main)
    elsewhere = {name for column, found in declared.items() if column != main for name in found}
    sources = [name for name in scorer.names if name not in elsewhere]
    undeclared = [name for name in sources if name not in declared.get(main or "", [])]
    compares = frozenset([*declared.get(main or "", []), *scorer.that_look_at_columns(undeclared, golds, forms)])
    if len(scorer.names) > 1:
        sources.append("total")
    shares = [_Share(golds, sources, compares, frozenset(declared.get(main or "", [])))]
    for column, found in declared.items():
        if column != main:
            shares.append(_Share(_texts(rows, column), found, frozenset(found), frozenset(found)))
    return shares


def _texts(rows: Sequence[Mapping[str, Any]], column: str | None) -> list[str | None]:
    if column is None:
        return [None] * len(rows)
    return [None if row.get(column) is None else str(row[column]) for row in rows]


class _Scorer:
    """Scores one completion per row through the runner, so that a reward that hangs or dies is a finding as well."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], functions: Sequence[Any], names: Sequence[str]) -> None:
        self.functions = list(functions)
        self.names = list(names)
        self.prompts = [row["prompt"] for row in rows]
        self.columns = {name: [row.get(name) for row in rows] for name in rows[0] if name not in _NOT_PASSED_ON}
        # Nothing is cached, or the times would say so.
        self.runner = RewardRunner(functions, names, timeout_s=10, batch_timeout_s=600, cache_entries=0)
        self.outcomes: list[RewardOutcome] = []
        self.seconds: dict[str, list[float]] = {name: [] for name in names}

    def __enter__(self) -> _Scorer:
        # What the runner would warn about becomes a finding.
        self.level = _REWARDS_LOGGER.level
        _REWARDS_LOGGER.setLevel(logging.ERROR)
        return self

    def __exit__(self, *_: object) -> None:
        _REWARDS_LOGGER.setLevel(self.level)
        self.runner.close()

    def score(self, texts: Sequence[str]) -> list[list[float | None]]:
        """Return K lists of rewards for one completion per row."""
        outcome = self._run(texts, self.columns)
        self.outcomes.append(outcome)
        return outcome.rewards

    def _run(self, texts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> RewardOutcome:
        completions: list[Any] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for text, prompt in zip(texts, self.prompts, strict=True)
        ]
        ids = [[0] * max(1, len(text) // _CHARS_PER_TOKEN) for text in texts]
        started = time.monotonic()
        outcome = self.runner.score(self.prompts, completions, ids, columns)
        if self.outcomes:  # the first batch also loads the functions
            for name, seconds in zip(self.seconds, outcome.seconds, strict=True):
                self.seconds[name].append(min(seconds, time.monotonic() - started) / max(1, len(texts)))
        return outcome

    def that_look_at_columns(
        self, names: Sequence[str], golds: Sequence[str | None], forms: Mapping[str, str]
    ) -> list[str]:
        """Return those rewards whose scores of the gold answers change when every row gets its neighbour's columns."""
        if not names or len(golds) < 2:
            return []
        shifted = {name: [*values[1:], values[0]] for name, values in self.columns.items()}
        found = set()
        for template in forms.values():
            texts = [template.format(answer=gold or "") for gold in golds]
            here, there = self._run(texts, self.columns).rewards, self._run(texts, shifted).rewards
            found |= {name for place, name in enumerate(self.names) if here[place] != there[place]}
        return [name for name in names if name in found]

    def failures(self) -> list[Finding]:
        """Return a finding for each reward that raised, hung or returned something that is no reward."""
        findings = []
        for name in self.seconds:
            failed = [failure for outcome in self.outcomes for failure in outcome.failures if failure.function == name]
            if not failed:
                continue
            calls = len(self.outcomes) * len(self.prompts)
            lines = failed[0].detail.strip().splitlines() or [""]
            message = f"failed on {len(failed)} of {calls} calls ({failed[0].reason}), for example: {lines[-1]}"
            status = "fail" if len(failed) > _MAX_FAILURE_SHARE * calls else "warn"
            rows = tuple(sorted({failure.sample + 1 for failure in failed}))
            findings.append(Finding("failures", name, status, message, rows))  # type: ignore[arg-type]
        return findings

    def milliseconds(self) -> dict[str, float]:
        """Return the median time per sample of each reward, in the workers and with the way there and back."""
        return {name: 1000 * statistics.median(times or [0.0]) for name, times in self.seconds.items()}


def _own_forms(forms: Sequence[str]) -> dict[str, str]:
    """Return {name: template} of the user's forms; only ``{answer}`` is replaced, other braces are text."""
    for form in forms:
        if "{answer}" not in form:
            raise ConfigurationError(f"--form {form!r} has no {{answer}}, so the gold answer has no place in it")
    escaped = [form.replace("{", "{{").replace("}", "}}").replace("{{answer}}", "{answer}") for form in forms]
    return {f"own {number}": form for number, form in enumerate(escaped, start=1)}


def _prompt_text(prompt: Any) -> str:
    """Return what a model that copies its prompt would write: the last user turn, or the plain prompt."""
    if isinstance(prompt, str):
        return prompt
    return completion_text([{**turn, "role": "assistant"} for turn in prompt if turn.get("role") == "user"])


def spread(rows: Sequence[Any], count: int) -> list[Any]:
    """Return so many rows, spread evenly from the first to the last."""
    if len(rows) <= count:
        return list(rows)
    return [rows[position * len(rows) // count] for position in range(count)]


def _render(recipe: Recipe, prompts: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Return prompts as the model will see them, and a note where its tokenizer cannot be loaded."""
    try:
        from trl_grpo_ext.models import load_tokenizer

        model = recipe.model
        tokenizer = load_tokenizer(
            model.name, revision=model.revision, trust_remote_code=model.trust_remote_code, chat=False
        )
    except Exception as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        return [_as_text(prompt) for prompt in prompts], [f"prompts are shown without the chat template: {first[0]}"]
    kwargs = recipe.trainer.get("chat_template_kwargs") or {}
    return [
        prompt
        if isinstance(prompt, str)
        else str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **kwargs))
        for prompt in prompts
    ], []


def _as_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{turn.get('role')}: {completion_text([{**turn, 'role': 'assistant'}])}" for turn in prompt)


def print_report(report: CheckReport, console: Console) -> None:
    """Print the report as tables."""
    for number, prompt in enumerate(report.prompts, start=1):
        console.print(f"[bold]Prompt {number}, as the model sees it[/bold]")
        console.print(escape(prompt), highlight=False)
        console.print()
    table = Table(
        "reward", "weight", "columns needed", "ms per sample", "pays best", title="Rewards", title_justify="left"
    )
    for name, weight in report.weights.items():
        table.add_row(
            escape(name),
            f"{weight:g}",
            escape(", ".join(report.columns.get(name, ())) or "none"),
            f"{report.milliseconds.get(name, 0):.2f}",
            report.forms.get(name, "-"),
        )
    console.print(table)
    marks = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]FAIL[/red]"}
    title = f"{report.num_rows} of {report.num_available} rows of {report.source}"
    table = Table("", "reward", "check", "finding", title=escape(title), title_justify="left")
    for finding in report.findings:
        rows = ", ".join(str(row) for row in finding.rows[:8]) + (", …" if len(finding.rows) > 8 else "")
        message = finding.message + (f" [rows {rows}]" if rows and finding.status != "ok" else "")
        table.add_row(marks[finding.status], escape(finding.reward), finding.check, escape(message))
    console.print(table)
    for note in report.notes:
        console.print(f"note: {escape(note)}")
    counts = [sum(finding.status == status for finding in report.findings) for status in ("fail", "warn", "ok")]
    console.print("{} failed, {} warnings, {} passed".format(*counts))
