"""The command ``trl-grpo``: one file per subcommand, each registered in one line below.

Command modules must import torch, TRL and transformers inside their functions, so that ``--help`` and every refusal of
a bad recipe come at once.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from trl_grpo_ext._version import __version__
from trl_grpo_ext.cli import bench, check, evaluate, merge, migrate, plan, train
from trl_grpo_ext.errors import GroupRelativeError

app = typer.Typer(
    name="trl-grpo",
    help="Train language models with group-relative policy optimisation on top of TRL.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("bench")(bench.bench)
app.command("check")(check.check)
app.command("merge")(merge.merge)
app.command("migrate")(migrate.migrate)
app.command("plan")(plan.plan)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"trl-grpo {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options that stand before the subcommand."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code.

    0: done. 1: the command itself says no (a failed check). 2: a wrong call, recipe or data set, told in one line on
    stderr. 130: interrupted. An error that nobody raised on purpose keeps its traceback.
    """
    # bitsandbytes, imported by peft on any run, recommends another package for 4-bit products on a CPU.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        code = app(args=None if argv is None else list(argv), standalone_mode=False)
    except GroupRelativeError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("trl-grpo: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        # Usage errors of the option parser: where its classes live depends on typer's version.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            if not str(error.format_message()).strip():  # no arguments at all: the help is printed already
                sys.exit(error.exit_code)
            _fail(error.format_message())
        if type(error).__name__ == "Abort":
            sys.exit(130)
        raise
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    """Print one line and leave with 2."""
    print("trl-grpo: error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
