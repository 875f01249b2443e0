"""Learning without forgetting: a fork that is fine-tuned and held to the backbone's old answers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

import torch_covnorm as cn
from torch_covnorm.methods import recipes as methods
from torch_covnorm.methods.lwf import OldHead, distillation, fork_


class Net(nn.Module):
    """Dropout, a norm or none, and a head of five old classes."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, 16), nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.two(self.one(x).relu())).relu()))


class ConvNet(nn.Module):
    """A convolution as the head and something behind it, as in SqueezeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.one(x).relu()).mean((2, 3))


def network(norm: bool = True, seed: int = 0) -> cn.MultiDomainNetwork:
    torch.manual_seed(seed)
    backbone = Net(norm)
    with torch.no_grad():
        backbone.head.weight.mul_(5)  # old answers that are sure of something
    zoo.shake_(backbone)
    return cn.MultiDomainNetwork(backbone)


def batches(n: int = 6, size: int = 16, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Three classes of the new task, around centres."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, 12, generator=torch.Generator().manual_seed(99))
    labels = [torch.randint(0, 3, (size,), generator=g) for _ in range(n)]
    return [(centres[y] + torch.randn(size, 12, generator=g), y) for y in labels]


def adapt(net: cn.MultiDomainNetwork, method: str = "lwf", name: str = "new", **options):
    given = {"epochs": 3, "lr": 3e-3} | options
    return cn.adapt(net, name, batches(), method=method, progress=False, **given)


def pristine(net: cn.MultiDomainNetwork) -> nn.Module:
    """The backbone as a plain module of its own."""
    plain = Net(isinstance(net.backbone.norm, nn.BatchNorm1d))
    plain.load_state_dict(net.backbone.state_dict())
    return plain.eval()


def with_old_head(net: cn.MultiDomainNetwork, name: str) -> nn.Module:
    """The fork as a plain module that answers the old task."""
    plain = net.merge(name)
    plain.head = nn.Linear(16, 5)
    plain.head.load_state_dict(net.domains[name].weights["head"].state_dict())
    return plain.eval()


def tensors(domain: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in domain.state_dict().items()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    assert set(a) == set(b)
    return {k for k in a if not torch.equal(a[k], b[k])}


# ── the loss ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("T", [1.0, 2.0, 3.5])
def test_distillation_is_the_formula(T):
    """``-1/n sum_i sum_c p'_c log q'_c`` with p' = p^(1/T) / sum p^(1/T), as published."""
    answers, targets = torch.randn(6, 5).double() * 3, torch.randn(6, 5).double() * 3
    p, q = targets.softmax(1) ** (1 / T), answers.softmax(1) ** (1 / T)
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    by_hand = -sum(float(p[i, c] * q[i, c].log()) for i in range(6) for c in range(5)) / 6
    assert distillation(answers, targets, T).item() == pytest.approx(by_hand, rel=1e-10)
    if T == 2.0:
        assert distillation(answers, targets).item() == pytest.approx(by_hand, rel=1e-10)
    else:
        assert distillation(answers, targets).item() != pytest.approx(by_hand, rel=1e-3)


def test_its_gradient_is_that_of_the_divergence():
    answers = (torch.randn(6, 5).double() * 3).requires_grad_()
    targets = torch.randn(6, 5).double() * 3
    (found,) = torch.autograd.grad(distillation(answers, targets), answers)
    p, log_q = (targets / 2).softmax(1), (answers / 2).log_softmax(1)
    divergence = F.kl_div(log_q, p, reduction="batchmean")
    (expected,) = torch.autograd.grad(divergence, answers)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, ((log_q.exp() - p) / (2 * 6)).detach())
    (rest,) = torch.autograd.grad(distillation(answers, answers.detach()), answers)
    assert rest.abs().max() < 1e-12  # nothing pulls where nothing is forgotten


# ── the method ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("norm", [True, False])
def test_without_strength_and_warm_up_it_is_fine_tuning_to_the_bit(norm):
    fnft, lwf = network(norm), network(norm)
    adapt(fnft, "fnft", seed=3)
    adapt(lwf, strength=0.0, warm_up=0, seed=3)
    old = {f"weights.head.{key}" for key in ("weight", "bias")}
    mine = tensors(lwf.domains["new"])
    assert {k for k in mine if k.startswith("weights.head.")} == old
    rest = {k: v for k, v in mine.items() if k not in old}
    assert differing(rest, tensors(fnft.domains["new"])) == set()
    kept = network(norm)
    adapt(kept, strength=1.0, warm_up=0, seed=3)
    trained = {k for k in differing(tensors(kept.domains["new"]), mine) if "num_batches" not in k}
    parameters = {n for n, _ in kept.domains["new"].named_parameters()}
    assert parameters <= trained  # the old head's answers pull at every weight


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_with_strength_it_forgets_less(seed):
    agreement = {}
    for strength in (0.0, 5.0):
        net = network(norm=False, seed=seed)
        found = adapt(net, strength=strength, warm_up=0, epochs=10, lr=1e-2).forgetting
        assert found == cn.forgetting(net, "new", batches())
        agreement[strength] = cn.forgetting(net, "new", batches(20, seed=1))["agreement"]
    assert agreement[5.0] > agreement[0.0] + 5, agreement


