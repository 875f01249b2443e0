"""Networks with a saved domain, comparisons of them, and an attacker's edits of their files."""

import hashlib
import json

import pytest
import safetensors.torch
import torch
from torch import nn

import torch_covnorm as cn
from torch_covnorm import CovNormError, records

RECORD = "domain.json"
CLASSES = ("daisy", "Löwenzahn", "野バラ", 'a "b"\n/c')
PREPROCESSING = {"size": [32, 32], "mean": [0.5, 0.25, 0.125], "crop": None, "of": "grün"}
KINDS = ["residual", "parallel", "conv", "batchnorm", "lowrank", "covnorm", "absorbed"]


def backbone(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 10),
    ).eval()


def images(n=5):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(9))


def randomize_(domain):
    """Draw every number of a domain, as if trained, so that outputs depend on all of them."""
    for name, tensor in domain.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 2)
        elif tensor.is_floating_point():
            tensor.normal_(std=0.3)
        else:
            tensor.fill_(7)


def network(kind="residual", **arguments):
    """A network with a trained-looking domain "flowers", by default with norms of its own."""
    net = cn.MultiDomainNetwork(backbone())
    adapter = "residual" if kind in ("covnorm", "absorbed") else kind
    given = {"classes": CLASSES, "preprocessing": PREPROCESSING, "norms": "own"} | arguments
    torch.manual_seed(1)
    randomize_(net.add_domain("flowers", adapter=adapter, **given))
    if kind in ("covnorm", "absorbed"):
        cn.normalize_(net, "flowers", cn.collect(net, "flowers", [images(40)]), variance=0.9)
    if kind == "absorbed":
        cn.absorb_(net, "flowers")
    return net


def reader(make=backbone):
    """Another network on an equal backbone, with a domain that must not change."""
    net = cn.MultiDomainNetwork(make())
    torch.manual_seed(2)
    randomize_(net.add_domain("digits", classes=3))
    return net


@torch.no_grad()
def outputs(net, name="flowers"):
    return net(images(), domain=name)


def snapshot(net):
    """Names, all tensors and all outputs of a network, to compare bits."""
    names = list(net.domains)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    return names, state, {n: outputs(net, n) for n in names}


def assert_same(a, b):
    assert a[0] == b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        assert x.keys() == y.keys()
        assert all(torch.equal(x[k], y[k]) for k in x)


def assert_refused(folder, file, net=None, **arguments):
    """Assert that loading is an error that names the file, and that the network is unchanged."""
    net = reader() if net is None else net
    before = snapshot(net)
    with pytest.raises(CovNormError) as error:
        net.load_domain(folder, **arguments)
    assert file in str(error.value)
    assert_same(before, snapshot(net))
    return str(error.value)


def tensor_file(folder):
    (file,) = folder.glob("*.safetensors")
    return file


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def forge(folder, record=None, tensors=None, blob=None):
    """Edit files as an attacker would, and make all checksums valid again.

    `record` changes the JSON, `tensors` the tensors; `blob` is the new content of the tensor file.
    """
    file = tensor_file(folder)
    r = json.loads((folder / RECORD).read_text())
    if tensors is not None:
        loaded = safetensors.torch.load(file.read_bytes())
        tensors(loaded)
        blob = safetensors.torch.save(loaded)
    if blob is not None:
        file.write_bytes(blob)
        r["tensors"]["sha256"] = hashlib.sha256(blob).hexdigest()
    if record is not None:
        record(r)
    r.pop("checksum")
    r["checksum"] = records.checksum(r)
    (folder / RECORD).write_text(json.dumps(r))
