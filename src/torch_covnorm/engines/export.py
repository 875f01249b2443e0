"""One domain as a network that needs nothing of ours: torch.export, ONNX, a state dict.

What was made is read back and run beside the network before it gets its place on disk.
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
from ..errors import CovNormError, choices
from ..network import basis, files
from ..network.domain import Domain
from ..network.network import MultiDomainNetwork
from ..network.routing import eval_mode
from ..training.seeds import random_numbers_kept

FORMAT = "torch-covnorm export"
ENDINGS = {"torch": ".pt2", "onnx": ".onnx", "state-dict": ".safetensors"}
FORMATS = (*ENDINGS, "domain")
_REMEDY = f"choose another to= ({', '.join(FORMATS)})"
ONNX_LIMIT = 2**31 - 2**20  # a protobuf message is smaller than 2 GB; some of it for the graph

# The bytes of a file, and what was read back from them.
Made = tuple[bytes, Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Exported:
    """What `export` wrote.

    difference: the largest absolute difference of logits to the network on the check images; None
    for "domain", which stores the domain's own numbers. bytes: of all files.
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
    """Write a domain as one file, with a JSON beside it that says what goes in and comes out.

    Args:
        out: the file, or, without the format's ending, a folder where it gets the domain's name.
            Beside ``flowers.onnx`` stands ``flowers.onnx.json``. For "domain": a folder where the
            domain gets one of its name.
        to: "torch", the merged network as a torch.export program (.pt2); "onnx"; "state-dict", its
            weights (.safetensors) by the backbone's key names, with an `own` module by those of
            ``nn.Sequential(backbone, own)``; "domain", a folder for `load_domain`, with the basis
            of a joint domain in its ``basis/``.
        size: of the images, n or (h, w); needed where the domain's preprocessing has none.

    The first three take float32 ``images`` (n, 3, h, w), prepared as for the network, and answer
    ``logits`` (n, classes), for any n. They are written only if they answer random images as the
    network does (1e-4 of the largest logit in float32). The network stays as it was.
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
    except CovNormError as error:  # before the work, not behind it
        raise CovNormError(f"domain {name!r}: its preprocessing {error}") from None
    with random_numbers_kept(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        generator = torch.Generator().manual_seed(0)
        images = [torch.randn(n, *shape, generator=generator) for n in (1, 3)]
        answers = [_answer(net, name, x) for x in images]
        merged = net.merge(name).cpu().float()
        if to == "state-dict":
            plain = merged.get_submodule("0") if domain.runs_own else merged
            about["layers"] = _restore_(plain, net)
            blob, run = _state_dict(merged, about)
        else:
            blob, run = (_torch if to == "torch" else _onnx)(merged, images[-1], about)
        checks = zip(images, answers, strict=True)
        difference = max(_difference(f"{name!r} as {to}", run, x, y, net) for x, y in checks)
    record = {"to": to, **about, "difference": difference}
    record["output"] = {"name": "logits", "shape": ["n", *answers[0].shape[1:]]}
    record |= {"file": file.name, "sha256": hashlib.sha256(blob).hexdigest()}
    beside = file.with_name(file.name + ".json")
    text = records.sealed(FORMAT, record)
    _write({file: blob, beside: text})
    return Exported((file, beside), to, difference, len(blob) + len(text))


def _export_domain(net: MultiDomainNetwork, domain: Domain, folder: Path) -> Exported:
    places = [(folder / files.RECORD, files.FORMAT)]
    if domain.basis is not None:  # first: without it nobody can load the domain
        net.save_basis(domain.basis, folder / "basis")
        places.append((folder / "basis" / basis.RECORD, basis.FORMAT))
    net.save_domain(domain.name, folder)
    written: list[Path] = []
    for file, format_ in places:
        written += [file, records.tensor_file(file, records.read(file, format_))]
    return Exported(tuple(written), "domain", None, sum(f.stat().st_size for f in written))


# ── what goes in, and what is said of it ─────────────────────────────────────────────────────────


def _file(out: Path, name: str, to: str) -> Path:
    if out.suffix in ENDINGS.values() and out.suffix != ENDINGS[to]:
        raise CovNormError(f"{out}: to={to!r} writes {ENDINGS[to]}: rename it, or change to=")
    return out if out.suffix == ENDINGS[to] else out / f"{name}{ENDINGS[to]}"


def _input_shape(net: MultiDomainNetwork, domain: Domain, size: Any) -> tuple[int, ...]:
    """Of one sample: (c, h, w), or (d,) for a network that begins with a Linear layer."""
    stem = next(m for m in net.backbone.modules() if isinstance(m, nn.Conv2d | nn.Linear))
    if isinstance(stem, nn.Linear):
        return (stem.in_features,)
    if size is None and isinstance(domain.preprocessing, dict):
        size = domain.preprocessing.get("size")
    sides = size if isinstance(size, list | tuple) else (size, size)
    if len(sides) != 2 or not all(type(s) is int and s > 0 for s in sides):
        raise CovNormError(
            f"domain {domain.name!r}: no input size ({size!r}) in its preprocessing or in size=: "
            "give size= in pixels, n or (h, w)"
        )
    return (stem.in_channels, *sides)


def _about(net: MultiDomainNetwork, domain: Domain, shape: tuple[int, ...]) -> dict[str, Any]:
    how: Any = domain.preprocessing
    if how is None or isinstance(how, dict):  # null: nobody said
        fit = "squash" if how else None  # what a domain that says no other was prepared with
        how = {"size": None, "mean": None, "std": None, "fit": fit} | (how or {})
        if len(shape) == 3:
            how["size"] = shape[1] if shape[1] == shape[2] else list(shape[1:])
    told = isinstance(how, dict) and how["mean"] is not None
    values = "(RGB / 255 - mean) / std" if told else None
    return {
        "domain": domain.name,
        "classes": None if domain.classes is None else list(domain.classes),
        "preprocessing": how,
        "input": {"name": "images", "shape": ["n", *shape], "type": "float32", "values": values},
        "backbone": {"class": type(net.backbone).__name__, "fingerprint": net.fingerprint},
    }


# ── the formats ──────────────────────────────────────────────────────────────────────────────────


def _program(merged: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    n = torch.export.Dim("n", min=1)
    with _told(f"torch.export cannot trace {type(merged).__name__} for batches of any size"):
        program = torch.export.export(merged, (x,), dynamic_shapes=({0: n},), strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def _torch(merged: nn.Module, x: Tensor, about: dict[str, Any]) -> Made:
    program, stream = _program(merged, x), io.BytesIO()
    with _told(f"torch.export cannot save {type(merged).__name__}"):
        text = json.dumps(about, ensure_ascii=False)
        torch.export.save(program, stream, extra_files={"covnorm.json": text})
        blob = stream.getvalue()
        return blob, torch.export.load(io.BytesIO(blob)).module()


def _onnx(merged: nn.Module, x: Tensor, about: dict[str, Any]) -> Made:
    onnx, onnxruntime = _packages()
    held = sum(t.nbytes for t in merged.state_dict().values())
    if held > ONNX_LIMIT:
        raise CovNormError(f"{held:,} bytes of weights, an ONNX file has below 2 GB: to='torch'")
    program = _program(merged, x)
    with _told(f"torch.onnx cannot export {type(merged).__name__}"):
        made = torch.onnx.export(
            program,
            input_names=["images"],
            output_names=["logits"],
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        assert made is not None
        model = _tidied(made.model_proto)
        strings = {k: v if isinstance(v, str) else json.dumps(v) for k, v in about.items()}
        onnx.helper.set_model_props(model, strings)
        onnx.checker.check_model(model, full_check=True)
        blob = model.SerializeToString()
        session = onnxruntime.InferenceSession(blob, providers=["CPUExecutionProvider"])
    return blob, lambda x: torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])


def _packages() -> tuple[Any, Any]:
    """onnx and onnxruntime; torch.onnx itself needs onnxscript."""
    try:
        found = [importlib.import_module(m) for m in ("onnx", "onnxruntime", "onnxscript")]
    except ImportError as error:
        raise CovNormError(f"to='onnx': {error}: pip install 'torch-covnorm[onnx]'") from None
    return found[0], found[1]


def _tidied(model: Any) -> Any:
    """The model with "n" for its batch, and without torch's notes on where each node is from."""
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


