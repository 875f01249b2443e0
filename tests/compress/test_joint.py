"""Joint mode: one C and W for several domains, from the PCAs of all their features together."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import zoo
from torch import Tensor

import torch_covnorm as cn
from torch_covnorm.stats.decomposition import closed_form

SIZES = {"a": (6, 16), "b": (10, 13), "c": (4, 20)}  # images, side: N_i differs with what counts
KINDS = ("residual", "parallel", "conv")
pytestmark = pytest.mark.filterwarnings("ignore::torch_covnorm.CovNormWarning")  # sites everywhere


class World(NamedTuple):  # moments, and rows (n, d), of A's input: by domain, by site
    net: cn.MultiDomainNetwork
    images: dict[str, Tensor]
    moments: dict[str, dict[str, cn.Moments]]
    rows: dict[str, dict[str, Tensor]]

    @torch.no_grad()
    def answers(self, names="abc") -> dict[str, Tensor]:
        return {n: self.net(self.images[n], domain=n) for n in names}

    def maps(self, name: str) -> dict[str, Any]:
        return {s: a.A for s, a in self.net.domains[name].adapters.items()}

    def matrices(self, names="abc") -> dict[str, Tensor]:
        return {f"{n} {s}": A.matrix().detach() for n in names for s, A in self.maps(n).items()}

    def outputs(self, name: str, site: str) -> Tensor:
        A = self.maps(name)[site]
        return self.rows[name][site] @ A.matrix().double().T + A.offset.double()


@torch.no_grad()
def world(name="convnet", kind="residual") -> World:
    """Three domains, always the same; large weights and A's, so that the outputs show all."""
    torch.manual_seed(0)
    backbone = zoo.ZOO[name][0]()
    for p in backbone.parameters():
        p.mul_(2)
    w = World(cn.MultiDomainNetwork(backbone, sites=zoo.everywhere), {}, {}, {})
    for i, (domain, (n, side)) in enumerate(SIZES.items()):
        zoo.shake_(w.net.add_domain(domain, 3 + i, kind))
        for A in w.maps(domain).values():
            for p in A.parameters():
                p.normal_(std=0.4)
        shape, each = ((n, 3, side, side), (n, 3, 1, 1)) if name != "mlp" else ((4 * n, 12), 12)
        w.images[domain] = (1 + i) * (torch.randn(shape) + torch.randn(each)) + i
    w.net.eval()
    for domain, images in w.images.items():
        w.rows[domain], hooks = {}, []
        for site, A in w.maps(domain).items():

            def hook(module, args, site=site, domain=domain):
                x = args[0].movedim(1, -1) if module.spatial else args[0]
                w.rows[domain][site] = x.reshape(-1, x.shape[-1]).double()

            hooks.append(A.register_forward_pre_hook(hook))
        w.moments[domain] = cn.collect(w.net, domain, [images])
        for h in hooks:
            h.remove()
    return w


def joined(names="ab", t=0.8, **arguments) -> World:
    w = world()
    cn.join_(w.net, list(names), w.moments, t, **arguments)
    return w


def same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> bool:
    return a.keys() == b.keys() and all(zoo.close(a[k], b[k], tolerance) for k in a)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def covariance(rows: Tensor) -> Tensor:
    return (rows - rows.mean(0)).T @ (rows - rows.mean(0)) / len(rows)


def assert_moments(found: cn.Moments, n: int, mean: Tensor, Sigma: Tensor) -> None:
    assert found.n == n
    assert (found.mean - mean).abs().max() < 1e-9 * mean.abs().max()
    assert (found.covariance - Sigma).abs().max() < 1e-9 * Sigma.abs().max()


def reference(parts: list[Tensor], N: list[int]) -> tuple[Tensor, Tensor]:
    """Eq. 10 word for word, over each domain's two-pass mean and covariance."""
    triples = [(n, x.mean(0), covariance(x)) for n, x in zip(N, parts, strict=True)]
    mu = sum(n * m for n, m, _ in triples) / sum(N)
    return mu, sum(n * (S + m.outer(m)) for n, m, S in triples) / sum(N) - mu.outer(mu)


