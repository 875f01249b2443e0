"""`adapt` as its user meets it: what is refused and when, and what an interruption leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_digits import backbone, batches, digits, same, state
from torch.utils.data import DataLoader, TensorDataset

import torch_covnorm as cn
from torch_covnorm import CovNormError


def network():
    return cn.MultiDomainNetwork(backbone())


class Untouchable(list):
    """Batches that nobody may ask for."""

    def __iter__(self):
        raise AssertionError("trained before the settings were checked")


def adapt(net, name="digits", train=None, val=None, **settings):
    settings = {"epochs": 2, "progress": False, **settings}
    train = batches() if train is None else train
    return cn.adapt(net, name, train, batches(40, 20, 100) if val is None else val, **settings)


def stop_in(stage):
    def stop(p):
        if p.stage == stage and p.epoch == 1:
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"method": "covnorm", "variance": 99}, "variance=99"),
        ({"method": "covnorm", "M": "closedform"}, "did you mean 'closed-form'"),
        ({"method": "covnorm", "tune": "W"}, "tune='W'"),
        ({"method": "covnorm", "preset": "papers"}, "did you mean 'paper'"),
        ({"method": "svd", "rank": 2.0}, "rank=2.0"),
        ({"method": "svd", "adapter": "mask"}, "adapter='mask'"),
        ({"method": "covnorm-joint", "count": "pixels"}, "count='pixels'"),
        ({"method": "covnorm", "varience": 0.9}, "did you mean 'variance'"),
        ({"method": "covnrom"}, "did you mean 'covnorm'"),
        ({"method": "ra", "start": "x"}, "does not start from a trained A"),
        ({"method": "svd", "start": "x"}, "unknown domain 'x'"),
        ({"method": "covnorm", "ranks": {"nowhere": (1, 1)}}, "site 'nowhere'"),
        ({"method": "covnorm", "ranks": {"0": 3}}, "give \\(kx, ky\\)"),
        ({"method": "covnorm-joint", "basis": "No Name"}, "No Name"),
        ({"method": "ra", "training": "decathlom"}, "did you mean 'decathlon'"),
    ],
)
def test_bad_settings_are_refused_before_anything_trains(settings, word, tmp_path):
    net = network()
    with pytest.raises(CovNormError, match=word):
        adapt(net, train=Untouchable(), classes=10, **settings)
    assert not list(net.domains)
    settings |= {"snapshot": tmp_path / "run"}
    with pytest.raises(CovNormError, match=word):
        adapt(net, train=Untouchable(), classes=10, **settings)


def test_a_basis_that_is_taken_is_refused_before_anything_trains():
    net = network()
    adapt(net, "a", method="ra")
    adapt(net, ["b"], [batches()], [batches(40, 20, 100)], method="joint-svd", start=["a"])
    with pytest.raises(CovNormError, match="'joint-svd' already exists"):
        adapt(net, "c", train=Untouchable(), classes=10, method="joint-svd")
    adapt(net, "d", method="covnorm-joint", start="a", variance=0.9)
    with pytest.raises(CovNormError, match=r"has variance=0\.9"):
        adapt(net, "e", Untouchable(), classes=10, method="covnorm-joint", variance=0.99)


@pytest.mark.parametrize("method", ["covnorm", "svd-fta", "pca-fta"])
def test_interrupted_while_it_tunes_an_existing_domain_is_as_it_was(method):
    net = network()
    adapt(net, method="ra")
    before, moments = state(net), cn.collect(net, "digits", batches())
    with pytest.raises(KeyboardInterrupt):
        adapt(net, method=method, progress=stop_in("tune"), tuning={"epochs": 2})
    assert same(state(net), before)
    again = cn.collect(net, "digits", batches())
    assert all(torch.equal(m.covariance, again[s].covariance) for s, m in moments.items())


def test_interrupted_a_packed_mask_is_packed_again_as_it_was():
    net = network()
    adapt(net, method="piggyback", lr=3e-3)
    before = state(net)
    with pytest.raises(KeyboardInterrupt):
        adapt(net, method="piggyback", lr=1e-2, progress=stop_in("train"))
    assert same(state(net), before)


def test_a_loader_with_its_own_generator_resumes_between_stages_to_the_same_bits(tmp_path):
    def loader():
        generator = torch.Generator().manual_seed(5)
        return DataLoader(TensorDataset(*digits()), 20, shuffle=True, generator=generator)

    def stop(p):
        if p.stage == "tune":
            raise KeyboardInterrupt

    whole, settings = network(), {"method": "covnorm", "snapshot": tmp_path / "run"}
    adapt(whole, train=loader(), method="covnorm")
    with pytest.raises(KeyboardInterrupt):
        adapt(network(), train=loader(), progress=stop, **settings)
    net = network()
    adapt(net, train=loader(), **settings)
    assert same(state(net), state(whole))


def test_other_domains_answer_as_ever_while_one_trains():
    for method in ("ra", "lwf"):
        net = network()
        net.add_domain("other", 3)
        net.eval()
        x = digits(30)[0]
        with torch.no_grad():
            answer, before = net(x, domain="other"), state(net, "other")

        def ask(_, net=net, x=x, answer=answer):
            with torch.no_grad():
                assert torch.equal(net(x, domain="other"), answer)

        adapt(net, method=method, progress=ask)
        assert same(state(net, "other"), before)


def test_a_class_of_torchs_optimisers_gets_the_rate():
    results, fixed = [], {"training": "default", "schedule": "constant", "weight_decay": 0.0}
    for optimizer in (torch.optim.SGD, lambda groups: torch.optim.SGD(groups, lr=0.5)):
        net = network()
        settings = {**fixed, "lr": 0.5}
        adapt(net, method="ra", optimizer=optimizer, **settings)
        results.append(state(net))
    assert same(*results)
    net = network()
    adapt(net, method="ra", optimizer=torch.optim.SGD, lr=0.1, **fixed)
    assert not same(state(net), results[0]), "control: another rate"


def test_tuning_scales_the_milestones_with_the_epochs():
    from torch_covnorm.methods.settings import configure

    config = configure("covnorm", training="decathlon")
    assert (config.training.epochs, config.training.milestones) == (120, (80, 100))
    assert (config.tuning.epochs, config.tuning.milestones) == (60, (40, 50))
    assert configure("covnorm", {"epochs": 0}, training="decathlon").tuning.epochs == 0


def test_labels_may_be_lists_arrays_and_small_integers():
    results = []
    for kind in (lambda y: y, lambda y: y.tolist(), np.asarray, lambda y: y.int()):
        net = network()
        adapt(net, train=[(x, kind(y)) for x, y in batches()], method="ra")
        results.append(state(net))
    assert all(same(r, results[0]) for r in results)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "covnorm", "M": "none"}, "M='none'"),  # joint mode has it
        ({"method": "pca-fta", "M": "none"}, "has no setting M="),
        ({"method": "svd", "rank": None}, "rank=None"),
        ({"method": "svd", "rank": True}, "rank=True"),
    ],
)
def test_what_would_fail_after_training_is_refused_before(settings, message):
    net, steps = network(), []
    with pytest.raises(CovNormError, match=message):
        adapt(net, progress=steps.append, **settings)
    assert not net.domains
    assert not steps, "nothing has trained"


def test_a_label_that_the_head_cannot_answer_is_named():
    with pytest.raises(
        CovNormError, match="label 9 is out of range, because its head has 4 classes"
    ):
        adapt(network(), method="ra", classes=4)
    net = network()
    few = [(x, y % 3) for x, y in batches()]
    adapt(net, train=few, method="ra")
    assert len(net.domain("digits").classes) == 10, "validation shows more than training"


def test_classes_that_differ_from_the_domains_are_refused():
    net = network()
    adapt(net, "a", method="ra")
    for name, settings in (("a", {"method": "ra"}), ("b", {"method": "svd", "start": "a"})):
        with pytest.raises(CovNormError, match="already has 10"):
            adapt(net, name, classes=20, **settings)
    assert list(net.domains) == ["a"]


def test_a_start_that_was_trained_anew_refuses_the_old_snapshot(tmp_path):
    net, settings = network(), {"method": "svd-fta", "start": "a", "snapshot": tmp_path}
    adapt(net, "a", method="ra")
    adapt(net, "b", **settings)
    net.remove_domain("b")
    adapt(net, "a", method="ra", seed=1)
    with pytest.raises(CovNormError, match="start's A"):
        adapt(net, "b", **settings)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_packed_mask_trains_on_in_the_networks_dtype(dtype):
    net = cn.MultiDomainNetwork(backbone().to(dtype))
    train = [(x.to(dtype), y) for x, y in batches()]
    for _ in range(2):
        adapt(net, train=train, val=train, method="piggyback", epochs=1)


def test_several_domains_need_a_loader_each():
    loader = DataLoader(TensorDataset(*digits()), 20)
    with pytest.raises(CovNormError, match="'a': got DataLoader with nothing for it"):
        cn.adapt(network(), ["a", "b"], loader, method="covnorm-joint")
    with pytest.raises(CovNormError, match="takes one domain"):
        cn.adapt(network(), ["a", "b"], [loader, loader], method="ra")


def test_a_name_that_is_no_name_writes_nothing(tmp_path):
    with pytest.raises(CovNormError, match="zz"):
        adapt(network(), ["../zz"], [batches()], method="covnorm-joint", snapshot=tmp_path / "in")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("adapter", ["parallel", "conv"])
def test_an_existing_untrained_domain_is_trained_first_whatever_its_kind(adapter):
    net = network()
    net.add_domain("digits", 10, adapter)
    found = adapt(net, method="covnorm", variance=0.9)
    assert {"train", "tune"} <= set(found.seconds)
    assert {a.kind for _, a in net.domain("digits").adapters.items()} == {adapter}
