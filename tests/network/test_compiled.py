"""`compile_`: one graph for all domains of a form, and the same answers as without it."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading

import pytest
import torch
import zoo
from torch import nn

import torch_covnorm as cn

NAMES = ("a", "b", "c", "d")


class Small(nn.Module):
    """Two sites with norms and a head; with `torch.Tensor.item`, a graph that cannot be whole."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.second, self.norm2 = nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.head, self.breaks = nn.Linear(8, 5), breaks

    def forward(self, x):
        if self.breaks and x.sum().item() > 1e9:
            x = x / 2
        x = self.norm1(self.first(x)).relu()
        return self.head(self.norm2(self.second(x)).relu().mean((2, 3)))


def network(classes=(4, 4, 4, 4), ranks=(None,) * 4, breaks=False):
    torch.manual_seed(0)
    net = cn.MultiDomainNetwork(Small(breaks))
    for name, n, rank in zip(NAMES, classes, ranks, strict=True):
        net.add_domain(name, classes=n, rank=rank)
        zoo.shake_(net.domain(name))
    return net.eval()


def compiled(net, **options):
    """The network compiled, beside an uncompiled copy; torch's counters start at 0."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return copy.deepcopy(net).compile_(**{"backend": "eager", **options})


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def images(n=6):
    return torch.randn(n, 3, 12, 12)


@pytest.fixture(autouse=True, scope="module")
def _compiler():
    import torch._dynamo.utils

    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_domains_of_equal_shapes_share_one_graph(backend):
    net = network()
    fast, x = compiled(net, backend=backend), images()
    with torch.no_grad():
        for name in NAMES:
            assert zoo.close(fast(x, domain=name), net(x, domain=name), 1e-6)
            assert graphs() == 1, name


@pytest.mark.slow
def test_classes_ranks_and_batch_sizes_become_symbols():
    net = network(classes=(4, 5, 7, 9), ranks=(2, 3, 4, 5))
    fast = compiled(net)
    with torch.no_grad():
        for n, expected in ((6, (1, 2, 2, 2)), (9, (3, 3, 3, 3)), (4, (3, 3, 3, 3))):
            x = images(n)
            for name, number in zip(NAMES, expected, strict=True):
                assert zoo.close(fast(x, domain=name), net(x, domain=name), 1e-6)
                assert graphs() == number, (n, name)


@pytest.mark.slow
def test_a_compiled_network_trains_to_the_same_weights():
    net = network()
    fast, x, y = compiled(net, backend="aot_eager"), images(), torch.arange(6) % 4
    for name in NAMES[:3]:
        for one in (net, fast):
            optimizer = torch.optim.SGD(one.parameters_of(name), lr=0.1)
            one.train_domain(name)
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(one(x, domain=name), y).backward()
                optimizer.step()
        assert graphs() == 1
        expected = net.domain(name).state_dict()
        for key, value in fast.domain(name).state_dict().items():
            assert zoo.close(value.float(), expected[key].float(), 1e-5), key
    assert zoo.backbone_bits(fast) == zoo.backbone_bits(net)


@pytest.mark.slow
def test_what_cannot_be_compiled_runs_as_before():
    net = network()
    net.add_domain("own", classes=4, adapter="own")
    fast, x = compiled(net), images(4)
    with torch.no_grad():
        assert torch.equal(fast(x, domain=[*NAMES]), net(x, domain=[*NAMES]))
        assert torch.equal(fast(x, domain="own"), net(x, domain="own"))
        fast.prepare_("a", only=True)
        assert zoo.close(fast(x, domain="a"), net(x, domain="a"))
    loader = [(x, torch.arange(4))]
    mine, expected = (cn.collect(n, "b", loader) for n in (fast, net))  # hooks in the backbone
    assert all(torch.equal(mine[s].covariance, m.covariance) for s, m in expected.items())
    assert graphs() == 0
    fast(x, domain="b")
    assert graphs() == 1
    fast.compile_(disable=True)(images(5), domain="b")
    assert graphs() == 1


@pytest.mark.slow
def test_threads_do_not_see_each_others_domains():
    net = network()
    fast, x = compiled(net), images()
    wrong, expected = [], {name: net(x, domain=name) for name in NAMES}

    def ask(name):
        for _ in range(30):
            if not zoo.close(fast(x, domain=name), expected[name], 1e-6):
                wrong.append(name)

    before = torch._dynamo.config.force_parameter_static_shapes
    threads = [threading.Thread(target=ask, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert graphs() <= len(NAMES), "at most one for each thread that came first"
    assert torch._dynamo.config.force_parameter_static_shapes is before


def test_a_backbone_that_is_no_whole_graph_runs_uncompiled_and_says_why():
    net = network(breaks=True)
    fast, x = compiled(net), images()
    with pytest.warns(cn.CovNormWarning, match=r"from domain 'a' on.*as one graph \(.+\)"):
        assert torch.equal(fast(x, domain="a"), net(x, domain="a"))
    assert torch.equal(fast(x, domain="b"), net(x, domain="b")), "and it is not tried again"


@pytest.mark.slow
def test_a_domain_beyond_the_limit_runs_uncompiled_and_says_so():
    net = network(ranks=(None, 2, None, 2))
    fast, x = compiled(net, recompile_limit=1), images()
    fast(x, domain="a")
    with pytest.warns(cn.CovNormWarning, match="domain 'b' runs uncompiled"):
        assert torch.equal(fast(x, domain="b"), net(x, domain="b"))
    assert zoo.close(fast(x, domain="c"), net(x, domain="c"), 1e-6)


def test_an_error_of_the_call_is_the_same_as_uncompiled():
    net = network()
    fast = compiled(net)
    for x, name in ((torch.randn(2, 4, 12, 12), "a"), (images(), "z")):
        with pytest.raises(cn.CovNormError) as expected:
            net(x, domain=name)
        with pytest.raises(cn.CovNormError) as error:
            fast(x, domain=name)
        assert str(error.value) == str(expected.value)
    assert zoo.close(fast(images(), domain="a"), net(images(), domain="a"), 1.0), "it still runs"
    assert graphs() == 1


def test_torch_compile_of_the_network_names_compile_():
    net, remedy = network(), r"call net\.compile_\(\)"
    torch._dynamo.reset()
    with pytest.raises(cn.CovNormError, match=remedy):
        torch.compile(net, backend="eager")(images(), domain="a")
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=remedy):
        torch.compile(net, backend="eager", fullgraph=True)(images(), domain="a")


@pytest.mark.slow
def test_compile_of_the_network_in_place_is_compile_():
    net = compiled(network())
    net.compile_(disable=True).compile(backend="eager")
    for name in NAMES:
        net(images(), domain=name)
    assert graphs() == 1


@pytest.mark.slow
def test_a_compiled_network_runs_inside_a_compiled_function():
    net = network()
    fast, x = compiled(net), images()
    outer = torch.compile(lambda x, name: fast(x * 2, domain=name) + 1, backend="eager")
    with torch.no_grad():
        for name in NAMES[:2]:
            assert zoo.close(outer(x, name), net(x * 2, domain=name) + 1, 1e-6)


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_backbone_inside_a_network_still_reaches_the_domain():
    net, x = network(), images()
    expected = {name: net(x, domain=name) for name in NAMES[:2]}
    torch._dynamo.reset()
    net.backbone.forward = torch.compile(net.backbone.forward, backend="eager")
    for name, answer in expected.items():
        assert zoo.close(net(x, domain=name), answer, 1e-6)


@pytest.mark.slow
def test_the_compiler_is_imported_only_on_request():
    code = (
        "import sys, torch, torch_covnorm as cn; from torch import nn;"
        "net = cn.MultiDomainNetwork(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)));"
        "net.add_domain('a', classes=2); net(torch.ones(2, 4), domain='a');"
        "print('torch._dynamo' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
