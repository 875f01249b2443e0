"""`--device` with a device that is not there says what is missing, in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from torch_covnorm import CovNormError
from torch_covnorm.cli.device import check_device


def says(device: str, tmp_path) -> str:
    """What the command says in a process of its own."""
    words = ("-m", "torch_covnorm", "bench", "--device", device)
    ran = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.count("\n") == 1
    return ran.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_cuda_on_a_build_without_it_says_which_build_to_install(tmp_path):
    said = says("cuda", tmp_path)
    assert f"--device cuda: this build of torch ({torch.__version__}) has no CUDA" in said
    assert "pytorch.org" in said
    assert "--device cpu" in said


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.mps.is_built(), reason="this torch has MPS")
def test_mps_elsewhere_than_on_a_mac_says_so(tmp_path):
    said = says("mps", tmp_path)
    assert "has no MPS" in said
    assert "Apple silicon" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_says_what_to_check(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")  # as in a build with CUDA
    with pytest.raises(CovNormError, match=r"has CUDA 12\.8, but finds no GPU.*nvidia-smi.*driver"):
        check_device("cuda")


def test_a_gpu_that_the_machine_does_not_have_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(CovNormError, match=r"cuda:5: this machine has 2 GPUs\. Choose cuda:0 to"):
        check_device("cuda:5")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "xpu", "meta"])
def test_an_unknown_device_lists_those_that_exist(name):
    with pytest.raises(CovNormError, match=r"unknown device. Choose cpu, cuda, cuda:N or mps"):
        check_device(name)


def test_the_cpu_is_a_device():
    check_device("cpu")
