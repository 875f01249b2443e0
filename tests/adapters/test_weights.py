"""Domains that replace weights: copies (FNFT) and masks (Piggyback)."""

from __future__ import annotations

import copy
import gc
import json
import weakref

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import zoo
from domain_files import RECORD, assert_refused, forge, tensor_file
from domain_files import network as saved_network
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torch_covnorm as cn
from torch_covnorm.adapters.weights import MASK_START, MASK_THRESHOLD, MaskWeights, pack, unpack


class Encoder(nn.Module):
    """Attention, LayerNorm, dropout, and parameters that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True, kdim=12, vdim=12)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        y = self.layers(torch.cat([self.token.expand(len(x), -1, -1), x], 1))
        return self.head(y[:, 0] + self.cross(y[:, :1], x[..., :12], x[..., :12])[0][:, 0])


class Peculiar(nn.Module):
    """Its parent reads a layer's weight (timm's BEiT), a list of parameters, a shared weight."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        if what == "parameters in a list":
            self.scales = nn.ParameterList([torch.ones(8), torch.ones(8)])
        if what == "tied":
            self.two.weight = self.one.weight

    def forward(self, x):
        read = self.what == "read by its parent"
        x = F.linear(x, self.one.weight, self.one.bias) if read else self.one(x)
        if self.what == "parameters in a list":
            x = x * self.scales[0] + self.scales[1]
        return self.head(self.two(x.relu()).relu())


VIT = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 6}
BACKBONES = {name: zoo.ZOO[name] for name in zoo.SMALL} | {
    "vit": (lambda: zoo.timm_model("vit_tiny_patch16_224", **VIT), zoo.ZOO["vgg16"][1]),
    "encoder": (Encoder, lambda n: torch.randn(n, 5, 16)),
}
ALL = BACKBONES | {
    what: (lambda what=what: Peculiar(what), lambda n: torch.randn(n, 8))
    for what in ("read by its parent", "parameters in a list", "tied")
}
KINDS = ("own", "mask")


def make(name: str, *kinds: str, shaken: bool = False) -> cn.MultiDomainNetwork:
    """In eval mode, one domain per kind: new, or shaken, which masks a third of the weights."""
    torch.manual_seed(0)
    backbone = ALL[name][0]()
    zoo.shake_(backbone)
    net = cn.MultiDomainNetwork(backbone)
    for kind in kinds:
        zoo.shake_(net.add_domain(kind, 3, adapter=kind), 0.1 * shaken)
    return net.eval()


def batch(name: str, n: int = 4) -> torch.Tensor:
    return ALL[name][1](n)


def plain_copy(name: str, net: cn.MultiDomainNetwork, domain: str) -> nn.Module:
    """The backbone without a network around it, with the domain's head."""
    plain = ALL[name][0]()
    plain.load_state_dict(net.backbone.state_dict())
    plain.set_submodule(net.head_name, copy.deepcopy(net.domains[domain].head))
    return plain.requires_grad_(True)