def test_the_targets_are_the_untouched_backbones_answers_in_eval_mode_to_what_the_fork_saw(
    monkeypatch,
):
    net = network()
    before, seen, calls = pristine(net), [], []

    def augment(images: Tensor) -> Tensor:
        seen.append(images + torch.randn_like(images))
        return seen[-1].clone()

    def spy(answers: Tensor, targets: Tensor, T: float) -> Tensor:
        calls.append((answers.detach().clone(), targets.clone(), targets.requires_grad, T))
        return distillation(answers, targets, T)

    monkeypatch.setattr(methods, "distillation", spy)
    adapt(net, warm_up=0, augment=augment, temperature=4.0)
    assert len(calls) == len(seen) == 18
    plain = [x for x, _ in batches()]
    for i, (images, (_, targets, differentiable, T)) in enumerate(zip(seen, calls, strict=True)):
        assert torch.equal(targets, before(images))
        assert not differentiable
        assert T == 4.0
        assert not zoo.close(targets, before(plain[i % 6]), 0.01)  # control: not augmented
        assert not zoo.close(targets, before.train()(images), 0.01)  # control: dropout
        before = pristine(net)  # its statistics were moved by the control


def test_the_answers_are_the_old_heads_on_the_features_of_the_same_pass():
    """The dropout that the new head's answers had, not another draw."""
    net = network(norm=False)
    adapt(net, epochs=0, warm_up=0)
    domain, (x, _) = net.domains["new"], batches()[0]
    zoo.shake_(domain)
    net.train()
    with OldHead(net, "new").watching() as old:
        torch.manual_seed(7)
        net(x, domain="new")
        answers = old.now()
        targets = old.before(x)
        assert net.backbone.drop.training
        assert torch.equal(targets, pristine(net)(x))
    plain = with_old_head(net, "new").train()
    torch.manual_seed(7)
    assert zoo.close(answers, plain(x), 1e-6)
    assert not zoo.close(answers, plain(x), 1e-2)  # control: another draw
    assert not domain.head._forward_pre_hooks


def test_warm_up_trains_the_new_head_alone():
    net = network()
    adapt(net, epochs=0, warm_up=0, name="start")
    found = adapt(net, epochs=0, warm_up=2, name="warm")
    start, warm = (net.domains[n] for n in ("start", "warm"))
    parameters = [dict(d.named_parameters()) for d in (start, warm)]
    assert differing(*parameters) == {"head.weight", "head.bias"}
    assert all(p.requires_grad for p in warm.parameters())
    assert set(found.seconds) == {"choose", "warm-up", "train"}


def test_warm_up_moves_no_answer_of_the_old_task():
    """On a net without norms; running statistics follow the images whatever trains."""
    net = network(norm=False)
    assert adapt(net, epochs=0, warm_up=2).forgetting == {"agreement": 100.0}
    x = batches()[0][0]
    assert torch.equal(with_old_head(net, "new")(x), pristine(net)(x))


@pytest.mark.parametrize("norm", [True, False])
def test_a_fork_at_its_start_agrees_in_everything(norm):
    net = network(norm)
    net.add_domain("new", 3, adapter="own")
    fork_(net, "new")
    assert cn.forgetting(net, "new", batches()) == {"agreement": 100.0}
    x = batches()[0][0]
    assert torch.equal(with_old_head(net, "new")(x), pristine(net)(x))
    with torch.no_grad():
        net.domains["new"].weights["head"].weight.neg_()
    assert cn.forgetting(net, "new", batches())["agreement"] < 60  # control


def test_a_backbone_that_does_more_behind_its_head_is_refused():
    """The answers of its head are not its answers: pooling here, a softmax elsewhere."""
    torch.manual_seed(0)
    net = cn.MultiDomainNetwork(ConvNet(), head="head")
    images = [(torch.randn(4, 3, 6, 6), torch.tensor([0, 1, 0, 1])) for _ in range(2)]
    with pytest.raises(cn.CovNormError, match="layers after its head 'head'"):
        cn.adapt(net, "new", images, method="lwf", progress=False, epochs=1)
    assert "new" not in net.domains


def test_a_second_call_goes_on_with_the_old_head_as_it_was_tuned():
    net = network()
    adapt(net, warm_up=0)
    before = tensors(net.domains["new"])
    assert not torch.equal(before["weights.head.weight"], net.backbone.head.weight)
    adapt(net, warm_up=0, epochs=0)
    assert differing(before, tensors(net.domains["new"])) == set()


# ── what was forgotten ───────────────────────────────────────────────────────────────────────


