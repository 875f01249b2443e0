"""Algorithm 1 over a network: guarantees 2 to 4."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
import zoo
from torch import nn

import torch_covnorm as cn
from torch_covnorm.adapters import CovNormMap, LowRankMap

WITH_A = ("residual", "parallel", "conv", "lowrank")


def loader(name: str, batches: int = 3) -> list[tuple[torch.Tensor, None]]:
    return [(zoo.ZOO[name][1](4), None) for _ in range(batches)]


# ── collect ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [*zoo.SMALL, "timm vit-tiny"])
@pytest.mark.parametrize("kind", WITH_A)
@pytest.mark.slow
def test_derived_output_moments_equal_collected_ones(name, kind):
    """y = A x + b: its moments follow from x's (eq. 2). Collected here by a hook of the test's."""
    net = zoo.network(name, kinds=(kind,))
    data = loader(name)
    seen: dict[str, list[torch.Tensor]] = {site: [] for site in net.sites}
    hooks = []
    for site, adapter in net.domains[kind].adapters.items():

        def hook(module, args, out, site=site):
            rows = out.movedim(1, -1) if module.spatial else out
            seen[site].append(rows.reshape(-1, rows.shape[-1]).double())

        hooks.append(adapter.A.register_forward_hook(hook))
    moments = cn.collect(net, kind, data)
    for hook in hooks:
        hook.remove()
    for site, adapter in net.domains[kind].adapters.items():
        y = torch.cat(seen[site])
        derived = moments[site].transform(adapter.A.matrix(), adapter.A.offset)
        scale = y.var(0).max()
        assert derived.n == len(y)
        assert (derived.mean - y.mean(0)).abs().max() < 1e-5 * (1 + y.abs().max())
        assert (derived.covariance - torch.cov(y.T, correction=0)).abs().max() < 1e-4 * scale
        wrong = moments[site].transform(1.01 * adapter.A.matrix(), adapter.A.offset)  # control
        assert (wrong.covariance - torch.cov(y.T, correction=0)).abs().max() > 1e-4 * scale


def test_collect_is_in_eval_mode_and_leaves_modes_and_statistics_alone():
    net = zoo.network("convnet with norms", kinds=("residual",)).train()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    modes = [m.training for m in net.modules()]
    cn.collect(net, "residual", loader("convnet with norms"))
    assert [m.training for m in net.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())


def test_collection_does_not_depend_on_the_batches():
    net = zoo.network("convnet", kinds=("residual",))
    x = torch.randn(12, 3, 16, 16)
    whole = cn.collect(net, "residual", [x])
    parts = cn.collect(net, "residual", x.split(5))
    for site in whole:
        torch.testing.assert_close(
            parts[site].covariance, whole[site].covariance, rtol=1e-4, atol=1e-5
        )


def test_another_threads_calls_are_not_collected():
    net = zoo.network("mlp", kinds=("residual",))
    x = torch.randn(6, 12)

    def busy():
        for _ in range(3):
            other = threading.Thread(target=lambda: net(x, domain="residual"))
            other.start()
            other.join()
            yield x

    assert {m.n for m in cn.collect(net, "residual", busy()).values()} == {18}


def test_nan_features_name_the_site():
    net = zoo.network("convnet", kinds=("residual",))
    x = torch.randn(2, 3, 16, 16)
    x[0, 0, 0, 0] = torch.nan
    with pytest.raises(cn.CovNormError, match=r"site 'stem.0'.*NaN"):
        cn.collect(net, "residual", [x])
    assert not any(m._forward_pre_hooks for m in net.domains["residual"].modules())


# ── normalise ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [n for n in zoo.ZOO if n != "vgg16"])
@pytest.mark.parametrize("kind", WITH_A)
@torch.no_grad()
@pytest.mark.slow
def test_full_rank_covnorm_reproduces_A(name, kind):
    net = zoo.network(name, kinds=(kind,))
    data = loader(name)
    adapters = net.domains[kind].adapters
    before = {site: (a.A.matrix().clone(), a.A.offset.clone()) for site, a in adapters.items()}
    answer = net(data[0][0], domain=kind)
    ranks = cn.normalize_(net, kind, cn.collect(net, kind, data), variance=1.0)
    for site, adapter in adapters.items():
        A, b = before[site]
        assert ranks[site] == (A.shape[1], A.shape[0])
        assert zoo.close(adapter.A.matrix(), A, 1e-5)
        assert zoo.close(adapter.A.offset, b, 1e-5)
    assert zoo.close(net(data[0][0], domain=kind), answer, 1e-4)


@torch.no_grad()
def test_control_identity_and_random_M_do_not_reproduce_A():
    for M in ("identity", "random"):
        net = zoo.network("convnet", kinds=("residual",))
        data = loader("convnet")
        adapter = net.domains["residual"].adapters["stem.0"]
        A = adapter.A.matrix().clone()
        cn.normalize_(net, "residual", cn.collect(net, "residual", data), variance=1.0, M=M)
        assert not zoo.close(adapter.A.matrix(), A, 1e-2)


@pytest.mark.parametrize("name", zoo.SMALL)
@pytest.mark.parametrize("kind", WITH_A)
@pytest.mark.parametrize("t", [0.7, 0.95])
@torch.no_grad()
def test_absorbed_equals_tuned(name, kind, t):
    net = zoo.network(name, kinds=(kind,))
    data = loader(name)
    ranks = cn.normalize_(net, kind, cn.collect(net, kind, data), variance=t)
    zoo.shake_(net.domains[kind])  # as tuning would
    answer = net(data[0][0], domain=kind)
    cn.absorb_(net, kind)
    assert zoo.close(net(data[0][0], domain=kind), answer, 1e-5)
    for site, adapter in net.domains[kind].adapters.items():
        assert isinstance(adapter.A, LowRankMap)
        d_out, d_in = adapter.A.matrix().shape
        assert adapter.paper_count() == (d_in + d_out) * min(ranks[site])
    zoo.shake_(net.domains[kind], 0.01)  # control: the comparison sees a small change
    assert not zoo.close(net(data[0][0], domain=kind), answer, 1e-5)


def test_what_trains_after_normalising_is_what_was_asked_for():
    for tune, expected in (("M", {"M", "bias"}), ("all", {"M", "W", "C", "bias"})):
        net = zoo.network("convnet", kinds=("residual",))
        moments = cn.collect(net, "residual", loader("convnet"))
        cn.normalize_(net, "residual", moments, variance=0.9, tune=tune)
        for _, adapter in net.domains["residual"].adapters.items():
            assert set(adapter.A.trains) == expected
        assert net.domains["residual"].head.weight.requires_grad


def test_tuning_M_keeps_the_centre_where_eq_8_has_it():
    """At x = mu_x the output is mu_y, whatever M has become."""
    net = zoo.network("mlp", kinds=("residual",))
    moments = cn.collect(net, "residual", loader("mlp"))
    cn.normalize_(net, "residual", moments, variance=0.9)
    A = net.domains["residual"].adapters["2"].A
    with torch.no_grad():
        A.M.normal_()
    assert zoo.close(A(moments["2"].mean.float()[None])[0], A.bias, 1e-5)


def test_official_preset_is_the_authors_program():
    net = zoo.network("mlp", kinds=("residual",))
    moments = cn.collect(net, "residual", loader("mlp", 8))
    A = net.domains["residual"].adapters["2"].A.matrix().double()
    y = moments["2"].transform(A, net.domains["residual"].adapters["2"].A.offset)
    ranks = cn.normalize_(net, "residual", moments, preset="official-code")
    new = net.domains["residual"].adapters["2"].A
    ratio = moments["2"].pca()[0].cumsum(0) / moments["2"].pca()[0].sum()
    assert ranks["2"][0] == max(2, int((ratio < 0.995).sum()))
    assert zoo.close(new.W @ new.W.T, torch.eye(len(new.W)), 1e-5)  # no eigenvalues in it
    assert zoo.close(new.bias, -y.mean.float(), 1e-5)
    assert new.M.abs().max() < 0.1
    assert new.M.requires_grad
    assert new.W.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variance": 0.0}, "variance=0.0"),
        ({"variance": 1.5}, "variance=1.5"),
        ({"variance": float("nan")}, "variance=nan"),
        ({"ranks": {"2": (0, 3)}}, "site '2': k_x = 0"),
        ({"ranks": {"2": (3, 11)}}, "site '2': k_y = 11"),
        ({"ranks": {"9": (1, 1)}}, "ranks for"),
        ({"M": "eye"}, "M='eye'"),
        ({"tune": "C"}, "tune='C'"),
        ({"preset": "papers"}, "did you mean 'paper'"),
        ({"moments": {}}, "site '0' needs moments of"),
        ({"moments": {"0": cn.Moments(3)}}, "site '0' needs moments of"),
    ],
)
def test_a_failed_normalize_leaves_the_network_as_it_was(change, message):
    net = zoo.network("mlp")
    moments = cn.collect(net, "residual", loader("mlp"))
    state = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(cn.CovNormError, match=message):
        cn.normalize_(net, "residual", **{"moments": moments, **change})
    assert net.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())


def test_nothing_to_normalise_or_absorb_is_said():
    net = zoo.network("mlp")
    with pytest.raises(cn.CovNormError, match="no matrix A"):
        cn.collect(net, "batchnorm", loader("mlp"))
    with pytest.raises(cn.CovNormError, match="no matrix A"):
        cn.normalize_(net, "batchnorm", {})
    with pytest.raises(cn.CovNormError, match="no M to absorb"):
        cn.absorb_(net, "residual")


# ── guarantee 3: never NaN ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("t", [0.5, 0.99, 1.0])
@pytest.mark.parametrize("case", ["dead channel", "constant", "one image", "one class"])
def test_degenerate_data_works_and_is_never_nan(case, t, tmp_path):
    net = zoo.network("convnet", kinds=("residual",))
    x = torch.randn(3, 3, 16, 16)
    if case == "dead channel":
        with torch.no_grad():
            net.backbone.stem[0].weight[2] = 0
            net.backbone.stem[0].bias[2] = 0
    elif case == "constant":
        x = torch.zeros(3, 3, 16, 16)
    elif case == "one image":
        x = x[:1]
    else:
        net.add_domain("one", classes=1)
        zoo.shake_(net.domains["one"])
        net.eval()
    name = "one" if case == "one class" else "residual"
    moments = cn.collect(net, name, [x])
    before = net(x, domain=name).detach()
    cn.normalize_(net, name, moments, variance=t)
    after = net(x, domain=name)
    assert after.isfinite().all()
    if t == 1.0:
        assert zoo.close(after, before, 1e-4)
    cn.absorb_(net, name)
    net.save_domain(name, tmp_path)
    assert all(p.isfinite().all() for p in net.domains[name].parameters())


def test_fewer_rows_than_features_and_a_single_feature():
    wide = nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 2))
    with pytest.warns(cn.CovNormWarning, match="outweighs"):
        net = cn.MultiDomainNetwork(wide, sites=lambda name, _: name in ("0", "2"))
    net.add_domain("a", 2)
    zoo.shake_(net.domains["a"])
    net.eval()
    x = torch.randn(5, 4)  # 5 rows of 1 and of 40 features
    before = net(x, domain="a").detach()
    assert cn.normalize_(net, "a", cn.collect(net, "a", [x]), variance=0.99)["0"] == (1, 1)
    assert zoo.close(net(x, domain="a"), before, 0.3)
    assert isinstance(net.domains["a"].adapters["2"].A, CovNormMap)


# ── guarantee 4: same seed, same file ─────────────────────────────────────────────────────────

SCRIPT = """
import sys, torch, torch_covnorm as cn
torch.manual_seed(int(sys.argv[2]))
net = cn.MultiDomainNetwork(cn.load_backbone("efficientnet-lite0"))
net.add_domain("a", 4)
x, y = torch.randn(8, 3, 32, 32), torch.arange(8) % 4
def train():
    net.train()
    optimizer = torch.optim.AdamW(net.parameters_of("a"), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x, domain="a"), y).backward()
        optimizer.step()
train()
cn.normalize_(net, "a", cn.collect(net, "a", [(x, y)]), variance=0.9)
train()
cn.absorb_(net, "a")
net.save_domain("a", sys.argv[1])
"""


@pytest.mark.slow
def test_same_seed_same_adapter_file_byte_for_byte(tmp_path):
    contents = []
    for run, seed in (("one", "3"), ("two", "3"), ("other", "4")):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / run), seed]
        subprocess.run(command, check=True, timeout=120)
        contents.append({f.name: f.read_bytes() for f in (tmp_path / run).iterdir()})
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]  # control
