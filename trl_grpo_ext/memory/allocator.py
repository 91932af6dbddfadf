"""Ask PyTorch's CUDA allocator for segments that grow, which keeps rollouts of varying lengths from fragmenting it."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

# The second is the older name of the same setting; both are read.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OPTION = "expandable_segments"


def request_expandable_segments(
    environ: MutableMapping[str, str],
    *,
    older_name: bool,
    cuda_started: bool,
    set_now: Callable[[str], Any] | None,
) -> str | None:
    """Switch expandable segments on for this process and its children.

    Args:
        environ: The process's environment; changed in place. A choice that is already in it is left alone.
        older_name: Whether this PyTorch (before 2.9) knows the second of ``VARIABLES`` only.
        cuda_started: Whether CUDA is initialised; the allocator has then read the environment and reads it no more.
        set_now: PyTorch's function that gives a running allocator its settings, for the segments to come; None where
            this PyTorch has none.

    Returns:
        What to do about it where it is too late, else None.
    """
    if any(_OPTION in environ.get(name, "") for name in VARIABLES):
        return None
    name = VARIABLES[1] if older_name or (VARIABLES[1] in environ and VARIABLES[0] not in environ) else VARIABLES[0]
    settings = ",".join(filter(None, [environ.get(name, ""), f"{_OPTION}:True"]))
    if cuda_started:
        try:
            if set_now is None:
                raise RuntimeError("this PyTorch has no function for it")
            set_now(settings)
        except RuntimeError as error:
            return (
                f"Too late for expandable segments: CUDA was used before the trainer was built ({error}). Start the "
                f"program with {name}={_OPTION}:True in its environment, or set expandable_segments=False in the "
                "memory mode."
            )
    environ[name] = settings
    return None
