"""Export a domain to files that need none of this package: torch.export, ONNX, a state dict.

Every file is read back and compared with the network before it is written to disk.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from .. import records
from ..ecology.prediction import ASSUMED
from ..errors import CovNormError, choices
from ..network import basis, files
from ..network.domain import Domain
from ..network.network import MultiDomainNetwork
from ..network.routing import eval_mode
from ..training.seeds import random_numbers_kept

FORMAT = "torch-covnorm export"
ENDINGS = {"torch": ".pt2", "onnx": ".onnx", "state-dict": ".safetensors"}
FORMATS = (*ENDINGS, "domain")
_REMEDY = f"Choose another to= ({', '.join(FORMATS)})."
ONNX_LIMIT = 2**31 - 2**20  # a protobuf message is below 2 GB, and the graph needs some of it

# The bytes of a file, and the function that was read back from them.
Built = tuple[bytes, Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Exported:
    """The result of `export`.

    difference: the largest absolute difference to the network's logits on the check images; None
        for "domain", which stores the domain unchanged.
    bytes: total size of the files.
    """

    files: tuple[Path, ...]
    to: str
    difference: float | None
    bytes: int


def export(
    net: MultiDomainNetwork,
    name: str,
    out: str | os.PathLike[str],
    to: str = "torch",
    *,
    size: int | tuple[int, int] | None = None,
) -> Exported:
    """Write a domain as one file, and a JSON file that describes its input and output.

    Args:
        out: the file, or a folder for a file (for "domain", a subfolder) with the name of the
            domain. The JSON of ``flowers.onnx`` is ``flowers.onnx.json``.
        to: "torch", the merged network as a torch.export program (.pt2); "onnx"; "state-dict", its
            weights (.safetensors) with the backbone's key names, or with an `own` module those of
            ``nn.Sequential(backbone, own)``; "domain", a folder for `load_domain`, with the basis
            of a joint domain in its ``basis/``.
        size: of the images, n or (h, w); required if the domain's preprocessing has none.

    The first three take float32 ``images`` (n, 3, h, w), preprocessed as for the network, and
    return ``logits`` (n, classes), for any n. They are written only if they agree with the network
    on random images (within 1e-4 of the largest logit in float32). The network is not changed.
    """
    if to not in FORMATS:
        raise CovNormError(f"to={to!r}: {choices(to, FORMATS)}")
    domain = net.domain(name)
    if to == "domain":
        return _export_domain(net, domain, Path(out) / name)
    if to == "onnx":
        _packages()
    file = _file(Path(out), name, to)
    shape = _input_shape(net, domain, size)
    about = _about(net, domain, shape)
    try:
        records.sealed(FORMAT, about)
    except CovNormError as error:  # before the work, not after it
        raise CovNormError(f"domain {name!r}: its preprocessing {error}") from None
    with random_numbers_kept(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        generator = torch.Generator().manual_seed(0)
        images = [torch.randn(n, *shape, generator=generator) for n in (1, 3)]
        expected = [_logits(net, name, x) for x in images]
        merged = net.merge(name).cpu().float()
        if to == "state-dict":
            plain = merged.get_submodule("0") if domain.runs_own else merged
            about["layers"] = _restore_(plain, net)
            blob, run = _state_dict(merged, about)
        else:
            blob, run = (_torch if to == "torch" else _onnx)(merged, images[-1], about)
        checks = zip(images, expected, strict=True)
        difference = max(_difference(f"{name!r} as {to}", run, x, y, net) for x, y in checks)
    output = {"name": "logits", "shape": ["n", *expected[0].shape[1:]]}
    record = {"to": to, **about, "difference": difference, "output": output}
    record |= {"file": file.name, "sha256": hashlib.sha256(blob).hexdigest()}
    description = file.with_name(file.name + ".json")
    text = records.sealed(FORMAT, record)
    _write({file: blob, description: text})
    return Exported((file, description), to, difference, len(blob) + len(text))


def _export_domain(net: MultiDomainNetwork, domain: Domain, folder: Path) -> Exported:
    places = [(folder / files.RECORD, files.FORMAT)]
    if domain.basis is not None:  # first, because the domain cannot be loaded without it
        net.save_basis(domain.basis, folder / "basis")
        places.append((folder / "basis" / basis.RECORD, basis.FORMAT))
    net.save_domain(domain.name, folder)
    written: list[Path] = []
    for file, format_ in places:
        written += [file, records.tensor_file(file, records.read(file, format_))]
    return Exported(tuple(written), "domain", None, sum(f.stat().st_size for f in written))


# ── the input and its description ────────────────────────────────────────────────────────────────


def _file(out: Path, name: str, to: str) -> Path:
    if out.suffix in ENDINGS.values() and out.suffix != ENDINGS[to]:
        raise CovNormError(f"{out}: to={to!r} writes {ENDINGS[to]}. Rename it, or change to=.")
    return out if out.suffix == ENDINGS[to] else out / f"{name}{ENDINGS[to]}"


def _input_shape(net: MultiDomainNetwork, domain: Domain, size: Any) -> tuple[int, ...]:
    """Return the shape of one sample: (c, h, w), or (d,) if the first layer is Linear."""
    stem = next(m for m in net.backbone.modules() if isinstance(m, nn.Conv2d | nn.Linear))
    if isinstance(stem, nn.Linear):
        return (stem.in_features,)
    if size is None and isinstance(domain.preprocessing, dict):
        size = domain.preprocessing.get("size")
    sides = size if isinstance(size, list | tuple) else (size, size)
    if len(sides) != 2 or not all(type(s) is int and s > 0 for s in sides):
        problem = f"domain {domain.name!r} has no valid input size ({size!r})"
        raise CovNormError(f"{problem}. Set size= in pixels, n or (h, w).")
    return (stem.in_channels, *sides)


def _about(net: MultiDomainNetwork, domain: Domain, shape: tuple[int, ...]) -> dict[str, Any]:
    preprocessing: Any = domain.preprocessing
    if preprocessing is None or isinstance(preprocessing, dict):  # null: unknown
        assumed = ASSUMED if preprocessing else dict.fromkeys(ASSUMED)
        unknown = {"size": None, "mean": None, "std": None, **assumed}
        preprocessing = unknown | (preprocessing or {})
        if len(shape) == 3:
            preprocessing["size"] = shape[1] if shape[1] == shape[2] else list(shape[1:])
    known = isinstance(preprocessing, dict) and preprocessing["mean"] is not None
    values = "(RGB / 255 - mean) / std" if known else None
    return {
        "domain": domain.name,
        "classes": None if domain.classes is None else list(domain.classes),
        "preprocessing": preprocessing,
        "input": {"name": "images", "shape": ["n", *shape], "type": "float32", "values": values},
        "backbone": {"class": type(net.backbone).__name__, "fingerprint": net.fingerprint},
    }


# ── the formats ──────────────────────────────────────────────────────────────────────────────────


def _program(merged: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    n = torch.export.Dim("n", min=1)
    name = type(merged).__name__
    with _exporter_errors(f"torch.export cannot trace {name} for batches of any size"):
        program = torch.export.export(merged, (x,), dynamic_shapes=({0: n},), strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it contains paths of this machine
    return program


def _torch(merged: nn.Module, x: Tensor, about: dict[str, Any]) -> Built:
    program, stream = _program(merged, x), io.BytesIO()
    with _exporter_errors(f"torch.export cannot save {type(merged).__name__}"):
        text = json.dumps(about, ensure_ascii=False)
        torch.export.save(program, stream, extra_files={"covnorm.json": text})
        blob = stream.getvalue()
        return blob, torch.export.load(io.BytesIO(blob)).module()


def _onnx(merged: nn.Module, x: Tensor, about: dict[str, Any]) -> Built:
    onnx, onnxruntime = _packages()
    size = sum(t.nbytes for t in merged.state_dict().values())
    if size > ONNX_LIMIT:
        raise CovNormError(f"weights of {size:,} bytes: ONNX must be below 2 GB. Use to='torch'.")
    program = _program(merged, x)
    with _exporter_errors(f"torch.onnx cannot export {type(merged).__name__}"):
        exported = torch.onnx.export(
            program,
            input_names=["images"],
            output_names=["logits"],
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        assert exported is not None
        model = _tidied(exported.model_proto)
        strings = {k: v if isinstance(v, str) else json.dumps(v) for k, v in about.items()}
        onnx.helper.set_model_props(model, strings)
        onnx.checker.check_model(model, full_check=True)
        blob = model.SerializeToString()
        session = onnxruntime.InferenceSession(blob, providers=["CPUExecutionProvider"])
    return blob, lambda x: torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])


def _packages() -> tuple[Any, Any]:
    """Import onnx and onnxruntime, and check for onnxscript, which torch.onnx needs."""
    try:
        names = ("onnx", "onnxruntime", "onnxscript")
        onnx, onnxruntime, _ = (importlib.import_module(name) for name in names)
    except ImportError as error:
        raise CovNormError(f"to='onnx': {error}. Run pip install 'torch-covnorm[onnx]'.") from None
    return onnx, onnxruntime


def _tidied(model: Any) -> Any:
    """Name the batch dimension "n", and remove torch's notes on the origin of each node."""
    graph = model.graph
    del graph.value_info[:]
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if symbol and dim.dim_param == symbol:
                dim.dim_param = "n"
    return model