def _state_dict(merged: nn.Module, about: dict[str, Any]) -> Made:
    state = {k: v for k, v in merged.state_dict().items() if isinstance(v, Tensor)}
    state = {k: v.contiguous().clone() for k, v in state.items()}  # tied weights are stored twice
    # One string, since several would stand in another order each time.
    blob = safetensors.torch.save(state, {"covnorm": json.dumps(about, ensure_ascii=False)})
    plain = copy.deepcopy(merged)
    with _told(f"{type(merged).__name__} does not load its state dict"):
        # Bytes that were made a moment ago, in a format that has no code to run.
        plain.load_state_dict(safetensors.torch.load(blob), assign=True)
    return blob, plain


def _restore_(plain: nn.Module, net: MultiDomainNetwork) -> dict[str, dict[str, Any]]:
    """Give merged layers the backbone's keys again; returns {layer: settings} that still differ.

    A bias b that merging added goes into the norm behind: norm(z + b) is norm(z) with mean − b.
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


def _answer(net: MultiDomainNetwork, name: str, x: Tensor) -> Tensor:
    anchor = next(net.backbone.parameters())
    with eval_mode(net.backbone, net.domain(name)):
        y = net(x.to(anchor.device, anchor.dtype), domain=name)
    if not isinstance(y, Tensor) or len(y) != len(x):
        raise CovNormError(
            f"domain {name!r} answers {type(y).__name__}: a network that is exported answers one "
            "tensor (n, …); to='domain' takes any"
        )
    if not y.isfinite().all():
        raise CovNormError(f"domain {name!r} answers NaN or Inf to random images: train it anew")
    return y.cpu().float()


def _difference(
    what: str, run: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, net: MultiDomainNetwork
) -> float:
    """The largest to y of what runs on x, within what rounding in the network itself may cost."""
    with _told(f"{what} does not run on a batch of {len(x)}"):
        found = run(x)
    anchor = next(net.backbone.parameters())
    eps = max(torch.finfo(anchor.dtype).eps, 0 if anchor.device.type == "cpu" else 2**-10)  # TF32
    limit = max(1e-4, 32 * eps) * (1 + y.abs().max().item())
    far = (found - y).abs().max().item() if found.shape == y.shape else torch.inf
    if not far <= limit:
        raise CovNormError(
            f"{what} differs from the network by {far:.3g} on a batch of {len(x)}, allowed is "
            f"{limit:.3g}; nothing is written: {_REMEDY}"
        )
    return far


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """An exporter's errors become `what` and their first line. What it has to say about its own
    future is not for the user; other warnings are."""
    try:
        with warnings.catch_warnings():
            for category in (FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", category)
            yield
    except Exception as error:  # each exporter has many kinds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
        raise CovNormError(f"{what} ({reason}); nothing is written: {_REMEDY}") from error


def _write(contents: dict[Path, bytes]) -> None:
    """Each file whole; where one cannot be written, no new one stays."""
    fresh: list[Path] = []
    try:
        for file, data in contents.items():
            with records.blame(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                replaces = file.exists()
                records.write_file(file, data)
            if not replaces:
                fresh.append(file)
    except BaseException:
        for file in fresh:
            file.unlink()
        raise
