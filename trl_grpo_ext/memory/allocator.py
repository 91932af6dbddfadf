"""Ask PyTorch's CUDA allocator for segments that grow, which keeps rollouts of varying lengths from fragmenting it."""

from __future__ import annotations

from collections.abc import MutableMapping

# The second is the older name of the same setting; both are read.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OPTION = "expandable_segments"


def request_expandable_segments(
    environ: MutableMapping[str, str], *, cuda_started: bool, older_name: bool
) -> str | None:
    """Switch expandable segments on for a process that has not used CUDA yet.

    Args:
        environ: The process's environment; changed in place. A choice that is already in it is left alone.
        cuda_started: Whether CUDA is initialised; the allocator has then read its settings and reads them no more.
        older_name: Whether this PyTorch (before 2.9) knows the second of ``VARIABLES`` only.

    Returns:
        What to do about it where it is too late, else None.
    """
    if any(_OPTION in environ.get(name, "") for name in VARIABLES):
        return None
    name = VARIABLES[1] if older_name or (VARIABLES[1] in environ and VARIABLES[0] not in environ) else VARIABLES[0]
    if cuda_started:
        return (
            "Too late for expandable segments: CUDA was used before the trainer was built. Start the program with "
            f"{name}={_OPTION}:True in its environment, or set expandable_segments=False in the memory mode."
        )
    environ[name] = ",".join(filter(None, [environ.get(name, ""), f"{_OPTION}:True"]))
    return None
