"""Training in several processes: refused where it would train several domains."""

from __future__ import annotations

import torch.distributed as dist

from ..errors import CovNormError


def check_single_process(what: str) -> None:
    """Check that this process is the only one of its process group, if it has one.

    what: the function that does not synchronize its processes, for the message.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise CovNormError(
            f"{what} in a process group of {dist.get_world_size()} processes: it does not "
            "synchronize them yet, so each would train a different domain. Call it in one process "
            "without init_process_group, or train with your own loop and DistributedDataParallel "
            "(docs/howto/at-work.md)."
        )
