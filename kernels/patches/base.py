"""What all patches share: how they refuse, check what they replace, replace it, and say whether they act."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger("vllm.pareto")

KNOWN_RELEASES = ("0.26",)
"""Releases of vLLM whose GPU code the patches were written against and measured on."""


class PatchRefusedError(RuntimeError):
    """A patch does not fit the vLLM, model or machine it was asked for; nothing was changed."""


@dataclass
class Patch:
    """A patch that acts in this process.

    Attributes:
        name: the environment key that switches it, or what it is called where no key does.
        taken: calls from Python that went the patched way. A CUDA graph counts once, when it is captured, however
            often it is replayed.
        left: calls that the patch left to vLLM's own code, because they are not what it was written for.
    """

    name: str
    taken: int = 0
    left: int = 0
    _replaced: list[tuple[Any, str, Any]] = field(default_factory=list, repr=False)

    def replace(self, owner: Any, attribute: str, new: Any) -> Any:
        """Put `new` in the place of an attribute of a class or module; returns what stood there."""
        old = getattr(owner, attribute)
        # A method that a class inherits is given back by removing it, not by a copy of its own.
        self._replaced.append((owner, attribute, vars(owner).get(attribute)))
        setattr(owner, attribute, new)
        return old

    def remove(self) -> None:
        """Give everything back, last first. CUDA graphs that were captured keep what they hold."""
        for owner, attribute, old in reversed(self._replaced):
            if old is None:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, old)
        self._replaced.clear()
        active.pop(self.name, None)


active: dict[str, Patch] = {}
"""The patches that act in this process, by name."""


def activate(patch: Patch, what: str) -> Patch:
    """Register an installed patch, and say so in vLLM's log."""
    active[patch.name] = patch
    logger.info("%s is active: %s.", patch.name, what)
    return patch


def refusal(name: str, why: str) -> PatchRefusedError:
    """The error of a patch that was asked for by its key and cannot be had; `why` is a clause."""
    return PatchRefusedError(f"{name}=1 is refused: {why}. Unset {name} to run vLLM's own code.")


def require_gpu_release(name: str) -> None:
    """Require a CUDA GPU and a release of vLLM that the patches know.

    Raises:
        PatchRefusedError: naming what was found.
    """
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise refusal(name, f"its kernels run on an NVIDIA GPU, and vLLM runs on {current_platform.device_type} here")
    found = str(vllm.__version__)
    if ".".join(found.split(".")[:2]) not in KNOWN_RELEASES:
        raise refusal(name, f"it knows vLLM {', '.join(KNOWN_RELEASES)}, and this is vLLM {found}")


def require_parameters(name: str, owner: Any, function: str, parameters: Sequence[str]) -> Any:
    """Require that `owner` has a function with exactly these parameters, in this order; returns it.

    Raises:
        PatchRefusedError: it is missing or takes others.
    """
    found = getattr(owner, function, None)
    where = f"{getattr(owner, '__name__', owner)}.{function}"
    if not callable(found):
        raise refusal(name, f"this vLLM has no {where}")
    taken = list(inspect.signature(found).parameters)
    if taken != list(parameters):
        raise refusal(name, f"{where} of this vLLM takes ({', '.join(taken)}), not ({', '.join(parameters)})")
    return found


def require_attributes(name: str, owner: Any, attributes: Sequence[str]) -> None:
    """Require that an object has these attributes.

    Raises:
        PatchRefusedError: naming the first that is missing.
    """
    for attribute in attributes:
        if not hasattr(owner, attribute):
            kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
            raise refusal(name, f"{kind} of this vLLM has no {attribute}")