def train(run, parameters, x, y) -> None:
    """The same steps for any model; dropout draws the same numbers."""
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        F.cross_entropy(run(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.slow
def test_a_fresh_domain_is_the_backbone_with_a_new_head(name, kind):
    net, x = make(name, kind), batch(name)
    plain = plain_copy(name, net, kind).eval()
    assert zoo.close(net(x, domain=kind), plain(x), 1e-6)
    with torch.no_grad():
        assert zoo.close(net(x, domain=kind), plain(x), 1e-6)


@pytest.mark.parametrize("name", ALL)
def test_training_own_weights_is_training_a_plain_copy_and_leaves_no_parameter_out(name):
    net, x, y = make(name, "own", "residual"), batch(name), torch.tensor([0, 1, 2, 1])
    plain = plain_copy(name, net, "own")
    bits, other = zoo.backbone_bits(net), net(x, domain="residual")
    net.train()
    train(lambda x: net(x, domain="own"), net.parameters_of("own"), x, y)
    train(plain.train(), plain.parameters(), x, y)
    net.eval(), plain.eval()
    assert zoo.backbone_bits(net) == bits
    assert torch.equal(net(x, domain="residual"), other)
    before, found = net.backbone.state_dict(), net.merge("own").state_dict()
    for key, tensor in plain.state_dict().items():
        assert zoo.close(found[key], tensor, 1e-6), key
        assert key.startswith(net.head_name) or not torch.equal(before[key], tensor), key
    assert zoo.close(net(x, domain="own"), plain(x), 1e-6)


def test_scores_take_the_gradient_of_the_masked_weight_straight_through():
    """dL/dscores = dL/dW' ∘ W, also for masked weights: so they can return."""
    conv, hidden = nn.Conv2d(3, 4, 3), nn.Linear(16, 6)
    layers = conv, nn.ReLU(), nn.Flatten(), hidden, nn.ReLU(), nn.Linear(6, 2)
    net = cn.MultiDomainNetwork(nn.Sequential(*layers))
    domain = net.add_domain("mask", 3, adapter="mask")
    for _, weight in domain.weights.items():
        weight.scores.data.uniform_(0, 2 * MASK_START)
    x, y = torch.randn(5, 3, 4, 4), torch.tensor([0, 1, 2, 0, 1])
    F.cross_entropy(net(x, domain="mask"), y).backward()
    kept = [domain.weights[n].scores.detach() > 5e-3 for n in ("0", "3")]
    assert all(0.1 < k.float().mean() < 0.9 for k in kept)
    W1, W2 = ((m.weight * k).requires_grad_() for m, k in zip((conv, hidden), kept, strict=True))
    features = F.linear(F.conv2d(x, W1, conv.bias).relu().flatten(1), W2, hidden.bias).relu()
    F.cross_entropy(F.linear(features, domain.head.weight, domain.head.bias), y).backward()
    for name, layer, W in (("0", conv, W1), ("3", hidden, W2)):
        found = domain.weights[name].scores.grad
        torch.testing.assert_close(found, W.grad * layer.weight, rtol=1e-5, atol=1e-7)
        assert found[domain.weights[name].scores <= 5e-3].abs().max() > 0


@pytest.mark.parametrize("name", ALL)
def test_every_mask_has_a_gradient_and_shows_in_the_answers(name):
    """nn.MultiheadAttention and some attentions of timm read a weight without calling the layer."""
    net, x = make(name, "mask"), batch(name)
    net(x, domain="mask").square().sum().backward()
    weights = net.domains["mask"].weights
    assert [n for n, w in weights.items() if w.scores.grad is None] == []
    before = net(x, domain="mask")
    for layer, weight in weights.items():
        weight.scores.data.zero_()
        assert not torch.equal(net(x, domain="mask"), before), layer
        weight.scores.data.fill_(MASK_START)


def test_a_mask_keeps_what_exceeds_the_threshold_and_starts_by_keeping_all():
    assert (MASK_START, MASK_THRESHOLD) == (1e-2, 5e-3)
    weight = MaskWeights(nn.Linear(3, 2))
    assert weight.scores.eq(1e-2).all()
    assert weight.mask().all()
    weight.scores.data = torch.tensor([[5e-3, 5.001e-3, 4.999e-3], [-1.0, 0.0, 1.0]])
    assert weight.mask().tolist() == [[False, True, False], [False, False, True]]


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_packing_is_numpys_and_comes_back(bits):
    packed = pack(torch.tensor(bits))
    assert packed.numpy().tobytes() == np.packbits(bits, bitorder="little").tobytes()
    assert unpack(packed, len(bits)).tolist() == bits


def test_a_mask_is_one_bit_a_weight_on_disk(tmp_path):
    folder = make("mlp", "mask", shaken=True).save_domain("mask", tmp_path / "mask")
    blob = tensor_file(folder).read_bytes()
    size = int.from_bytes(blob[:8], "little")
    spans = {k: v["data_offsets"] for k, v in json.loads(blob[8 : 8 + size]).items()}
    lengths = {k: end - start for k, (start, end) in spans.items() if k.startswith("weights.")}
    assert lengths == {"weights.0.packed": 120 // 8, "weights.2.packed": -(-100 // 8)}
    assert len(blob) == 8 + size + sum(end - start for start, end in spans.values())


@pytest.mark.parametrize("name", BACKBONES)
@torch.no_grad()
def test_a_mask_survives_packing_and_files_to_the_bit(name, tmp_path):
    net, x = make(name, "mask", shaken=True), batch(name)
    domain = net.domains["mask"]
    masks = {n: w.mask() for n, w in domain.weights.items()}
    assert 0.5 < torch.cat([m.flatten() for m in masks.values()]).float().mean() < 0.8
    before = net(x, domain="mask")
    net.save_domain("mask", tmp_path / "trained")
    domain.pack_()
    assert torch.equal(net(x, domain="mask"), before)
    assert not any(w.scores is not None for _, w in domain.weights.items())
    net.save_domain("mask", tmp_path / "packed")
    net.save_domain("mask", tmp_path / "half", torch.float16)
    for folder in ("trained", "packed", "half"):
        loaded = net.load_domain(tmp_path / folder, name=folder)
        assert torch.equal(net(x, domain=folder), before) or folder == "half"  # norms and head
        assert all(torch.equal(w.mask(), masks[layer]) for layer, w in loaded.weights.items())
    assert len({tensor_file(tmp_path / f).read_bytes() for f in ("trained", "packed")}) == 1


def test_a_loaded_mask_stays_packed_in_memory_whatever_runs(tmp_path):
    net, x = make("convnet", "mask", shaken=True), batch("convnet")
    net.save_domain("mask", tmp_path / "mask")
    loaded = net.load_domain(tmp_path / "mask", name="loaded")
    net(x, domain="loaded").sum().backward()
    with torch.no_grad():
        net(x, domain=["loaded", "mask"] * 2)
    for _, weight in loaded.weights.items():
        held = [*weight.parameters(), *weight.buffers(), *vars(weight).values()]
        tensors = [t for t in held if isinstance(t, torch.Tensor)]
        assert [t.dtype for t in tensors] == [torch.uint8]
        assert tensors[0].numel() == -(-weight.shape.numel() // 8)


@pytest.mark.parametrize("name", BACKBONES)
@torch.no_grad()
def test_own_weights_survive_files_to_the_bit_and_halve_in_float16(name, tmp_path):
    net, x = make(name, "own", shaken=True), batch(name)
    before = net(x, domain="own")
    net.load_domain(net.save_domain("own", tmp_path / "own"), name="loaded")
    assert torch.equal(net(x, domain="loaded"), before)
    half = net.load_domain(net.save_domain("own", tmp_path / "half", torch.float16), name="half")
    own = dict(net.domains["own"].weights.named_parameters())
    for key, p in half.weights.named_parameters():
        assert torch.equal(p, own[key].half().float())  # and of its dtype
    stored = safetensors.torch.load(tensor_file(tmp_path / "half").read_bytes())
    assert {t.dtype for k, t in stored.items() if "weights." in k} == {torch.float16}
    assert zoo.close(net(x, domain="half"), before, 0.01)


def _set(key, value):
    return {"record": lambda r: r["weights"].__setitem__(key, value)}


def _tensor(key, change):
    return {"tensors": lambda t: t.__setitem__(key, change(t[key]))}


FORGERIES = {  # of domains on domain_files.backbone: (kind, edit, does the error name the record)
    "unknown layer": ("own", _set("99", "own"), True),
    "unknown kind": ("own", _set("0", "halved"), True),
    "mask on a layer without weights": ("mask", _set("2", "mask"), True),
    "no mapping": ("own", {"record": lambda r: r.update(weights=["0", "3"])}, True),
    "kind of another form": ("own", _set("0", "mask"), True),
    "missing layer": ("mask", {"record": lambda r: r["weights"].pop("0")}, True),
    "missing tensor": ("own", {"tensors": lambda t: t.pop("weights.0.bias")}, False),
    "mask too short": ("mask", _tensor("weights.3.packed", lambda t: t[:-1].clone()), False),
    "mask too long": ("mask", _tensor("weights.3.packed", lambda t: torch.cat([t, t])), False),
    "mask of floats": ("mask", _tensor("weights.0.packed", torch.Tensor.float), False),
    "weight of another shape": ("own", _tensor("weights.0.weight", torch.Tensor.flatten), False),
    "weight that is no number": ("own", _tensor("weights.3.weight", lambda t: t / 0), False),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_forged_weights_are_refused_and_the_file_is_named(what, tmp_path):
    kind, edit, record = FORGERIES[what]
    folder = saved_network(kind).save_domain("flowers", tmp_path / "flowers")
    forge(folder, **edit)
    assert_refused(folder, RECORD if record else tensor_file(folder).name)


class Scaled(nn.Sequential):
    """A backbone with further arguments: one row per sample, or one for all."""

    def forward(self, x, gain, factor, *, shift, act):
        return self[1](act(self[0](x * gain + shift) * factor))


@torch.no_grad()
def test_tensor_arguments_are_split_with_the_batch_and_others_pass():
    net = cn.MultiDomainNetwork(Scaled(nn.Linear(8, 8), nn.Linear(8, 3)))
    for name in (*KINDS, "residual", "parallel"):
        zoo.shake_(net.add_domain(name, 3, adapter=name), 1.0)
    net.eval()
    x, gain, shift = torch.randn(5, 8), torch.randn(5, 1), torch.randn(5, 8)
    names = ["own", "residual", "mask", "own", "parallel"]

    def run(part: slice, domain) -> torch.Tensor:
        two = torch.tensor(2.0)
        return net(x[part], gain[part], two, domain=domain, shift=shift[part], act=torch.tanh)

    mixed = run(slice(None), names)
    for i, name in enumerate(names):
        assert zoo.close(mixed[i], run(slice(i, i + 1), name)[0])
        assert not zoo.close(mixed[i], run(slice(i, i + 1), names[i - 1])[0])  # control


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_merging_gives_a_plain_module_of_equal_answers(name, kind):
    net, x = make(name, kind, shaken=True), batch(name)
    merged = net.merge(kind)
    assert type(merged) is type(net.backbone)
    for module in merged.modules():
        assert "torch_covnorm" not in type(module).__module__
        assert "forward" not in vars(module)
        assert not module._forward_pre_hooks
    expected = net(x, domain=kind)
    net.remove_domain(kind)
    assert zoo.close(merged(x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_removing_a_domain_frees_its_weights_and_touches_no_other(kind):
    net, x = make("convnet", kind, "residual"), batch("convnet")
    bits, other = zoo.backbone_bits(net), net(x, domain="residual")
    net(x, domain=kind).sum().backward()
    held = [weakref.ref(p) for p in net.domains[kind].weights.parameters()]
    net.remove_domain(kind)
    gc.collect()
    assert [ref for ref in held if ref() is not None] == []
    assert zoo.backbone_bits(net) == bits
    assert torch.equal(net(x, domain="residual"), other)


@pytest.mark.parametrize("name", BACKBONES)
def test_own_weights_count_in_full_and_a_masks_bit_as_a_thirty_second(name):
    net = make(name, *KINDS)
    head = net.backbone.get_submodule(net.head_name)
    norms = [m for m in net.backbone.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    inside = {id(p) for m in (head, *norms) for p in m.parameters()}
    weights = sum(p.numel() for p in net.backbone.parameters() if id(p) not in inside)
    layers = [m for m in net.backbone.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    masked = sum(m.weight.numel() for m in layers if m is not head)
    norm = sum(p.numel() for m in norms for p in m.parameters())
    new = 3 * head.in_features + 3
    for kind, adapter in (("own", weights), ("mask", -(-masked // 32))):
        counts = {"adapter": adapter, "norm": norm, "head": new, "total": adapter + norm + new}
        assert net.num_parameters(kind) == counts
        net.domains[kind].pack_()
        assert net.num_parameters(kind) == counts


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_is_refused_and_the_network_is_as_it_was(kind):
    net = make("mlp")
    with pytest.raises(cn.CovNormError, match=f"rank=2.*{kind}"):
        net.add_domain("a", 3, adapter=kind, rank=2)
    assert list(net.domains) == []
    with pytest.raises(cn.CovNormError, match="no matrix A"):
        cn.collect(make("mlp", kind), kind, [batch("mlp")])
