"""Verifiers: pure functions that judge one completion, and the decorator that lifts them to TRL's batch rewards.

    @verifier(name="exact", columns=("answer",))
    def exact(text, reference, *, ignore_case: bool = True):
        same = text.strip() == reference.strip()
        return Verdict(float(same), "equal" if same else "different", text.strip())

    reward_funcs=[exact(ignore_case=False)]          # a picklable object with TRL's reward signature
    exact().judge("Paris", "paris").score            # the same judgement for one text

A verifier never sees the trainer, the tokeniser or the batch, so that its verdict on a text is the same everywhere.
Modules with verifiers must stay cheap to import: load heavy packages inside the function or in ``warm_up``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trl_grpo_ext.errors import ConfigurationError, RewardError, nearest
from trl_grpo_ext.rewards.options import RESERVED_OPTIONS, check_option_names, check_option_value, option_hints

logger = logging.getLogger(__name__)

# Facts of a row that are no data-set columns. A verifier gets them only if its signature names them.
ROW_FACTS = ("prompt", "completion", "completion_ids")


@dataclass(frozen=True)
class Verdict:
    """What a verifier says about one completion.

    Attributes:
        score: the reward, finite; None when this completion cannot be judged (it then counts neither for nor against).
        reason: a short code in snake case, the same for the same cause, because it is counted ("equal", "no_answer").
        extracted: what was taken from the text as the answer, for the log; None if there was none.
    """

    score: float | None
    reason: str
    extracted: str | None = None


def completion_text(completion: Any) -> str:
    """Return the text to judge: a plain completion itself, or the last assistant message of a conversational one.

    Content blocks are joined in order, text blocks only. A turn without content (a bare tool call) gives "".

    Raises:
        RewardError: if the completion is neither text nor a list of messages.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Mapping):
        return _content_text(completion.get("content"))
    if isinstance(completion, Sequence):
        if not completion:
            return ""
        for message in reversed(completion):
            if not isinstance(message, Mapping):
                break
            if message.get("role", "assistant") == "assistant":
                return _content_text(message.get("content"))
        else:
            return ""
    raise RewardError(
        f"a completion is a {type(completion).__name__}; it must be text or a list of messages with role and content"
    )


def _content_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        blocks = (block if isinstance(block, str) else block.get("text") for block in content)
        return "".join(block for block in blocks if block)
    raise RewardError(f"message content is a {type(content).__name__}; it must be text or a list of content blocks")


