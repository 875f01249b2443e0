"""Check the device that `--device` names, and say what is missing."""

from __future__ import annotations

import torch

from ..errors import CovNormError

KNOWN = ("cpu", "cuda", "mps")


def check_device(name: str) -> None:
    """Check that torch can compute on a device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in KNOWN:
        raise CovNormError(f"--device {name}: unknown device. Choose cpu, cuda, cuda:N or mps.")
    problem = None
    if device.type == "cuda":
        problem = _missing_for_cuda(device.index or 0)
    elif device.type == "mps":
        problem = _missing_for_mps()
    if problem is None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            problem = str(error).splitlines()[0]
    if problem is not None:
        raise CovNormError(f"--device {name}: {problem}. Or use --device cpu.")


def _missing_for_cuda(index: int) -> str | None:
    version = torch.version.cuda or getattr(torch.version, "hip", None)
    if version is None:
        return (
            f"this build of torch ({torch.__version__}) has no CUDA. Install one that has, see "
            "https://pytorch.org/get-started/locally"
        )
    count = torch.cuda.device_count()
    if count == 0:
        return (
            f"torch {torch.__version__} has CUDA {version}, but finds no GPU. Check that "
            "nvidia-smi lists one, that its driver is recent enough, that CUDA_VISIBLE_DEVICES "
            "does not hide it, and that a container has access to it (docker run --gpus all)"
        )
    if index >= count:
        return f"this machine has {count} GPUs. Choose cuda:0 to cuda:{count - 1}"
    return None


def _missing_for_mps() -> str | None:
    if not torch.backends.mps.is_built():
        return (
            f"this build of torch ({torch.__version__}) has no MPS, which exists only in torch for "
            "macOS on Apple silicon"
        )
    if not torch.backends.mps.is_available():
        return "torch finds no GPU: MPS needs an Apple GPU and macOS 14 or later"
    return None
