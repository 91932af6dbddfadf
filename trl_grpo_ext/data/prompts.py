"""Turn a source row into what the trainer takes: a prompt, the answer, and the columns that rewards read."""

from __future__ import annotations

import string
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trl_grpo_ext.data.spec import DataSpec
from trl_grpo_ext.errors import DataError, nearest


def is_template(prompt: str) -> bool:
    """Return whether the ``prompt`` key is a template with ``{column}`` in it rather than a column's name."""
    return "{" in prompt


def output_columns(spec: DataSpec, columns: Collection[str]) -> list[str]:
    """Return the columns that rewards will see for a source with these columns, and check the mapping.

    Raises:
        DataError: a column that the mapping names is missing.
    """
    for where, name in _named_columns(spec):
        if name not in columns:
            raise DataError(
                f"{where} names the column {name!r}, but {spec.source} has {', '.join(sorted(columns))}."
                + nearest(name, columns)
            )
    result = [name for name in columns if name not in _consumed(spec) and name not in spec.drop and name != "prompt"]
    result += list(spec.columns)
    if spec.answer is not None and (spec.answer in columns) and "answer" not in result:
        result.append("answer")
    return result


def check_reward_columns(
    needed: Mapping[str, Sequence[str]], available: Collection[str], renamed_from: Collection[str] = ()
) -> None:
    """Raise DataError for the first reward that needs a column the data do not have.

    Args:
        needed: {reward: columns}.
        available: what rewards will see.
        renamed_from: columns of the source, for the hint.
    """
    for reward, columns in needed.items():
        for column in columns:
            if column not in available and column != "prompt":
                close = nearest(column, available)
                source = [name for name in renamed_from if name not in available]
                fix = " Name the gold column with data.answer." if column == "answer" else ""
                fix = fix or f" Map it with data.columns: {{{column}: ...}}."
                raise DataError(
                    f"the reward {reward!r} needs the column {column!r}; the data have {', '.join(sorted(available))}"
                    + (f" (unmapped: {', '.join(sorted(source))})" if source else "")
                    + f".{close}{fix}"
                )


def make_row(row: Mapping[str, Any], spec: DataSpec, where: str) -> dict[str, Any]:
    """Return ``{"prompt": ..., "answer": ..., other columns}`` of one source row.

    Numbers and booleans in the answer become text, because the columns of a data set have one type each.

    Raises:
        DataError: a missing or empty prompt; ``where`` names the row.
    """
    result = {name: value for name, value in row.items() if name not in _consumed(spec) and name not in spec.drop}
    for new, old in spec.columns.items():
        result[new] = row.get(old)
    if spec.answer is not None and spec.answer in row:
        answer = row[spec.answer]
        result["answer"] = answer if answer is None or isinstance(answer, (str, list, dict)) else str(answer)
    result["prompt"] = _prompt(row, spec, where)
    return result


def question_text(prompt: Any) -> str:
    """Return what identifies a question: the text of the user's turns, case and white space levelled.

    System turns do not count, so two rows that ask the same under different instructions are the same question.
    """
    if not isinstance(prompt, str):
        turns = [turn for turn in prompt if turn.get("role") != "system"]
        prompt = "\n".join(f"{turn.get('role')}: {_content_text(turn.get('content'))}" for turn in turns)
    return " ".join(prompt.split()).casefold()


def _content_text(content: Any) -> str:
    """Return the text of a message's content, which may be a list of parts."""
    if isinstance(content, list):
        return " ".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    return str(content)


def _prompt(row: Mapping[str, Any], spec: DataSpec, where: str) -> Any:
    value = _fill(spec.prompt, row, where) if is_template(spec.prompt) else row.get(spec.prompt)
    if isinstance(value, list) and value and all(isinstance(turn, dict) and "role" in turn for turn in value):
        messages = list(value)
        if spec.system is not None and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": spec.system})
        return messages
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"data: {where}: the prompt is {value!r}; it must be text or a list of chat messages")
    if not spec.chat:
        return value if spec.system is None else f"{spec.system}\n\n{value}"
    system = [] if spec.system is None else [{"role": "system", "content": spec.system}]
    return [*system, {"role": "user", "content": value}]


def _fill(template: str, row: Mapping[str, Any], where: str) -> str:
    """Return the template with its columns filled in; an empty cell is an error, not the text "None"."""
    for name in _template_columns(template):
        if row.get(name) is None:
            raise DataError(f"data: {where}: the column {name!r} of the prompt template is empty")
    return template.format_map(row)


def _template_columns(template: str) -> list[str]:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise DataError(f"data.prompt: {template!r} is not a template: {error}; write a literal brace twice") from error
    return [name.split(".")[0].split("[")[0] for name in names]


def _named_columns(spec: DataSpec) -> list[tuple[str, str]]:
    """Return (key, column) for every column that the mapping names."""
    named = [("data.prompt", name) for name in _template_columns(spec.prompt)] if is_template(spec.prompt) else []
    named = named or [("data.prompt", spec.prompt)]
    if spec.answer is not None and spec.answer_given:
        named.append(("data.answer", spec.answer))
    named += [(f"data.columns.{new}", old) for new, old in spec.columns.items()]
    return named + [("data.drop", name) for name in spec.drop]


def _consumed(spec: DataSpec) -> set[str]:
    """Return the source columns that live on under another name, or inside the prompt."""
    consumed = set(spec.columns.values())
    if spec.answer is not None and spec.answer_given:
        consumed.add(spec.answer)
    if not is_template(spec.prompt):
        consumed.add(spec.prompt)
    return consumed
