"""``code``: the program in the completion passes the row's tests, in a local sandbox.

Everything that can go wrong in the program is a score of 0 with a reason; a fault of the sandbox or of the tests is no
score. See docs/sandbox.md for what protects the machine, the forms of tests and the reason codes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trl_grpo_ext.errors import ConfigurationError, MissingDependencyError, SandboxError
from trl_grpo_ext.rewards.sandbox.backends import disabled_layers
from trl_grpo_ext.rewards.sandbox.extract import extract, join_prompt
from trl_grpo_ext.rewards.sandbox.grading import Tests, grade
from trl_grpo_ext.rewards.sandbox.limits import SandboxLimits
from trl_grpo_ext.rewards.sandbox.pool import SandboxPool, default_workers, shared_pool
from trl_grpo_ext.rewards.sandbox.results import TestOutcome
from trl_grpo_ext.rewards.sandbox.rows import interpret
from trl_grpo_ext.rewards.sandbox.runners import ProgramRunner, drive_with, load_runner
from trl_grpo_ext.rewards.verifier import Verdict, completion_text, verifier

logger = logging.getLogger(__name__)

_LIMITS = ("cpu_s", "wall_s", "memory_mib", "threads", "output_bytes", "scratch_mib")
WASM = "wasm"
_WASM_PATH = "trl_grpo_ext.rewards.sandbox.wasm:WasmRunner"
_RUNNERS: dict[str, ProgramRunner | None] = {}


def _limits(options: Mapping[str, Any]) -> SandboxLimits:
    return SandboxLimits(**{name: options[name] for name in _LIMITS})


def _validate(options: Mapping[str, Any]) -> None:
    """Check what can be checked without starting anything.

    Raises:
        ConfigurationError: for a value out of range, an unknown backend or another language.
    """
    _limits(options)
    if options["language"] not in ("python", "py", "python3"):
        raise ConfigurationError(f"reward 'code': language={options['language']!r} cannot be run; only 'python' can")
    if ":" not in options["sandbox"] and options["sandbox"] != WASM:
        disabled = disabled_layers(options["sandbox"])
        if options["scratch_mib"] and "namespaces" in disabled:
            raise ConfigurationError(f"reward 'code': scratch_mib needs namespaces, not sandbox={options['sandbox']!r}")
    if not 0 <= options["tolerance"] < 1:
        raise ConfigurationError(f"reward 'code': tolerance={options['tolerance']!r} must lie between 0 and 1")
    for name in ("max_tests", "workers"):
        if options[name] is not None and options[name] < 1:
            raise ConfigurationError(f"reward 'code': {name}={options[name]!r} must be at least 1, or left out")
    packages = options["packages"]
    if packages is not None and (isinstance(packages, str) or not all(isinstance(name, str) for name in packages)):
        raise ConfigurationError(f"reward 'code': packages={packages!r} must be a list of package names")


def _pool(options: Mapping[str, Any]) -> SandboxPool:
    return shared_pool(
        _limits(options),
        workers=options["workers"],
        backend=options["sandbox"],
        packages=tuple(options["packages"] or ()),
    )


def _runner(options: Mapping[str, Any]) -> ProgramRunner | None:
    """Return the plug-in or WASM runner that the options mean, None for the local sandbox.

    Raises:
        ConfigurationError: if the path names no runner.
        MissingDependencyError: if WASM is asked for and not installed.
        SandboxError: if "auto" finds neither a safe local backend nor WASM.
    """
    wish = options["sandbox"]
    if wish not in _RUNNERS:
        if ":" in wish or wish == WASM:
            _RUNNERS[wish] = load_runner(_WASM_PATH if wish == WASM else wish)
        elif wish == "auto":
            _RUNNERS[wish] = _last_resort(options)
        else:
            _RUNNERS[wish] = None
    return _RUNNERS[wish]


def _last_resort(options: Mapping[str, Any]) -> ProgramRunner | None:
    """Return None if the local sandbox works, else the WASM runner if it is installed.

    Raises:
        SandboxError: if neither is to be had.
    """
    try:
        _ = _pool(options).report
        return None
    except SandboxError as refusal:
        try:
            runner = load_runner(_WASM_PATH)
        except MissingDependencyError as error:
            raise SandboxError(f"{refusal} [{error}]") from error
        logger.warning("code: no local sandbox (%s); programs run in WASM, slowly", refusal)
        return runner


def _prepare(
    text: str, reference: Any, row: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[str, Tests] | Verdict:
    """Return (program, tests), or the verdict on a completion without a program.

    Raises:
        DataError: if the row's tests are not understood.
    """
    language = row.get("language")
    if language is not None and str(language).lower() not in ("python", "py", "python3"):
        return Verdict(None, "unsupported_language")
    prompt_code, entry_point = row.get("prompt_code") or None, row.get("entry_point") or None
    tests = interpret(
        reference,
        entry_point=entry_point,
        setup=row.get("setup"),
        prompt_code=prompt_code,
        output=options["output"],
        tolerance=float(options["tolerance"]),
        max_tests=options["max_tests"],
        budget_s=float(options["budget_s"]),
    )
    found = extract(text, block=options["block"], source=options["source"], accept_unclosed=options["accept_unclosed"])
    if found.program is None:
        return Verdict(0.0, found.reason)
    program = join_prompt(found.program, prompt_code, entry_point) if prompt_code else found.program
    return program, tests


def _verdict(program: str, outcome: TestOutcome, score: str) -> Verdict:
    if outcome.fault:
        logger.warning("code: no verdict (%s): %s", outcome.reason, outcome.detail)
        return Verdict(None, outcome.reason, program)
    if score == "all" or outcome.total == 0:
        return Verdict(float(outcome.reason == "passed"), outcome.reason, program)
    return Verdict(outcome.passed / outcome.total, outcome.reason, program)


def _outcomes(jobs: Sequence[tuple[str, Tests]], options: Mapping[str, Any]) -> list[TestOutcome]:
    """Return the outcomes of (program, tests) pairs, run at the same time.

    Raises:
        SandboxError: if there is no safe way to run programs on this machine.
    """
    stop_early = options["score"] == "all"
    runner = _runner(options)
    if runner is not None:
        workers = options["workers"] or default_workers()
        return drive_with(runner, jobs, _limits(options), stop_early=stop_early, workers=workers)
    return _pool(options).drive([grade(program, tests, stop_early=stop_early) for program, tests in jobs])


def _judge(
    text: str,
    tests: Any,
    *,
    entry_point: str | None = None,
    setup: Any = None,
    prompt_code: str | None = None,
    language: str = "python",
    block: Literal["last", "first", "longest", "all"] = "last",
    source: Literal["auto", "block", "raw"] = "auto",
    accept_unclosed: bool = False,
    score: Literal["all", "share"] = "all",
    output: Literal["exact", "lines", "tokens"] = "lines",
    tolerance: float = 0.0,
    max_tests: int | None = None,
    cpu_s: float = 2.0,
    wall_s: float | None = None,
    memory_mib: int = 512,
    threads: int = 16,
    output_bytes: int = 1 << 20,
    scratch_mib: int = 0,
    budget_s: float = 20.0,
    workers: int | None = None,
    sandbox: str = "auto",
    packages: Any = None,
) -> Verdict:
    """Return 1 if the program in the completion passes the row's tests, else 0 (or the share of tests passed).

    Args:
        text: the completion.
        tests: the row's tests, in one of the forms of ``sandbox.rows``.
        entry_point: column; the function that is judged, where the tests do not name it.
        setup: column; code before the tests.
        prompt_code: column; code that the prompt gave, with the head of the function.
        language: of all rows; only Python is run.
        block: which fenced block counts.
        source: "block" wants a fenced block, "raw" takes the whole text, "auto" either.
        accept_unclosed: whether a block that is cut off counts.
        score: "all" or the "share" of tests passed. A share invites programs that answer only the tests they can guess.
        output: comparison of standard output.
        tolerance: for floats, relative and absolute; 0 compares exactly.
        max_tests: use the first so many tests of a row.
        cpu_s: CPU seconds of a program over all its calls; of each input, with tests on standard input.
        wall_s: wall seconds without time waited for a processor; None means ``4 * cpu_s + 1``.
        memory_mib: memory of a program.
        threads: threads of a program at a time.
        output_bytes: what a program may print.
        scratch_mib: size of a writable working folder; 0 for none.
        budget_s: seconds for all inputs of one program together.
        workers: programs at a time in this process; None means two per processor.
        sandbox: "auto", a backend's name, "wasm", "module:runner" for a plug-in, or "unsafe".
        packages: installed packages that programs may import besides the standard library.
    """
    options = {name: value for name, value in locals().items() if name not in ("text", "tests")}
    row = {name: options.pop(name) for name in ("entry_point", "setup", "prompt_code")}
    prepared = _prepare(text, tests, row, options)
    if isinstance(prepared, Verdict):
        return prepared
    return _verdict(prepared[0], _outcomes([prepared], options)[0], score)


class CodeReward(
    verifier(  # type: ignore[misc]  # the base class is made here, so that the module has one class of this name
        name="code",
        columns=("tests",),
        optional_columns=("entry_point", "setup", "prompt_code"),
        reference="tests",
        deterministic=True,
        version="1",
        validate=_validate,
    )(_judge)
):
    """The verifier with its options; a whole batch is judged at the same time."""

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] = (),
        completion_ids: Sequence[Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return one score per completion, None where a fault of the sandbox or of the tests leaves it open.

        Raises:
            RewardError: if the column of tests is missing.
            SandboxError: if there is no safe way to run programs on this machine.
        """
        return [verdict.score for verdict in self.judge_batch(completions, columns)]

    def judge_batch(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[Verdict]:
        """Return one verdict per completion; ``columns`` has the data set's names.

        Raises:
            RewardError: if the column of tests is missing.
            SandboxError: if there is no safe way to run programs on this machine.
        """
        self._require_columns(columns)
        verdicts: list[Verdict | None] = [None] * len(completions)
        places, jobs = [], []
        for index, completion in enumerate(completions):
            row = {own: columns[theirs][index] for own, theirs in self.column_names.items() if theirs in columns}
            reference = row.pop("tests")
            try:
                if reference is None:
                    verdicts[index] = Verdict(None, "no_reference")
                    continue
                prepared = _prepare(completion_text(completion), reference, row, self.options)
            except Exception as error:
                logger.warning("code: sample %d is left out: %s", index, error)
                verdicts[index] = Verdict(None, "test_error")
                continue
            if isinstance(prepared, Verdict):
                verdicts[index] = prepared
            else:
                places.append(index)
                jobs.append(prepared)
        for index, job, outcome in zip(places, jobs, self._run(jobs), strict=True):
            verdicts[index] = _verdict(job[0], outcome, self.options["score"])
        return [verdict or Verdict(None, "sandbox_fault") for verdict in verdicts]

    def _run(self, jobs: Sequence[tuple[str, Tests]]) -> list[TestOutcome]:
        """Return the outcomes; a sandbox that worked before and broke is a fault, not an error."""
        try:
            return _outcomes(jobs, self.options)
        except SandboxError as error:
            if not _HAS_WORKED:
                raise
            return [TestOutcome(0, 0, "sandbox_fault", str(error), fault=True) for _ in jobs]
        finally:
            _HAS_WORKED.add(True)

    def warm_up(self) -> None:
        """Start the sandbox, so that the first sample does not wait for it, and log what protects the machine.

        Raises:
            SandboxError: if there is no safe way to run programs on this machine.
        """
        if _runner(self.options) is None:
            _ = _pool(self.options).report

    def describe_protection(self) -> list[str]:
        """Return what would protect this machine under these options, as lines of text; see ``describe_sandbox``."""
        if _runner(self.options) is not None:
            return [f"code runs in {self.options['sandbox']}, which is trusted to confine it"]
        return describe_sandbox(self.options["sandbox"])


_HAS_WORKED: set[bool] = set()


def describe_sandbox(backend: str = "auto") -> list[str]:
    """Return what would protect this machine, as lines of text; starts the sandbox and tries the forbidden acts.

    Never raises for a machine without a safe backend: the refusal is the text then.
    """
    try:
        with SandboxPool(backend=backend, workers=1) as pool:
            return pool.report.lines()
    except SandboxError as error:
        return [str(error)]
