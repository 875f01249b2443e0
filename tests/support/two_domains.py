"""A network with two domains whose outputs depend on all their numbers, and a check of refusals."""

from __future__ import annotations

import pytest
import torch
import zoo

import torch_covnorm as cn


@torch.no_grad()
def network(name="convnet", kind="residual", seed=0):
    """Domains "a" and "b", with large weights and A's, so that outputs depend on them."""
    torch.manual_seed(seed)
    backbone = zoo.ZOO[name][0]()
    for p in backbone.parameters():
        p.mul_(2)
    net = cn.MultiDomainNetwork(backbone, sites=zoo.everywhere)
    for domain in "ab":
        zoo.shake_(net.add_domain(domain, 4, kind))
        for _, adapter in net.domains[domain].adapters.items():
            for p in adapter.A.parameters():
                p.normal_(std=0.4)
    x = zoo.ZOO[name][1](6)
    return net.eval(), x + torch.randn(6, *x.shape[1:2], *(1 for _ in x.shape[2:]))


def assert_refused(net, message, *arguments, do=cn.svd_):
    state = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(cn.CovNormError, match=message):
        do(net, *arguments)
    assert net.state_dict().keys() == state.keys()
    for key, value in net.state_dict().items():
        assert torch.equal(value.nan_to_num(77), state[key].nan_to_num(77)), key
