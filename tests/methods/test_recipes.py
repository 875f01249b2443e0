"""Every method trains on two real domains, with a real network and with VGG16's layout.

VGG16 has random weights here and a quarter of its width, so that the tests stay quick; the
benchmark of the methods takes its real ones.
"""

from __future__ import annotations

import functools

import pytest
import torch
import zoo
from torch import nn

import torch_covnorm as cn
from torch_covnorm.backbones import VGG16
from torch_covnorm.data import load_sample, prepare

CHANCE = 10.0  # both domains have ten classes
DOMAINS = ("fashion", "digits")
TRAIN, VAL = 200, 60
STARTS_FROM_A = ("svd", "svd-fta", "pca-fta", "covnorm", "joint-svd", "covnorm-joint")
SETTINGS = {
    "bn": {"epochs": 8, "lr": 2e-2},
    "piggyback": {"epochs": 7, "lr": 3e-4, "head_lr": 3e-3, "schedule": "one-cycle"},
    "pca-fta": {"tuning": {"epochs": 4, "lr": 3e-3}},
    "fnft": {"epochs": 4, "lr": 1e-3},
    "lwf": {"epochs": 4, "lr": 1e-3, "warm_up": 1},
}
DEFAULT = {"epochs": 4}
FIXED = {"training": "default", "norms": "own"}  # as published


def narrow_vgg16():
    """VGG16's 13 convolutions with 16, 32, 64, 128 and 128 channels, and a pooled head."""
    net = VGG16(fc=False)
    for i, layer in enumerate(net.features):
        if isinstance(layer, nn.Conv2d):
            wide = max(layer.in_channels // 4, 3), layer.out_channels // 4
            net.features[i] = nn.Conv2d(*wide, 3, padding=1)
            nn.init.kaiming_normal_(net.features[i].weight, mode="fan_out", nonlinearity="relu")
    net.classifier = nn.Linear(128, 1000)
    return net


def backbone(name):
    if name == "vgg16 layout":
        torch.manual_seed(0)
        return narrow_vgg16()
    return cn.load_backbone(name)


@functools.cache
def network(name):
    """A network with a domain of trained residual adapters for each of the two."""
    net = cn.MultiDomainNetwork(backbone(name).to(memory_format=torch.channels_last))
    for domain in DOMAINS:
        train, val = loaders(name, domain)
        cn.adapt(net, f"ra-{domain}", train, val, method="ra", **DEFAULT, **FIXED)
    return net


@functools.cache
def loaders(name, domain):
    """The first images of a shipped sample, class-balanced: 200 to train with, 60 to validate."""
    sample, how = load_sample(domain), backbone(name).preprocessing
    x = prepare(sample.x_train[: TRAIN + VAL], 32, how["mean"], how["std"], channels_last=True)
    batches = list(zip(x.split(20), sample.y_train[: TRAIN + VAL].split(20), strict=True))
    return batches[: TRAIN // 20], batches[TRAIN // 20 :]


def adapted(name, method):
    """{domain: result} of a method on both domains, and their names in the network."""
    net = network(name)
    names = {domain: f"{method}-{domain}" for domain in DOMAINS}
    settings = {"method": method, **SETTINGS.get(method, DEFAULT), **FIXED}
    trains, vals = zip(*(loaders(name, d) for d in DOMAINS), strict=True)
    if cn.METHODS[method].joint:
        starts = [f"ra-{d}" for d in DOMAINS]
        found = cn.adapt(net, list(names.values()), trains, vals, start=starts, **settings)
        return net, {d: found[n] for d, n in names.items()}
    results = {}
    for domain, train, val in zip(DOMAINS, trains, vals, strict=True):
        if method in STARTS_FROM_A:
            settings["start"] = f"ra-{domain}"
        results[domain] = cn.adapt(net, names[domain], train, val, **settings)
    return net, results


def expected(net, method, result):
    """Adapter parameters by the formulas of the methods' own papers, from the layers' sizes."""
    sites = net.sites.values()
    norms = (nn.BatchNorm2d,)
    plain = [
        (n, m)
        for n, m in net.backbone.named_modules()
        if not list(m.children()) and not isinstance(m, norms)
    ]
    head = net.backbone.get_submodule(net.head_name)
    weights = sum(p.numel() for _, m in plain for p in m.parameters())
    old_head = sum(p.numel() for p in head.parameters())
    quarter = {s.name: round(s.d_out / 4) for s in sites}
    k = result.ranks
    return {
        "fnft": lambda: weights - old_head,
        "lwf": lambda: weights,
        "bn": lambda: 0,
        "ra": lambda: sum(s.d_out**2 for s in sites),
        "dan": lambda: sum(s.d_out**2 for s in sites),
        "parallel": lambda: sum(s.d_out * s.d_in for s in sites),
        "svd": lambda: sum(2 * quarter[s.name] * s.d_out for s in sites),
        "svd-fta": lambda: sum(2 * quarter[s.name] * s.d_out for s in sites),
        "fta": lambda: sum(2 * quarter[s.name] * s.d_out for s in sites),
        "pca-fta": lambda: sum(2 * s.d_out * min(k[s.name]) for s in sites),
        "covnorm": lambda: sum(2 * s.d_out * min(k[s.name]) for s in sites),
        "joint-svd": lambda: sum(quarter[s.name] * s.d_out for s in sites),
        "covnorm-joint": lambda: sum(k[s.name][0] * k[s.name][1] for s in sites),
        "piggyback": lambda: (
            -(
                -sum(
                    m.weight.numel()
                    for _, m in plain
                    if isinstance(m, nn.Conv2d | nn.Linear) and m is not head
                )
                // 32
            )
        ),
    }[method]()


@pytest.mark.parametrize("method", cn.METHODS)
@pytest.mark.parametrize("name", ["efficientnet-lite0", "vgg16 layout"])
@pytest.mark.slow
def test_every_method_learns_two_real_domains_at_its_published_size(name, method):
    before = zoo.backbone_bits(network(name))
    net, results = adapted(name, method)
    for domain, result in results.items():
        assert result.accuracy > CHANCE + 20, (domain, result.stages)
        assert result.parameters["adapter"] == expected(net, method, result)
        _, val = loaders(name, domain)
        assert cn.evaluate(net, result.domain, val).accuracy == result.accuracy
    wrong = cn.evaluate(net, results["digits"].domain, loaders(name, "fashion")[1]).accuracy
    assert wrong < CHANCE + 20, "a control: the other domain's adapters do not know this one"
    assert zoo.backbone_bits(net) == before, "the backbone keeps every bit"


@pytest.mark.slow
def test_moments_are_of_the_images_that_statistics_names():
    """A loader that augments by itself would blur them; `augment=` never does."""
    net = cn.MultiDomainNetwork(narrow_vgg16())
    train, val = loaders("vgg16 layout", "digits")
    blurred = [(nn.functional.avg_pool2d(x, 9, 1, 4), y) for x, y in train]
    cn.adapt(net, "ra", train, val, method="ra", epochs=1, **FIXED)
    ranks = {}
    for name, settings in {
        "plain": {"train": train},
        "named": {"train": blurred, "statistics": train},
        "own augmentation": {"train": train, "augment": lambda x: 0 * x},
        "control": {"train": blurred},
    }.items():
        domain = name.replace(" ", "-")
        found = cn.adapt(
            net,
            domain,
            val=val,
            start="ra",
            variance=0.9,
            tuning={"epochs": 0},
            **FIXED,
            **settings,
        )
        ranks[name] = found.ranks
    assert ranks["named"] == ranks["plain"] == ranks["own augmentation"]
    assert ranks["control"] != ranks["plain"]