def _state_dict(merged: nn.Module, about: dict[str, Any]) -> Built:
    tensors = ((k, v) for k, v in merged.state_dict().items() if isinstance(v, Tensor))
    state = {k: v.contiguous().clone() for k, v in tensors}  # tied weights are stored twice
    # One string, because several would be in a different order each time.
    blob = safetensors.torch.save(state, {"covnorm": json.dumps(about, ensure_ascii=False)})
    plain = copy.deepcopy(merged)
    with _exporter_errors(f"{type(merged).__name__} does not load its state dict"):
        # These bytes were just made, and the format cannot contain code.
        plain.load_state_dict(safetensors.torch.load(blob), assign=True)
    return blob, plain


def _restore_(plain: nn.Module, net: MultiDomainNetwork) -> dict[str, dict[str, Any]]:
    """Give merged layers the backbone's keys again. Return {layer: settings} that still differ.

    A bias b that merging added moves into the norm after it: norm(z + b) is norm(z) with mean − b.
    """
    changed: dict[str, dict[str, Any]] = {}
    for name, site in net.sites.items():
        old, layer = net.backbone.get_submodule(name), plain.get_submodule(name)
        if getattr(old, "groups", 1) != getattr(layer, "groups", 1):
            changed[name] = {"groups": layer.groups}
        if old.bias is not None or layer.bias is None:
            continue
        norm = plain.get_submodule(site.norm_behind) if site.norm_behind else None
        mean = getattr(norm, "running_mean", None)
        if isinstance(mean, Tensor):
            mean -= layer.get_parameter("bias")
            layer.register_parameter("bias", None)
        else:
            changed.setdefault(name, {})["bias"] = True
    return changed


