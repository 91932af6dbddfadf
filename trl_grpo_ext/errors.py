"""Every exception that this package raises on purpose.

A message names the value received, the allowed range and what to change. The command line prints such an error as
one line and exits with 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Iterable


class GroupRelativeError(Exception):
    """Base of every error raised on purpose."""


class ConfigurationError(GroupRelativeError, ValueError):
    """A setting, recipe key or argument that cannot work."""


class DataError(GroupRelativeError, ValueError):
    """A data set that cannot be trained on: a missing column, too few rows, an unreadable file."""


class MissingDependencyError(GroupRelativeError, ImportError):
    """An optional package that the chosen feature needs is not installed."""


class RewardError(GroupRelativeError, RuntimeError):
    """Rewards failed more often than the run allows, or returned something that is not a reward."""


class NothingTrainedError(GroupRelativeError, RuntimeError):
    """A whole run in which not one trained number changed."""


class MemoryBudgetError(GroupRelativeError, RuntimeError):
    """Memory ran out and no smaller piece of work is left to try."""


class SandboxError(GroupRelativeError, RuntimeError):
    """No safe way to run untrusted code on this machine, or the sandbox itself broke."""


class SeamError(GroupRelativeError, RuntimeError):
    """The installed TRL does not have the private method that this package builds on."""


def install_command(package: str) -> str:
    """Return the shell command that installs ``package`` for the running Python, whichever ``pip`` comes first in PATH.

    ``package`` is what pip is to get, for example ``"trl-grpo-ext[qlora]"``.
    """
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.quote(package)}"


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest of ``choices``, or an empty string when nothing is close."""
    matches = difflib.get_close_matches(str(name), [str(choice) for choice in choices], n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""
