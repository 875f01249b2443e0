"""timm in a fresh process, beside any torchvision, and names on a hub that is not there."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

import torch_covnorm as cn
from torch_covnorm.backbones import timm_models

SCRIPT = """
import warnings
warnings.simplefilter("error")
import torch, torch_covnorm as cn
net = cn.load_backbone("resnet18", weights="random")
assert net.preprocessing["mean"] == [0.485, 0.456, 0.406]
assert net(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
import torchvision.ops
print("timm works")
"""
CONTROL = "import torchvision"


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)


@pytest.mark.slow
def test_timm_works_in_a_fresh_process():
    done = run("-c", SCRIPT)
    assert done.stdout.strip() == "timm works", done.stderr


@pytest.mark.slow
def test_init_takes_a_timm_name_in_a_fresh_process(tmp_path):
    words = ("-m", "torch_covnorm", "init", tmp_path / "house", "--backbone", "resnet10t")
    done = run(*words, "--weights", "random", "--json")
    assert done.returncode == 0, done.stderr
    verified = run("-m", "torch_covnorm", "verify", "--ecology", tmp_path / "house")
    assert verified.returncode == 0, verified.stderr


@pytest.mark.slow
def test_nothing_is_declared_where_torchvision_works():
    """The shim is for one reason of failure only."""
    broken = run("-c", CONTROL).returncode != 0
    timm_models.import_timm()
    assert bool(timm_models._operators) == broken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raises", "message"),
    [
        ("RuntimeError('something else is broken')", "something else is broken"),
        ("RuntimeError('operator torchvision::nms does not exist')", "torchvision that fits torch"),
    ],
)
def test_another_failure_of_torchvision_is_not_hidden(raises, message, tmp_path):
    for name in ("timm", "torchvision"):
        (tmp_path / f"{name}.py").write_text(f"raise {raises}")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch_covnorm as cn\n"
    code += "try: cn.load_backbone('resnet18', 'random')\nexcept cn.CovNormError as e: print(e)"
    done = run("-c", code)
    assert message in done.stdout, done.stderr


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """A hub that refuses connections, and an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    timm_models.import_timm()  # takes seconds, once
    return constants


@pytest.mark.parametrize("weights", [None, "random"])
def test_a_hub_that_cannot_be_reached_is_an_error_with_the_remedy_at_once(no_hub, weights):
    start = time.perf_counter()
    with pytest.raises(cn.CovNormError, match=r"cannot be loaded from the hub \(.*weights=FILE"):
        cn.load_backbone("hf-hub:timm/resnet18.a1_in1k", weights)
    assert time.perf_counter() - start < 10  # its client's retries take 23 s
    assert not no_hub.HF_HUB_OFFLINE  # as it was


def test_pretrained_weights_without_a_hub_are_an_error_with_the_remedy(no_hub):
    with pytest.raises(cn.CovNormError, match=r"no timm weights for 'resnet10t'.*weights=FILE"):
        cn.load_backbone("resnet10t")


def test_a_hub_that_can_be_reached_is_asked(monkeypatch):
    """Control: only a refused connection sets the client offline."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        assert timm_models._reachable(f"http://127.0.0.1:{hub.getsockname()[1]}")
    monkeypatch.delenv("http_proxy", raising=False)
    assert not timm_models._reachable("http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert timm_models._reachable("http://127.0.0.1:9")  # a proxy decides
