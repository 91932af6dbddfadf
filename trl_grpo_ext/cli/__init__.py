"""The command line. Modules here stay light; what needs torch is imported when a command has checked its inputs."""

import shlex
import sys
import time

# The first thing that runs, so that a run's wall time holds the seconds spent on imports.
STARTED = time.monotonic()


def command_line() -> str:
    """Return the command as it was typed, for model cards and summaries."""
    return " ".join(["trl-grpo", *map(shlex.quote, sys.argv[1:])])
