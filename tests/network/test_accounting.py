"""What a domain costs, counted by hand from the sites' dimensions and weighed on its files."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
import zoo
from torch import nn

import torch_covnorm as cn
from torch_covnorm.backbones import VGG16
from torch_covnorm.network.accounting import CATEGORIES, denominators

# zoo.TinyConvNet by hand: site → (d_in, d_out, weights, biases)
LAYERS = {
    "stem.0": (3, 8, 3 * 8 * 9, 8),
    "strided.0": (8, 12, 8 * 12 * 9, 12),
    "dilated.0": (12, 12, 12 * 12 * 9, 0),
    "grouped.0": (12, 8, 12 // 4 * 8 * 9, 8),
    "valid.0": (8, 8, 8 * 8 * 3 * 2, 8),
    "reflected.0": (8, 8, 8 * 8 * 25, 8),
}
D_OUT = [d_out for _, d_out, _, _ in LAYERS.values()]
CLASSES = 4
HEAD = 8 * CLASSES + CLASSES
NETS = {"convnet": False, "convnet with norms": True}  # name → whether norms follow the layers


def network(name="convnet", kinds=("residual",), **arguments):
    """One shaken domain per kind, all with the same number of classes, and images to collect on."""
    net = zoo.network(name, kinds=())
    for kind in kinds:
        net.add_domain(kind, **{"classes": CLASSES, "adapter": kind} | arguments)
        zoo.shake_(net.domains[kind])
    return net.eval(), zoo.ZOO[name][1](12)


def by_kind(**parameters):
    return dict.fromkeys(CATEGORIES, 0) | parameters


def weight_of(folder):
    """Bytes of the tensors in a folder's file: everything after the header."""
    (file,) = folder.glob("*.safetensors")
    blob = file.read_bytes()
    return len(blob) - 8 - int.from_bytes(blob[:8], "little")


def norms(count_of_layers):
    """(parameters, bytes) of that many BatchNorms per layer: affine, statistics and counter."""
    parameters = count_of_layers * sum(2 * d for d in D_OUT)
    return parameters, 4 * parameters + count_of_layers * sum(2 * 4 * d + 8 for d in D_OUT)


def norms_behind(kind, behind, copied=True):
    """How many BatchNorms of the layer's width a domain of this kind has at every site."""
    B1 = kind in ("residual", "lowrank")
    B2 = not behind and kind in ("residual", "lowrank", "parallel", "batchnorm")
    return B1 + B2 + (behind and copied)


# ── kinds, by hand ──────────────────────────────────────────────────────────────────────────────