class VerifierReward:
    """A verifier with its options, callable as a TRL reward on a whole batch.

    Made by :func:`verifier`, never by hand. Instances hold plain values only, so they pickle.

    Attributes:
        columns: data-set columns a row must have; ``optional_columns`` are passed on when the data set has them.
        reference: the data-set column that holds the gold answer; None if the verifier needs none.
        options: every option with its value, defaults included.
    """

    function: ClassVar[Callable[..., Verdict]]
    verifier_name: ClassVar[str]
    deterministic: ClassVar[bool] = True
    version: ClassVar[str] = "1"
    per_sample: ClassVar[bool] = True  # one completion at a time: the runner may split and reorder freely
    default_options: ClassVar[Mapping[str, Any]] = {}
    own_columns: ClassVar[tuple[str, ...]] = ()
    own_optional_columns: ClassVar[tuple[str, ...]] = ()
    own_reference: ClassVar[str | None] = None
    row_facts: ClassVar[frozenset[str]] = frozenset()
    option_hints: ClassVar[Mapping[str, Any]] = {}
    validate: ClassVar[Callable[[Mapping[str, Any]], None] | None] = None
    warm: ClassVar[Callable[[], None] | None] = None

    def __init__(
        self,
        *,
        reference: str | None = None,
        columns: Mapping[str, str] | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        """Bind the options.

        Args:
            reference: data-set column with the gold answer, where it is not called what the verifier expects.
            columns: renames for the other columns, ``{name the verifier uses: name in the data set}``.
            name: display name in logs and metrics.
            **options: the keyword options of the verifier's function.

        Raises:
            ConfigurationError: for an option the verifier does not have or a value of the wrong kind.
        """
        cls = type(self)
        check_option_names(cls.verifier_name, options, cls.default_options)
        for key, value in options.items():
            check_option_value(cls.verifier_name, key, value, cls.option_hints.get(key))
        self.__name__ = name or cls.verifier_name
        self.options: dict[str, Any] = {**cls.default_options, **options}
        self.column_names = self._column_names(reference, columns or {})
        self.reference = None if cls.own_reference is None else self.column_names[cls.own_reference]
        self.columns = tuple(self.column_names[column] for column in cls.own_columns)
        self.optional_columns = tuple(self.column_names[column] for column in cls.own_optional_columns)
        if cls.validate is not None:
            cls.validate(self.options)

    def _column_names(self, reference: str | None, renames: Mapping[str, str]) -> dict[str, str]:
        """Return {name the verifier uses: name in the data set} for every column."""
        cls = type(self)
        names = {column: column for column in (*cls.own_columns, *cls.own_optional_columns)}
        unknown = [column for column in renames if column not in names]
        if unknown:
            raise ConfigurationError(
                f"reward {cls.verifier_name!r} reads no column {unknown[0]!r}; it reads {sorted(names) or 'none'}."
                + nearest(unknown[0], names)
            )
        names.update(renames)
        if reference is not None:
            if cls.own_reference is None:
                raise ConfigurationError(
                    f"reward {cls.verifier_name!r} compares with no reference, so 'reference: {reference}' "
                    "has no effect; remove it"
                )
            names[cls.own_reference] = reference
        return names

    def __repr__(self) -> str:
        changed = {key: value for key, value in self.options.items() if value != type(self).default_options[key]}
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in changed.items())})"

    def judge(self, text: str, reference: Any = None, **row: Any) -> Verdict:
        """Return the verdict on one text.

        Args:
            text: the completion.
            reference: the gold answer. None, for a verifier that compares with one, gives the verdict "no_reference".
            **row: further columns under the names the verifier uses, and any of "prompt", "completion",
                "completion_ids"; what the verifier does not read is ignored.

        Raises:
            Exception: whatever the verifier's function raises; the batch call and the runner turn it into a failure.
        """
        cls = type(self)
        if reference is None and cls.own_reference is not None:
            return Verdict(None, "no_reference")
        wanted = {key: value for key, value in row.items() if key in cls.row_facts or key in self.column_names}
        if cls.own_reference is not None:
            wanted.pop(cls.own_reference, None)
        verdict = cls.function(text, reference, **wanted, **self.options)
        if not isinstance(verdict, Verdict):
            raise RewardError(
                f"verifier {cls.verifier_name!r} returned {type(verdict).__name__}; it must return a Verdict"
            )
        return verdict

    def judge_row(self, prompt: Any, completion: Any, completion_ids: Any, columns: Mapping[str, Any]) -> Verdict:
        """Return the verdict on one row; ``columns`` holds this row's values under the data set's names."""
        row = {own: columns[theirs] for own, theirs in self.column_names.items() if theirs in columns}
        cls = type(self)
        reference = row.pop(cls.own_reference, None) if cls.own_reference is not None else None
        if "prompt" in cls.row_facts:
            row["prompt"] = prompt
        if "completion" in cls.row_facts:
            row["completion"] = completion
        if "completion_ids" in cls.row_facts:
            row["completion_ids"] = completion_ids
        return self.judge(completion_text(completion), reference, **row)

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] = (),
        completion_ids: Sequence[Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return one score per completion, None where the verifier cannot judge or itself fails.

        This is TRL's reward signature; further keywords of TRL (``trainer_state``, ``log_extra``, …) are ignored.
        A row on which the verifier raises is None, and the first such traceback is logged.

        Raises:
            RewardError: if a column that the verifier needs is missing.
        """
        self._require_columns(columns)
        used = [name for name in (*self.columns, *self.optional_columns) if name in columns]
        scores: list[float | None] = []
        for index, completion in enumerate(completions):
            try:
                verdict = self.judge_row(
                    prompts[index] if prompts is not None else None,
                    completion,
                    completion_ids[index] if completion_ids is not None else None,
                    {name: columns[name][index] for name in used},
                )
                scores.append(verdict.score)
            except Exception:
                if _first_report(self.__name__):
                    logger.warning("Reward %r failed on sample %d; it is left out", self.__name__, index, exc_info=True)
                scores.append(None)
        return scores

    def _require_columns(self, columns: Mapping[str, Any]) -> None:
        for name in self.columns:
            if name not in columns:
                raise RewardError(
                    f"reward {self.__name__!r} needs the column {name!r}; the batch has {sorted(columns) or 'none'}."
                    + nearest(name, columns)
                    + " Name the right one with 'reference: COLUMN' (gold answer) or 'columns: {...}'."
                )

    def warm_up(self) -> None:
        """Load what the verifier needs, so that the first sample does not pay for it."""
        warm = type(self).warm
        if warm is not None:
            warm()


_REPORTED: set[str] = set()


def _first_report(name: str) -> bool:
    """Return whether no failure of this reward was reported before in this process, and note it as reported."""
    first = name not in _REPORTED
    _REPORTED.add(name)
    return first


def verifier(
    *,
    name: str,
    columns: Iterable[str] = ("answer",),
    optional_columns: Iterable[str] = (),
    reference: str | None = "answer",
    deterministic: bool = True,
    version: str = "1",
    validate: Callable[[Mapping[str, Any]], None] | None = None,
    warm_up: Callable[[], None] | None = None,
) -> Callable[[Callable[..., Verdict]], type[VerifierReward]]:
    """Return a decorator that turns ``function(text, reference, *, options) -> Verdict`` into a class of rewards.

    The class takes the function's name, so instances pickle by reference; calling it binds the options. A keyword-only
    parameter with a default is an option, unless it is a column or one of "prompt", "completion", "completion_ids".
    Options annotated as bool, int, float, str or Literal (or one of these or None) are checked on construction.

    Args:
        name: name in recipes and metrics.
        columns: data-set columns a row must have, the reference included; passed as keywords (the reference second).
        optional_columns: passed as keywords if the data set has them; the function needs a default for each.
        reference: which of the columns is the gold answer; None for a verifier that looks at the text alone.
        deterministic: True if the same text, reference and columns always give the same verdict; allows caching.
        version: raise it when verdicts change, so that cached ones are dropped.
        validate: called with all options on construction; raises ConfigurationError for a bad combination.
        warm_up: called once in each worker before the first sample, to import heavy packages.

    Raises:
        ConfigurationError: if the reference is no column, or an option has the name of a recipe key.
    """
    own_columns, own_optional = tuple(columns), tuple(optional_columns)
    if reference is None and own_columns == ("answer",):
        own_columns = ()
    if reference is not None and reference not in own_columns:
        raise ConfigurationError(f"verifier {name!r}: the reference {reference!r} must be one of columns={own_columns}")

    def lift(function: Callable[..., Verdict]) -> type[VerifierReward]:
        parameters = list(inspect.signature(function).parameters.values())[2:]
        named = {parameter.name for parameter in parameters}
        known = {*own_columns, *own_optional, *ROW_FACTS}
        options = {
            parameter.name: parameter.default
            for parameter in parameters
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in known
        }
        clash = [key for key in options if key in RESERVED_OPTIONS or options[key] is inspect.Parameter.empty]
        if clash:
            raise ConfigurationError(
                f"verifier {name!r}: the parameter {clash[0]!r} must be a declared column, or an option with a default "
                f"whose name is none of {', '.join(RESERVED_OPTIONS)}"
            )
        namespace = {
            "__doc__": function.__doc__,
            "__module__": function.__module__,
            "__qualname__": function.__qualname__,
            "function": staticmethod(function),
            "verifier_name": name,
            "deterministic": deterministic,
            "version": version,
            "default_options": options,
            "own_columns": own_columns,
            "own_optional_columns": own_optional,
            "own_reference": reference,
            "row_facts": frozenset(named.intersection(ROW_FACTS)),
            "option_hints": option_hints(function),
            "validate": None if validate is None else staticmethod(validate),
            "warm": None if warm_up is None else staticmethod(warm_up),
        }
        return type(function.__name__, (VerifierReward,), namespace)

    return lift
