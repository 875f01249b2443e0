"""A network refuses to be pickled: its routing would be lost."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import CovNormError


class Unpicklable:
    """A value that cannot be pickled, and with it whatever holds it. Copies share it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Unpicklable:
        return self

    def __reduce__(self) -> NoReturn:
        raise CovNormError(
            "a MultiDomainNetwork and its backbone cannot be pickled (torch.save, spawned "
            "processes). Write each domain with net.save_domain(name, folder), or all with "
            "torch.save(net.state_dict(), file), and build the network again where you load them. "
            "net.merge(name) is a plain module that can be pickled."
        )