def matrices(kind):
    """The paper's count of each kind of adapter."""
    return {
        "residual": sum(d * d for d in D_OUT),
        "parallel": sum(d_out * d_in for d_in, d_out, _, _ in LAYERS.values()),
        "conv": sum(d * d for d in D_OUT),
        "batchnorm": 0,
        "lowrank": sum(2 * d * (d // 4) for d in D_OUT),  # rank 0.25
        "own": sum(weights + biases for _, _, weights, biases in LAYERS.values()),
        "mask": 0,
        "none": 0,
    }[kind]


@pytest.mark.parametrize(("name", "behind"), NETS.items())
@pytest.mark.parametrize("norms_of", ["shared", "own"])
@pytest.mark.parametrize("kind", [*zoo.KINDS, "none"])
def test_each_kind_costs_what_the_sites_dimensions_say_and_what_its_file_weighs(
    name, behind, kind, norms_of, tmp_path
):
    norms_of = "own" if kind in zoo.TRAIN_NORMS else norms_of
    net, _ = network(name, (kind,), norms=norms_of)
    account = cn.account(net, kind)
    has_A = kind in ("residual", "parallel", "conv", "lowrank")
    bits = [weights if kind == "mask" else 0 for _, _, weights, _ in LAYERS.values()]
    norm, norm_bytes = norms(norms_behind(kind, behind, norms_of == "own"))
    bias = sum(D_OUT) if has_A else 0
    assert account.mask_bits == sum(bits)
    assert account.parameters == by_kind(
        adapter=matrices(kind), bias=bias, norm=norm, head=HEAD, mask=-(-sum(bits) // 32)
    )
    assert account.bytes == by_kind(
        adapter=4 * matrices(kind),
        bias=4 * bias,
        norm=norm_bytes,
        head=4 * HEAD,
        mask=sum(-(-b // 8) for b in bits),  # every layer is packed separately
    )
    assert account.total == sum(account.parameters.values())
    assert account.total_bytes == weight_of(net.save_domain(kind, tmp_path))
    assert (account.total_bytes != 4 * account.total) == (norm > 0)  # control: statistics weigh
    found = net.num_parameters(kind)
    assert set(found) == {"adapter", "norm", "head", "total"}
    assert found["adapter"] == matrices(kind) + -(-sum(bits) // 32)
    assert found["total"] == account.total


def test_a_mask_of_100_weights_takes_13_bytes(tmp_path):
    net = zoo.network("mlp", kinds=("mask",))
    account = cn.account(net, "mask")
    assert account.mask_bits == 12 * 10 + 10 * 10
    assert account.parameters["mask"] == 7  # of 32 bits, rounded up for all layers together
    assert account.bytes["mask"] == 15 + 13
    assert account.total_bytes == weight_of(net.save_domain("mask", tmp_path))


def test_a_mask_costs_the_same_packed_or_not():
    net, _ = network(kinds=("mask",))
    before = cn.account(net, "mask")
    net.domains["mask"].pack_()
    assert cn.account(net, "mask") == before
    assert before.mask_bits == sum(weights for _, _, weights, _ in LAYERS.values())
    assert before.parameters["mask"] < before.mask_bits / 31


@pytest.mark.parametrize("t", [0.6, 0.95, 1.0])
def test_covnorm_costs_its_three_factors_and_absorbed_2_d_min(t, tmp_path):
    net, x = network()
    full = cn.account(net, "residual")
    ranks = cn.normalize_(net, "residual", cn.collect(net, "residual", [x]), variance=t)
    d_of = {site: d_out for site, (_, d_out, _, _) in LAYERS.items()}
    factors = sum(d_of[s] * kx + kx * ky + d_of[s] * ky for s, (kx, ky) in ranks.items())
    tuned = cn.account(net, "residual")
    assert tuned.parameters == {**full.parameters, "adapter": factors}
    assert tuned.bytes["adapter"] == 4 * factors
    assert tuned.bytes["bias"] == 4 * 2 * sum(D_OUT)  # mu_y, and mu_x until M is absorbed
    assert tuned.total_bytes == weight_of(net.save_domain("residual", tmp_path / "tuned"))
    cn.absorb_(net, "residual")
    absorbed = cn.account(net, "residual")
    thin = sum(2 * d_of[s] * min(pair) for s, pair in ranks.items())
    assert absorbed.parameters == {**full.parameters, "adapter": thin}
    assert absorbed.bytes["bias"] == 4 * sum(D_OUT)
    assert absorbed.total_bytes == weight_of(net.save_domain("residual", tmp_path / "absorbed"))
    assert absorbed.parameters["adapter"] < factors


def test_svd_costs_2_r_d():
    net, _ = network()
    cn.svd_(net, "residual", 3)
    assert cn.account(net, "residual").parameters["adapter"] == sum(2 * 3 * d for d in D_OUT)


def test_a_module_of_the_domains_own_is_counted_apart(tmp_path):
    net, _ = network(classes=None, own=nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)))
    account = cn.account(net, "residual")
    assert account.parameters["own"] == (8 * 6 + 6) + (6 * 2 + 2)
    assert account.parameters["head"] == account.bytes["head"] == 0
    assert account.parameters["adapter"] == matrices("residual")
    assert account.total_bytes == weight_of(net.save_domain("residual", tmp_path))
    assert net.num_parameters("residual")["total"] == account.total
    assert account.share() == account.share(kinds=("adapter",))  # not in the paper's count


def test_statistics_of_a_module_of_the_domains_own_weigh_too(tmp_path):
    """A BatchNorm after the backbone: its running statistics are in the file."""
    net, _ = network(classes=None, own=nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2)))
    account = cn.account(net, "residual")
    assert account.parameters["own"] == 2 * 8 + (8 * 2 + 2)
    assert account.bytes["own"] == 4 * account.parameters["own"] + 4 * 2 * 8 + 8
    assert account.total_bytes == weight_of(net.save_domain("residual", tmp_path))


# ── joint ───────────────────────────────────────────────────────────────────────────────────────


def joint(M="closed-form", kind="residual"):
    """Two domains "a" and "b" on one basis, and "c" beside it."""
    net, x = network(kinds=())
    for name in "abc":
        net.add_domain(name, CLASSES, kind)
        zoo.shake_(net.domains[name])
    net.eval()
    moments = {name: cn.collect(net, name, [x]) for name in "ab"}
    return net, cn.join_(net, ["a", "b"], moments, 0.9, M=M).ranks


@pytest.mark.parametrize("kind", ["residual", "parallel", "conv"])
def test_what_joint_domains_share_is_counted_once(kind, tmp_path):
    net, ranks = joint(kind=kind)
    d_in = {s: a if kind == "parallel" else b for s, (a, b, _, _) in LAYERS.items()}
    d_out = {s: b for s, (_, b, _, _) in LAYERS.items()}
    M = sum(kx * ky for kx, ky in ranks.values())
    shared = sum(kx * d_in[s] + ky * d_out[s] for s, (kx, ky) in ranks.items())
    one, two = cn.account(net, "a"), cn.account(net, ["a", "b"])
    norm, norm_bytes = norms(norms_behind(kind, behind=False))
    assert one.parameters == by_kind(
        adapter=M, bias=sum(D_OUT), norm=norm, head=HEAD, shared=shared
    )
    assert two.parameters == {**{k: 2 * v for k, v in one.parameters.items()}, "shared": shared}
    centres = sum(d_in.values())
    assert two.bytes == by_kind(
        adapter=2 * 4 * M,
        bias=2 * 4 * sum(D_OUT),
        norm=2 * norm_bytes,
        head=2 * 4 * HEAD,
        shared=4 * (shared + centres),
    )
    # The file of the basis also has the moments: n and images, mean, scatter of x and of y.
    moments = sum(8 * (2 + d + d * d) for side in (d_in.values(), d_out.values()) for d in side)
    folders = [net.save_domain(n, tmp_path / n) for n in "ab"]
    basis = weight_of(net.save_basis("joint", tmp_path / "basis"))
    assert two.total_bytes == sum(map(weight_of, folders)) + basis - moments
    assert one.total_bytes == weight_of(folders[0]) + basis - moments
    alone = cn.account(net, "a").total + cn.account(net, "b").total
    assert two.total == alone - shared  # control: adding the two would count it twice
    assert net.num_parameters("a")["adapter"] == M
    assert net.num_parameters("a")["total"] == one.total - shared


def test_C_and_W_are_in_memory_once_and_no_part_of_a_domain(tmp_path):
    net, _ = joint()
    for site, factors in net.basis("joint").factors.items():
        for name in "ab":
            W, M, C = net.domains[name].adapters[site].A.factors
            assert W is factors.W
            assert C is factors.C
            assert M.data_ptr() != factors.W.data_ptr()
    own = net.domains["a"].state_dict()
    assert not any(key.rpartition(".")[2] in ("W", "C", "mu_x") for key in own)
    (file,) = net.save_domain("a", tmp_path).glob("*.safetensors")
    assert safetensors.torch.load(file.read_bytes()).keys() == own.keys()
    assert sum(key.endswith((".W", ".C")) for key in net.state_dict()) == 2 * len(LAYERS)


def test_domains_on_a_basis_and_beside_it_add_up():
    net, ranks = joint()
    M = sum(kx * ky for kx, ky in ranks.values())
    account = cn.account(net, ["c", "b", "a"])
    assert account.parameters["adapter"] == 2 * M + matrices("residual")
    assert account.parameters["shared"] == cn.account(net, "a").parameters["shared"]
    assert cn.account(net, "c").parameters["shared"] == 0
    cn.absorb_(net, "a")  # leaves the basis
    assert cn.account(net, "a").parameters["shared"] == 0
    assert cn.account(net, "a").parameters["adapter"] == sum(
        2 * LAYERS[s][1] * min(pair) for s, pair in ranks.items()
    )


def test_two_bases_are_counted_each_once():
    net, x = network(kinds=())
    for name in "abcd":
        net.add_domain(name, CLASSES)
        zoo.shake_(net.domains[name])
    moments = {name: cn.collect(net, name, [x]) for name in "abcd"}
    cn.join_(net, ["a", "b"], moments, 0.6, basis="one")
    cn.join_(net, ["c", "d"], moments, 0.95, basis="two")
    one, two = (net.basis(n).num_parameters() for n in ("one", "two"))
    assert one != two
    assert cn.account(net, ["a", "b"]).parameters["shared"] == one
    assert cn.account(net, ["d", "a", "c"]).parameters["shared"] == one + two


def test_without_Ms_a_joint_domain_has_no_adapter_parameters(tmp_path):
    net, _ = joint("none")
    account = cn.account(net, ["a", "b"])
    assert account.parameters["adapter"] == 0
    assert account.parameters["bias"] == 2 * sum(D_OUT)
    assert net.num_parameters("a")["adapter"] == 0
    files = sum(weight_of(net.save_domain(n, tmp_path / n)) for n in "ab")
    assert account.total_bytes - account.bytes["shared"] == files


@pytest.mark.parametrize("kind", ["residual", "parallel"])
def test_joint_svd_costs_W_once_and_a_C_for_each(kind, tmp_path):
    net, _ = network(kinds=())
    for name in "ab":
        net.add_domain(name, CLASSES, kind)
    cn.join_svd_(net, ["a", "b"], 2)
    d_in = [a if kind == "parallel" else b for a, b, _, _ in LAYERS.values()]
    account = cn.account(net, ["a", "b"])
    assert account.parameters["adapter"] == 2 * sum(2 * d for d in D_OUT)
    assert account.parameters["shared"] == sum(2 * d for d in d_in)
    folders = [net.save_domain(n, tmp_path / n) for n in "ab"]
    folders.append(net.save_basis("joint-svd", tmp_path / "basis"))
    assert account.total_bytes == sum(map(weight_of, folders))


# ── denominators and shares ─────────────────────────────────────────────────────────────────────


def test_the_denominators_of_VGG16_are_the_papers():
    net = cn.MultiDomainNetwork(VGG16(fc=False))
    assert len(net.sites) == 13
    assert denominators(net) == {
        "network": 14_714_688 + 512 * 1000 + 1000,
        "convolutions": 14_714_688,
        "ra": 1_810_432,
    }
    net.add_domain("a", 10)
    account = cn.account(net, "a")
    assert account.parameters["adapter"] == 1_810_432
    assert account.share("ra") == 1
    assert account.share("convolutions") == 1_810_432 / 14_714_688  # 12.3 %
    assert account.share() == account.share("network") == 1_810_432 / 15_227_688


def test_the_denominators_of_EfficientNet_Lite0():
    net = cn.MultiDomainNetwork(cn.load_backbone("efficientnet-lite0"))
    convolutions = sum(p.numel() for p in net.backbone.parameters() if p.ndim == 4)  # no biases
    expected = {"network": 4_652_008, "convolutions": convolutions, "ra": 311_296}
    assert denominators(net) == expected
    net.add_domain("a", 10)
    assert cn.account(net, "a").parameters["adapter"] == 311_296
    assert cn.account(net, "a").denominators == expected  # the domain's own parts are not in it


def test_a_share_is_of_the_kinds_and_the_denominator_that_are_named():
    net, _ = joint()
    account = cn.account(net, ["a", "b"])
    p, of = account.parameters, account.denominators
    assert account.share() == (p["adapter"] + p["shared"]) / of["network"]
    assert account.share("ra", ["norm", "head"]) == (p["norm"] + p["head"]) / of["ra"]
    assert account.share("convolutions", CATEGORIES) == account.total / of["convolutions"]
    assert of["convolutions"] == matrices("own")
    assert of["network"] == matrices("own") + 8 * 5 + 5
    assert of["ra"] == matrices("residual")
    masked, _ = network(kinds=("mask",))
    share = cn.account(masked, "mask").share("convolutions")
    assert 1 / 33 < share < 1 / 31  # 1 bit for 32; biases are not masked


def test_a_network_without_convolutions_has_no_share_of_them():
    net = zoo.network("mlp", kinds=("residual",))
    account = cn.account(net, "residual")
    assert account.denominators == {"network": 130 + 110 + 20 + 44, "convolutions": 0, "ra": 200}
    assert account.share("ra") == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda net: cn.account(net, "residul"), "unknown domain 'residul'"),
        (lambda net: cn.account(net, ["residual", "x"]), "unknown domain 'x'"),
        (lambda net: cn.account(net, []), "each only once"),
        (lambda net: cn.account(net, ["residual", "residual"]), "each only once"),
        (lambda net: cn.account(net, "residual").share("backbone"), "of='backbone'.*network"),
        (lambda net: cn.account(net, "residual").share(kinds=["A"]), "kind 'A'.*adapter"),
    ],
)
def test_what_cannot_be_counted_is_said(call, message):
    with pytest.raises(cn.CovNormError, match=message):
        call(network()[0])


def test_counting_changes_nothing_and_is_plain_numbers():
    net, _ = joint()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    account = cn.account(net, ("a", "b"))
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert json.loads(json.dumps(account.parameters)) == account.parameters
    assert cn.account(net, ["b", "a"]) == account
