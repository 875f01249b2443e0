"""`gc`, `purge` and what they count: versions, unfinished work, decoded images."""

from __future__ import annotations

import contextlib
import multiprocessing
from pathlib import Path

import pytest
import small_ecology as small
import torch
from command import npz

import torch_covnorm as cn
from torch_covnorm.data import read_source
from torch_covnorm.data.cache import cache_in_use
from torch_covnorm.data.images import WHITE
from torch_covnorm.ecology import Details, Ecology, verify
from torch_covnorm.ecology.cleaning import collect_garbage, purge
from torch_covnorm.ecology.images import decode_for
from torch_covnorm.ecology.space import space
from torch_covnorm.ecology.work import workplace


@pytest.fixture
def ecology(tmp_path):
    return Ecology.create(tmp_path / "house", small.backbone())


def unfinished(ecology, name, n=1000):
    """Leave work behind as a killed `add` does."""
    with contextlib.suppress(KeyboardInterrupt), workplace(ecology.workplace(name), "", False) as w:
        (w / "train").mkdir(parents=True)
        (w / "train" / "snapshot.json").write_bytes(b"x" * n)
        raise KeyboardInterrupt
    return ecology.workplace(name)


def with_images(ecology, name, file):
    """Put a domain whose images are in the cache."""
    source = read_source(npz(file, 20, 10))
    decode_for(ecology, source, size=8)
    net = small.network(name)
    inputs = {"size": 8, "mean": [0] * 3, "std": [1] * 3, "fit": "squash", "background": WHITE}
    net.domain(name).preprocessing = inputs
    where = {"path": str(file), "seed": 0}
    ecology.put(net, {name: Details(small.facts(source=where))})


def cached(ecology):
    folder = ecology.folder / "cache"
    return {f.name: f.stat().st_size for f in folder.glob("*.npy")}


def everything(folder):
    return {str(f): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_gc_frees_each_kind_and_says_how_much(ecology, tmp_path):
    with_images(ecology, "digits", tmp_path / "digits.npz")
    for seed in range(3):
        small.put(ecology, "flowers", seed=seed, replace=True)
    small.put(ecology, "going")
    ecology.remove(["going"])
    work = unfinished(ecology, "interrupted")
    answers = small.answers(ecology, "flowers")
    before, images = everything(ecology.folder), cached(ecology)
    assert images
    dry = collect_garbage(ecology, dry_run=True)
    assert everything(ecology.folder) == before
    done = collect_garbage(ecology)
    assert done == {**dry, "dry_run": False}
    assert done["freed"]["work"] == 1000
    assert done["freed"]["versions"] > 0
    assert done["freed"]["cache"] == 0
    assert not work.exists()
    assert set(ecology.versions) == {"flowers"}, "those of domains that are there stay"
    assert cached(ecology) == images
    done = collect_garbage(ecology, keep=0, cache=True)
    assert done["freed"]["cache"] == sum(images.values())
    assert done["freed"]["versions"] > 0
    assert done["total"] == sum(done["freed"].values())
    assert ecology.versions == cached(ecology) == {}
    assert collect_garbage(ecology, keep=0, cache=True)["total"] == 0
    assert small.answers(ecology, "flowers") == answers
    assert verify(ecology.folder) == []
    small.assert_tidy(ecology.folder)


def _hold(kind: str, folder: Path, pipe) -> None:
    ecology = Ecology(folder)
    place = workplace(ecology.workplace("running"), "", False)
    with place if kind == "work" else cache_in_use(folder / "cache"):
        if kind == "work":
            ecology.workplace("running").mkdir()
            (ecology.workplace("running") / "snapshot").write_bytes(b"x" * 10)
        pipe.send("held")
        pipe.recv()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["work", "cache"])