def test_forgetting_is_counted_image_by_image():
    net = network()
    old_task = [(x, y + 1) for x, y in batches(4, 10, seed=5)]
    found = adapt(net, epochs=6, lr=1e-2, source=old_task).forgetting
    before, after = pristine(net), with_old_head(net, "new")
    same = [
        bool(before(image[None]).argmax() == after(image[None]).argmax())
        for x, _ in batches()
        for image in x
    ]
    right = [
        [int(plain(image[None]).argmax()) == int(label) for x, y in old_task
         for image, label in zip(x, y, strict=True)]
        for plain in (before, after)
    ]  # fmt: skip
    percent = [100 * sum(r) / 40 for r in right]
    assert found["agreement"] == pytest.approx(100 * sum(same) / len(same))
    assert [found["before"], found["after"]] == pytest.approx(percent)
    assert found["forgetting"] == pytest.approx(percent[0] - percent[1])
    assert found == cn.forgetting(net, "new", batches(), old_task)
    assert 0 < found["agreement"] < 100


@pytest.mark.parametrize("training", [True, False])
def test_forgetting_changes_nothing(training):
    net = network()
    adapt(net)
    net.train(training)
    before = tensors(net), {n: m.training for n, m in net.named_modules()}
    cn.forgetting(net, "new", batches(), [(x, y) for x, y in batches(seed=2)])
    assert differing(before[0], tensors(net)) == set()
    assert {n: m.training for n, m in net.named_modules()} == before[1]
    assert not net.domains["new"].head._forward_pre_hooks


@pytest.mark.parametrize("adapter", ["own", "residual"])
def test_a_domain_that_is_no_fork_has_no_old_head_to_ask(adapter):
    net = network()
    net.add_domain("plain", 3, adapter=adapter)
    with pytest.raises(cn.CovNormError, match="plain"):
        cn.forgetting(net, "plain", batches())


def test_no_images_are_no_measurement():
    net = network()
    adapt(net, epochs=1)
    with pytest.raises(cn.CovNormError, match="no images"):
        cn.forgetting(net, "new", [])


# ── beside others ────────────────────────────────────────────────────────────────────────────


def test_the_backbone_and_other_domains_keep_every_bit():
    net = network()
    for kind in ("residual", "own", "mask"):
        zoo.shake_(net.add_domain(kind, 3, adapter=kind))
    net.eval()
    x = batches()[0][0]
    bits, plain = zoo.backbone_bits(net), net.backbone(x)
    states = {n: tensors(d) for n, d in net.domains.items()}
    answers = {n: net(x, domain=n).detach() for n in states}
    adapt(net)
    assert zoo.backbone_bits(net) == bits
    assert torch.equal(net.backbone(x), plain)
    assert all(not p.requires_grad and p.grad is None for p in net.backbone.parameters())
    for name, state in states.items():
        assert differing(state, tensors(net.domains[name])) == set()
        assert torch.equal(net(x, domain=name), answers[name])


@pytest.mark.parametrize("method", ["lwf", "ra"])
def test_running_statistics_that_no_batch_norm_keeps_stay_the_backbones_too(method):
    norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    layers = nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(32, 5)
    net = cn.MultiDomainNetwork(nn.Sequential(*layers))
    bits = zoo.backbone_bits(net)
    images = [(torch.randn(4, 3, 4, 4), torch.tensor([0, 1, 0, 1])) for _ in range(2)]
    cn.adapt(net, "new", images, method=method, progress=False, epochs=1)
    assert zoo.backbone_bits(net) == bits


def test_a_backbone_without_a_head_is_refused_and_left_alone():
    net = cn.MultiDomainNetwork(Net(), head=None)
    with pytest.raises(cn.CovNormError, match="head"):
        adapt(net, classes=3)
    assert list(net.domains) == []
    net.add_domain("new", 3, adapter="own", own=nn.Linear(5, 3))
    with pytest.raises(cn.CovNormError, match="backbone's head, but this backbone has no head"):
        adapt(net)


def test_a_fork_survives_its_files_with_the_old_head(tmp_path):
    net, x = network(), batches()[0][0]
    adapt(net, lr=1e-2)
    folder = net.save_domain("new", tmp_path / "fork")
    other = network()
    loaded = other.load_domain(folder)
    assert differing(tensors(loaded), tensors(net.domains["new"])) == set()
    assert torch.equal(other.eval()(x, domain="new"), net(x, domain="new"))
    found = cn.forgetting(other, "new", batches())
    assert found == cn.forgetting(net, "new", batches())
    assert 0 < found["agreement"] < 100
    assert zoo.close(other.merge("new")(x), net(x, domain="new"), 1e-5)


def test_the_same_seed_gives_the_same_fork_and_a_snapshot_goes_on_to_it(tmp_path):
    plain, again, other = network(), network(), network()
    adapt(plain, seed=1)
    adapt(again, seed=1, snapshot=tmp_path / "run")
    adapt(other, seed=2)
    assert differing(tensors(plain.domains["new"]), tensors(again.domains["new"])) == set()
    assert differing(tensors(plain.domains["new"]), tensors(other.domains["new"])) != set()
    resumed = network()
    adapt(resumed, seed=1, snapshot=tmp_path / "run")
    assert differing(tensors(plain.domains["new"]), tensors(resumed.domains["new"])) == set()