# ── the check ────────────────────────────────────────────────────────────────────────────────────


def _logits(net: MultiDomainNetwork, name: str, x: Tensor) -> Tensor:
    anchor = next(net.backbone.parameters())
    with eval_mode(net.backbone, net.domain(name)):
        y = net(x.to(anchor.device, anchor.dtype), domain=name)
    if not isinstance(y, Tensor) or len(y) != len(x):
        got = f"domain {name!r} returns a {type(y).__name__}"
        raise CovNormError(f"{got}: only one tensor (n, …) can be exported. Use to='domain'.")
    if not y.isfinite().all():
        raise CovNormError(f"domain {name!r} returns NaN or Inf for random images. Retrain it.")
    return y.cpu().float()


def _difference(
    what: str, run: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, net: MultiDomainNetwork
) -> float:
    """Return the largest difference of run(x) to y. More than rounding can cause is an error."""
    with _exporter_errors(f"{what} does not run on a batch of {len(x)}"):
        result = run(x)
    anchor = next(net.backbone.parameters())
    eps = max(torch.finfo(anchor.dtype).eps, 0 if anchor.device.type == "cpu" else 2**-10)  # TF32
    limit = max(1e-4, 32 * eps) * (1 + y.abs().max().item())
    difference = (result - y).abs().max().item() if result.shape == y.shape else torch.inf
    if not difference <= limit:
        raise CovNormError(
            f"{what} differs from the network by {difference:.3g} on a batch of {len(x)}, more "
            f"than {limit:.3g}. Nothing was written. {_REMEDY}"
        )
    return difference


@contextlib.contextmanager
def _exporter_errors(what: str) -> Iterator[None]:
    """Turn errors of an exporter into CovNormErrors: `what`, and the start of the message.

    Its deprecation warnings are hidden, because users cannot act on them.
    """
    try:
        with warnings.catch_warnings():
            for category in (FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", category)
            yield
    except Exception as error:  # exporters raise many types
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CovNormError(f"{what} ({reason}). Nothing was written. {_REMEDY}") from error


def _write(contents: dict[Path, bytes]) -> None:
    """Write each file completely. If one fails, remove those that did not exist before."""
    with contextlib.ExitStack() as undo:
        for file, data in contents.items():
            with records.blame(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                if not file.exists():
                    undo.callback(file.unlink, missing_ok=True)
                records.write_file(file, data)
        undo.pop_all()
