"""Training in a process group of two real processes over gloo."""

from __future__ import annotations

import os

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_covnorm as cn


def network():
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU())
    net = cn.MultiDomainNetwork(
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    )
    net.add_domain("a", classes=3)
    net.add_domain("other", classes=2)
    return net


def shard(rank):
    g = torch.Generator().manual_seed(rank)
    return [(torch.randn(6, 3, 10, 10, generator=g), torch.arange(6) % 3)]


def refusal(function, *args, **kwargs) -> str:
    try:
        function(*args, **kwargs)
    except cn.CovNormError as error:
        return str(error)
    return "not refused"


def worker(rank, world, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        net = network()
        before = {k: v.clone() for k, v in net.state_dict().items()}
        said = [
            refusal(cn.fit, net, "a", shard(rank), epochs=1),
            refusal(cn.adapt, net, "new", shard(rank), classes=3, epochs=1),
        ]
        if world == 1:
            assert said == ["not refused"] * 2
            return
        for name, message in zip(("cn.fit", "cn.adapt"), said, strict=True):
            assert message.startswith(f"{name} in a process group of 2 processes")
            assert "DistributedDataParallel" in message
        assert "new" not in net.domains
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())

        # What the message names: an own loop, and moments that are exact over all processes.
        parallel = DistributedDataParallel(net, find_unused_parameters=True)
        optimizer = torch.optim.SGD(net.parameters_of("a"), lr=0.1)
        for images, labels in shard(rank) * 2:
            optimizer.zero_grad()
            nn.functional.cross_entropy(parallel(images, domain="a"), labels).backward()
            optimizer.step()
        moments = cn.collect(net, "a", shard(rank))
        for m in moments.values():
            m.all_reduce_()
        cn.normalize_(net, "a", moments, variance=0.9)
        state = {k: v.contiguous() for k, v in net.domain("a").state_dict().items()}
        safetensors.torch.save_file(state, f"{folder}/{rank}.safetensors")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_fit_and_adapt_refuse_two_processes_and_the_remedy_works(tmp_path):
    mp.spawn(worker, (2, str(tmp_path)), nprocs=2)
    first, second = (safetensors.torch.load_file(tmp_path / f"{r}.safetensors") for r in (0, 1))
    running = ("running_mean", "running_var")  # of the batches that a process saw
    for key, value in first.items():
        assert key.endswith(running) or torch.equal(value, second[key]), key


@pytest.mark.slow
def test_a_process_group_of_one_process_trains(tmp_path):
    mp.spawn(worker, (1, str(tmp_path)), nprocs=1)
