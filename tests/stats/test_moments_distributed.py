"""Guarantee 5: over gloo ranks with uneven shards, the moments of one process."""

import os

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from torch_covnorm import GradientMoments, Moments

# Rows of each rank: uneven, one rank with none, one with a single row.
SHARDS = {1: [530], 2: [530, 0], 4: [1, 402, 0, 127]}
D = 11


def shards(world):
    g = torch.Generator().manual_seed(world)
    x = 1e3 + torch.randn(530, D, generator=g, dtype=torch.float64)
    x *= torch.linspace(1, 3, 530)[:, None]  # ranks see different data: their means are far apart
    return list(x.split(SHARDS[world]))


def worker(rank, world, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        pairs = [dist.new_group([r, r + 1]) for r in range(0, world - 1, 2)]
        own = shards(world)[rank]
        answers = {
            "all": Moments(D).update(own).all_reduce_(),
            "none": Moments(D).all_reduce_(),  # no rank has a row
        }
        if pairs:  # ranks 0, 1 among themselves, and 2, 3
            answers["pair"] = Moments(D).update(own).all_reduce_(pairs[rank // 2])
        answers["gradients"] = GradientMoments(D)
        answers["gradients"].update(own, spatial=False)
        answers["gradients"].all_reduce_()
        for name, moments in answers.items():
            safetensors.torch.save_file(moments.state_dict(), f"{folder}/{name}{rank}.safetensors")
    finally:
        dist.destroy_process_group()


def loaded(file):
    moments = Moments(D)
    moments.load_state_dict(safetensors.torch.load_file(file))
    return moments


def gap(a, b):
    """The larger of the relative differences of mean and covariance."""
    mean = (a.mean - b.mean).abs().max() / b.mean.abs().max()
    covariance = (a.covariance - b.covariance).abs().max() / b.covariance.abs().max()
    return float(max(mean, covariance))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.slow
def test_uneven_shards_over_gloo_ranks_give_the_moments_of_one_process(world, tmp_path):
    mp.spawn(worker, (world, str(tmp_path)), nprocs=world)
    single = Moments(D).update(torch.cat(shards(world)))
    first = loaded(tmp_path / "all0.safetensors")
    for rank in range(world):
        moments = loaded(tmp_path / f"all{rank}.safetensors")
        assert moments.n == 530
        assert gap(moments, single) <= 1e-12
        assert gap(moments, first) == 0, "every rank holds the same answer"
        empty = loaded(tmp_path / f"none{rank}.safetensors")
        assert empty.n == 0
        assert not empty.mean.any()
        assert not empty.covariance.any()
        if world > 1:  # a group of some ranks: their rows only
            two = Moments(D).update(torch.cat(shards(world)[rank // 2 * 2 :][:2]))
            pair = loaded(tmp_path / f"pair{rank}.safetensors")
            assert pair.n == two.n
            assert gap(pair, two) <= 1e-12

        felt = GradientMoments(D)
        felt.load_state_dict(safetensors.torch.load_file(tmp_path / f"gradients{rank}.safetensors"))
        x = torch.cat(shards(world))
        assert felt.images == 530
        torch.testing.assert_close(felt.second(), x.T @ x / 530, rtol=1e-12, atol=0)


def test_averaging_the_covariances_of_the_ranks_is_wrong():
    """Negative control: these shards are such that the shortcuts fail, even weighted by rows."""
    single = Moments(D).update(torch.cat(shards(4)))
    parts = [Moments(D).update(shard) for shard in shards(4)]
    plain = torch.stack([p.covariance for p in parts]).mean(0)
    weighted = torch.stack([p.n / 530 * p.covariance for p in parts]).sum(0)
    for wrong in (plain, weighted):
        assert (wrong - single.covariance).abs().max() > 0.01 * single.covariance.abs().max()