@pytest.mark.parametrize("count", ["positions", "images"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["convnet", "mlp"])
@torch.no_grad()
def test_the_global_moments_are_those_of_all_rows_weighed_by_N(name, kind, count):
    w = world(name, kind)
    y = {s: [w.outputs(n, s) for n in "abc"] for s in w.net.sites}
    cn.join_(w.net, list("abc"), w.moments, count=count)
    basis = w.net.basis("joint")
    for site in w.net.sites:
        x = [w.rows[n][site] for n in "abc"]
        N = [w.moments[n][site].n if count == "positions" else len(w.images[n]) for n in "abc"]
        for found, rows in ((basis.x[site], x), (basis.y[site], y[site])):
            assert_moments(found, sum(N), *reference(rows, N))
            if count == "positions":
                all_ = torch.cat(rows)
                assert_moments(found, len(all_), all_.mean(0), covariance(all_))
            elif name == "convnet":  # control: counted the other way
                other = reference(rows, [len(r) for r in rows])[1]
                assert not zoo.close(found.covariance, other, 1e-3)
            average = sum(n * covariance(r) for n, r in zip(N, rows, strict=True)) / sum(N)
            assert not zoo.close(found.covariance, average, 1e-3)  # control: no mean term


@pytest.mark.parametrize("t", [0.6, 0.9, 0.99])
@torch.no_grad()
def test_C_and_W_are_of_the_global_PCAs_and_ranks_by_the_papers_rule(t):
    w = world()
    x = {s: torch.cat([w.rows[n][s] for n in "abc"]) for s in w.net.sites}
    y = {s: torch.cat([w.outputs(n, s) for n in "abc"]) for s in w.net.sites}
    result = cn.join_(w.net, list("abc"), w.moments, t)
    for site, shared in w.net.basis("joint").factors.items():
        (E_x, _), (E_y, P_y) = (torch.linalg.eigh(covariance(r[site])) for r in (x, y))
        kx, ky = (int((e.flip(0).cumsum(0) / e.sum() <= t).sum()) + 1 for e in (E_x, E_y))
        assert result.ranks[site] == shared.ranks == (kx, ky)
        white = covariance(x[site] @ shared.W.double().T)
        assert zoo.close(white, torch.eye(kx).double(), 1e-4)
        colored = (P_y[:, -ky:] * E_y[-ky:] @ P_y[:, -ky:].T).float()
        assert zoo.close(shared.C @ shared.C.T, colored, 1e-5)
        assert zoo.close(shared.mu_x, x[site].mean(0).float(), 1e-5)


@pytest.mark.parametrize("name", zoo.SMALL)
@pytest.mark.parametrize("kind", [*KINDS, "lowrank"])
@torch.no_grad()
def test_at_full_rank_every_domain_keeps_its_A(name, kind):
    w = world(name, kind)
    before, answers, bits = w.matrices(), w.answers(), zoo.backbone_bits(w.net)
    cn.join_(w.net, list("abc"), w.moments, 1.0)
    assert same(w.matrices(), before, 1e-5)
    assert same(w.answers(), answers, 1e-4)
    assert zoo.backbone_bits(w.net) == bits
    w.maps("b")[next(iter(w.net.sites))].M[0] = 0  # control: one row of one M
    assert [zoo.close(w.answers()[n], answers[n], 1e-4) for n in "abc"] == [True, False, True]


@pytest.mark.parametrize("case", ["one image", "black", "dim", "never along v", "hardly along v"])
def test_features_that_hardly_vary_cost_no_digits_at_full_rank(case):
    w, alone = world(), world()
    for name, x in w.images.items():
        x = {"one image": x[:1], "black": 0 * x, "dim": 1e-4 * x}.get(case, x)
        w.moments[name] = cn.collect(w.net, name, [x])
        for site, m in w.moments[name].items():
            v = torch.nn.functional.normalize(torch.arange(1.0, m.d + 1).double(), dim=0)
            shrink = {"never along v": 0, "hardly along v": 1e-6}.get(case, 1)
            w.moments[name][site] = m.transform(torch.eye(m.d) - (1 - shrink) * v.outer(v))
    cn.normalize_(alone.net, "a", w.moments["a"], 1.0)
    assert same(alone.matrices("a"), w.matrices("a"), 1e-5)
    cn.join_(w.net, list("abc"), w.moments, 1.0)
    assert same(w.matrices(), world().matrices(), 1e-5)


@pytest.mark.parametrize("t", [0.7, 0.95, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_with_one_domain_joint_is_independent(kind, t):
    w, alone, both = (world(kind=kind) for _ in range(3))
    result = cn.join_(w.net, "a", w.moments, t)
    assert result.ranks == cn.normalize_(alone.net, "a", alone.moments["a"], t)
    assert same(w.matrices("a"), alone.matrices("a"), 1e-5)
    assert same(w.answers("a"), alone.answers("a"), 1e-5)
    cn.join_(both.net, ["a", "b"], both.moments, t, ranks=result.ranks)  # control: other PCAs
    assert t == 1 or not same(both.matrices("a"), alone.matrices("a"), 1e-3)


@pytest.mark.parametrize("M", ["closed-form", "identity", "random", "none"])
@torch.no_grad()
def test_a_truncated_map_keeps_the_mean_of_the_domains_output_and_its_M_is_least_squares(M):
    w = world()
    y = {(n, s): w.outputs(n, s) for n in "abc" for s in w.net.sites}
    cn.join_(w.net, list("abc"), w.moments, 0.6, M=M)
    for (n, s), rows in y.items():
        assert zoo.close(w.outputs(n, s).mean(0), rows.mean(0), 1e-5)
        assert not zoo.close(w.net.basis("joint").y[s].mean, rows.mean(0), 1e-2)  # control
        W, mini, C = (f.double() for f in w.maps(n)[s].factors)
        x, aim = (w.rows[n][s] @ W.T, rows @ torch.linalg.pinv(C).T)
        best = torch.linalg.lstsq(x - x.mean(0), aim - aim.mean(0)).solution.T
        assert zoo.close(mini, best, 1e-4) == (M == "closed-form")


def test_M_may_be_the_identity_random_or_nobodys():
    seeds = [torch.Generator().manual_seed(s) for s in (0, 0, 1)]
    one, two, other = (joined(M="random", generator=g) for g in seeds)
    identity, none = joined(M="identity"), joined(M="none")
    for site, A in one.maps("a").items():
        assert torch.equal(A.M, two.maps("a")[site].M)
        assert not torch.equal(A.M, other.maps("a")[site].M)
        assert A.M.abs().max() < 0.06  # 0.01 times a Gaussian
        assert torch.equal(identity.maps("a")[site].M, torch.eye(*A.M.shape))
        assert list(none.maps("a")[site].state_dict()) == ["bias"]
        assert none.maps("a")[site].trains == ["bias"]
        assert set(A.trains) == {"bias", "M"}
    assert equal(none.answers("ab"), identity.answers("ab"))
    assert not same(none.answers("ab"), joined().answers("ab"), 1e-2)


def problem(singular=False):
    """A, W of orthogonal rows, C of orthogonal columns, and a Sigma that W does not whiten."""
    g = torch.Generator().manual_seed(0)
    A, P, Q, R = (torch.randn(6, 6, generator=g, dtype=torch.float64) for _ in range(4))
    R[:, :2] *= not singular
    scales = torch.linspace(1, 4, 6).double()
    return A, scales[:, None] * torch.linalg.qr(P)[0], torch.linalg.qr(Q)[0] * scales, R @ R.T


def cost(A, W, C, M, Sigma):
    """E‖A x − C M W x‖² for x of mean zero."""
    return ((A - C @ M @ W) @ Sigma @ (A - C @ M @ W).T).trace()


@pytest.mark.parametrize(("kx", "ky"), [(3, 4), (4, 2), (6, 3), (2, 6), (1, 1)])
@pytest.mark.parametrize("singular", [False, True])
def test_no_descent_finds_a_better_M_under_the_domains_own_covariance(kx, ky, singular):
    A, W, C, Sigma = problem(singular)
    W, C = W[:kx], C[:, :ky]
    best = cost(A, W, C, closed_form(A, W, C, Sigma), Sigma)
    for _ in range(3):
        M = torch.randn(ky, kx, dtype=torch.float64, requires_grad=True)
        search = torch.optim.LBFGS([M], max_iter=200, line_search_fn="strong_wolfe")

        def step(M=M):
            M.grad = None
            (loss := cost(A, W, C, M, Sigma)).backward()
            return loss

        search.step(step)
        assert best * (1 - 1e-9) <= cost(A, W, C, M.detach(), Sigma) <= best * (1 + 1e-3) + 1e-9
    if kx < 6:  # control: blind to the domain's covariance
        assert cost(A, W, C, closed_form(A, W, C), Sigma) > best * 1.01


def test_where_W_whitens_the_domain_or_is_complete_its_covariance_changes_nothing():
    A, W, C, Sigma = problem()
    E, P = torch.linalg.eigh(Sigma)
    for k in (2, 4):
        white = (P[:, -k:] / E[-k:].sqrt()).T
        assert torch.allclose(closed_form(A, white, C, Sigma), closed_form(A, white, C))
    for S in (Sigma, problem(singular=True)[3], torch.zeros_like(Sigma)):
        assert torch.allclose(C @ closed_form(A, W, C, S) @ W, A)  # also where x never went


# ── one domain after the other ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("t", [0.9, 1.0])
@pytest.mark.parametrize("order", ["abc", "bca", "cab", "cba"])
@torch.no_grad()
def test_one_after_the_other_equals_all_at_once(order, t):
    w, batch, size = world(), world(), set()
    at_once = cn.join_(batch.net, list("abc"), batch.moments, t)
    for name in order:
        result = cn.join_(w.net, name, {name: w.moments[name]}, t, grow=1.1)  # always grows
        basis = w.net.basis("joint")
        states = [m.state_dict() for side in (basis.x, basis.y) for m in side.values()]
        size.add(sum(v.numel() for state in states for v in state.values()))
    assert len(size) == 1  # constant storage
    assert (result.grown, result.ranks, set(result.retune)) == (True, at_once.ranks, set("abc"))
    whole = batch.net.basis("joint")
    for site in w.net.sites:
        for found, m in ((basis.x[site], whole.x[site]), (basis.y[site], whole.y[site])):
            assert_moments(found, m.n, m.mean, m.covariance)
        one, all_ = basis.factors[site], whole.factors[site]
        for found, expected in ((one.W.T, all_.W.T), (one.C, all_.C), (one.mu_x, all_.mu_x)):
            assert zoo.close(found * (found * expected).sum(0).sign(), expected, 1e-4)
    if t == 1:
        assert same(w.matrices(), batch.matrices(), 1e-5)
        assert same(w.answers(), batch.answers(), 1e-4)
    assert same(w.matrices(order[-1]), batch.matrices(order[-1]), 1e-4)  # moments at hand: its M


@torch.no_grad()
def test_captured_is_the_share_of_the_raw_features_variance():
    w = world()
    y = {(n, s): w.outputs(n, s) for n in "abc" for s in w.net.sites}
    first = cn.join_(w.net, ["a", "b"], w.moments, 0.8)
    later = cn.join_(w.net, "c", w.moments, grow=None)
    assert not later.grown
    for (name, site), out in y.items():
        shared = w.net.basis("joint").factors[site]
        shares = (later if name == "c" else first).captured[name][site]
        sides = ((w.rows[name][site], shared.W.T), (out, shared.C))
        for share, (rows, Q) in zip(shares, sides, strict=True):
            centred = rows - rows.mean(0)
            inside = centred @ torch.linalg.qr(Q.double())[0]
            assert share == pytest.approx(float(inside.square().sum() / centred.square().sum()))


def test_a_basis_that_captures_enough_stays_and_earlier_domains_keep_every_bit():
    w = world()
    w.net.copy_domain("a", "twin")
    cn.join_(w.net, "a", w.moments, 0.99)
    before, old = w.answers("a"), w.net.basis("joint")
    result = cn.join_(w.net, "twin", {"twin": w.moments["a"]})
    assert (result.grown, result.retune) == (False, ("twin",))
    new = w.net.basis("joint")
    assert all(new.factors[s] is old.factors[s] for s in w.net.sites)
    assert equal(w.answers("a"), before)
    assert new.x["stem.0"].n == 2 * old.x["stem.0"].n  # though its features count
    assert cn.join_(w.net, "b", w.moments).grown  # control
    assert not equal(w.answers("a"), before)


@torch.no_grad()
def test_growth_gives_earlier_domains_the_nearest_M_and_keeps_their_centre():
    w = joined("a", 0.9)
    old = {s: (A.matrix().double(), A.offset.double()) for s, A in w.maps("a").items()}
    assert cn.join_(w.net, "b", w.moments).grown
    for site, A in w.maps("a").items():
        W, M, C = (f.double() for f in A.factors)
        was, mu = old[site][0], A.centre.double()
        assert zoo.close(M, torch.linalg.pinv(C) @ was @ torch.linalg.pinv(W), 1e-4)
        assert zoo.close(C @ M @ W @ mu + A.offset, was @ mu + old[site][1], 1e-4)


def test_any_subset_and_two_bases_side_by_side():
    w = world()
    before = w.answers("b")
    cn.join_(w.net, ["c", "a"], w.moments, basis="one")
    assert equal(w.answers("b"), before)
    joint = w.answers("ac")
    cn.join_(w.net, "b", w.moments, 0.5, basis="two")
    assert equal(w.answers("ac"), joint)
    cn.join_(w.net, "c", w.moments, basis="two")  # changes over
    assert equal(w.answers("a"), {"a": joint["a"]})
    assert w.maps("c")["stem.0"].shared is w.net.basis("two").factors["stem.0"]


def test_moments_that_the_caller_goes_on_collecting_do_not_change_the_basis():
    w = joined("a")
    w.moments["a"]["stem.0"].update(torch.randn(5, 8))
    assert w.net.basis("joint").x["stem.0"].n == len(w.rows["a"]["stem.0"])


def test_ranks_that_were_given_for_a_basis_hold_when_it_grows():
    w = joined("a", 0.5, ranks={"stem.0": (7, 6)})
    assert cn.join_(w.net, "b", w.moments, grow=1.1).ranks["stem.0"] == (7, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": ["c", "x"]}, "unknown domain 'x'"),
        ({"names": ["c", "c"]}, "each once"),
        ({"names": "a"}, "'a' already shares basis 'joint'"),
        ({"names": "norms"}, "'norms' has no matrix A"),
        ({"names": "beside"}, "different kinds"),
        ({"names": ["c", "beside"], "basis": "new"}, "different kinds"),
        ({"moments": {}}, r"domain 'c', site 'stem\.0' needs moments of 8 features.*collect"),
        ({"moments": {"c": {"stem.0": cn.Moments(8)}}}, "site 'stem.0' needs moments"),
        ({"variance": 0.9}, "basis 'joint' has variance=0.8: c cannot join it with 0.9"),
        ({"count": "images"}, "has count='positions'"),
        ({"count": "pixels", "basis": "new"}, "count='pixels'"),
        ({"variance": 1.5, "basis": "new"}, "variance=1.5"),
        ({"M": "eye"}, "M='eye'"),
        ({"basis": "svd"}, "joint SVD"),
        ({"basis": "No name"}, "No name"),
        ({"ranks": {"nowhere": (1, 1)}, "basis": "new"}, "ranks for.*nowhere"),
        ({"ranks": {"nowhere": (1, 1)}}, "ranks for.*nowhere"),
        ({"ranks": {"stem.0": (9, 1)}, "basis": "new"}, r"site 'stem\.0': k_x = 9"),
        ({"ranks": {"stem.0": 3}, "basis": "new"}, r"site 'stem\.0'.*3"),
        ({"names": "broken", "basis": "new"}, "site 'stem.0'.*NaN"),
        ({"names": "broken"}, "site 'stem.0'.*NaN"),
    ],
)
def test_what_cannot_join_is_said_and_the_network_stays_as_it_was(arguments, message):
    w = joined()
    w.net.add_domain("norms", 3, "batchnorm")
    w.net.add_domain("beside", 3, "parallel")
    w.net.copy_domain("c", "broken").adapters["stem.0"].A.A.data[0, 0] = torch.nan
    w.net.copy_domain("c", "other")
    cn.join_svd_(w.net, ["other"], basis="svd")
    w.moments["broken"] = w.moments["beside"] = w.moments["c"]
    state = {k: v.nan_to_num(7) for k, v in w.net.state_dict().items()}
    bases = w.net.bases.items()
    with pytest.raises(cn.CovNormError, match=message):
        cn.join_(w.net, **{"names": "c", "moments": w.moments, "grow": None} | arguments)
    assert equal({k: v.nan_to_num(7) for k, v in w.net.state_dict().items()}, state)
    assert w.net.bases.items() == bases
    assert [w.net.domains[n].basis for n in "abc"] == ["joint", "joint", None]