def test_what_another_process_uses_is_left_alone_and_named(ecology, tmp_path, kind):
    with_images(ecology, "digits", tmp_path / "digits.npz")
    context = multiprocessing.get_context("forkserver")
    mine, other = context.Pipe()
    process = context.Process(target=_hold, args=(kind, ecology.folder, other))
    process.start()
    try:
        assert mine.poll(60)
        assert mine.recv() == "held"
        before = everything(ecology.folder)
        for dry_run in (True, False):
            done = collect_garbage(ecology, cache=kind == "cache", dry_run=dry_run)
            assert done["in_use"] == [{"work": "work on running", "cache": "cache"}[kind]]
            assert done["freed"][kind] == 0
        after = everything(ecology.folder)
        assert {k for k in before if k not in after} == set()
        if kind == "work":
            small.put(ecology, "running")
            with pytest.raises(cn.CovNormError, match="another process is adding domain 'running'"):
                purge(ecology, ["running"])
            assert "running" in ecology.domains
    finally:
        mine.send("end")
        process.join(60)
    assert collect_garbage(ecology, cache=True)["in_use"] == []


def test_purge_deletes_versions_work_and_images_of_one_domain_only(ecology, tmp_path):
    for name in ("digits", "others"):
        with_images(ecology, name, tmp_path / f"{name}.npz")
    both = cached(ecology)
    small.put(ecology, "digits", seed=1, replace=True)  # its images are those of a version now
    small.put(ecology, "others", seed=1, replace=True)
    places = [unfinished(ecology, name) for name in ("digits", "others")]
    others = small.answers(ecology, "others")
    purge(ecology, ["digits"])
    assert list(ecology.domains) == list(ecology.versions) == ["others"]
    assert [place.exists() for place in places] == [False, True]
    left = cached(ecology)
    assert 0 < len(left) < len(both)
    source = read_source(tmp_path / "others.npz")
    decode_for(ecology, source, size=8)
    assert cached(ecology) == left, "those of the other domain are still there"
    assert small.answers(ecology, "others") == others
    small.assert_tidy(ecology.folder)
    with pytest.raises(cn.CovNormError, match="unknown domain 'digits'"):
        purge(ecology, ["digits"])


def test_purge_goes_on_where_the_images_are_gone(ecology, tmp_path):
    with_images(ecology, "digits", tmp_path / "digits.npz")
    (tmp_path / "digits.npz").unlink()
    purge(ecology, ["digits"])
    assert ecology.domains == {}
    assert cached(ecology), "nobody knows whose they are: gc --cache frees them"


# ── what takes space ──────────────────────────────────────────────────────────────────────────


def test_space_tells_served_kept_work_and_cache_apart_and_counts_every_byte(ecology, tmp_path):
    with_images(ecology, "digits", tmp_path / "digits.npz")
    small.share(ecology, "a", "b")
    net = small.network("flowers", "trained")
    torch.manual_seed(0)
    moments = cn.collect(net, "flowers", [torch.randn(8, 3, 8, 8)])
    whole = Details(small.facts(), moments, net.domain("trained"), {"000": b"PNG"})
    ecology.put(net, {"flowers": whole})
    first = space(ecology)
    assert first.kept["versions"] == first.work == 0
    sizes = {part: ecology.blobs.size(b) for part, b in ecology.entry("flowers").blobs.items()}
    assert first.kept_of["flowers"] == {
        "trained": sizes["trained.record"] + sizes["trained.tensors"],
        "moments": sizes["moments"],
        "examples": sizes["examples"],
        "details": sizes["details"],
        "versions": 0,
    }
    bases = ecology.bases["joint"]
    shared = sum(ecology.blobs.size(bases[part]) for part in ("record", "tensors"))
    assert first.served <= sum(e.bytes for e in ecology.domains.values()) + shared
    assert first.served > shared
    small.put(ecology, "flowers", seed=1, replace=True)
    ecology.remove(["a"])
    unfinished(ecology, "interrupted")
    now = space(ecology)
    used = ecology.blobs.sizes()
    assert now.served + sum(now.kept.values()) == sum(used.values())
    assert now.kept_of["flowers"]["trained"] == 0
    assert now.kept_of["flowers"]["versions"] >= sizes["trained.tensors"] + sizes["moments"]
    assert now.kept_of["a"]["versions"] > 0
    assert now.kept_of["b"]["versions"] == 0
    assert now.work == 1000
    assert now.cache == sum(cached(ecology).values()) > 0
