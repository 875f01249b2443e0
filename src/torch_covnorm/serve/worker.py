"""The process that computes: the network and the domains in memory, and nothing of HTTP.

It does what the pipe says, each message a tuple whose first word is a command, and answers over the
same pipe. Domains load in threads of their own, so that a load never stands before a batch.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.loader import as_input
from ..ecology import Ecology
from ..ecology.prediction import preprocessing
from ..errors import CovNormError
from ..network.network import MultiDomainNetwork
from .catalog import version_of
from .guess import Guesser
from .upload import keep

LOADERS = 4  # threads that load domains

# An answer to one image: [(label, probability)], best first; or whose fault it is that there is
# none ("broken": the domain's, "failed": ours), and why.
Fault = tuple[str, str]
Answer = list[tuple[str, float]] | Fault


def main(pipe: Connection, folder: str, threads: int) -> None:
    """Until the pipe says "stop", or its other end is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server says when to stop
        signal.signal(number, signal.SIG_IGN)
    if threads:
        torch.set_num_threads(threads)
    try:
        worker = Worker(pipe, Ecology(folder))
    except CovNormError as error:  # the store was damaged since the server began
        pipe.send(("unfit", str(error)))
        return
    worker.run()


class Worker:
    """One network, the messages that reach it, and the threads that serve them."""

    def __init__(self, pipe: Connection, ecology: Ecology) -> None:
        self.pipe, self.ecology = pipe, ecology
        self.net = ecology.network().eval()
        self.how = ecology.backbone["preprocessing"]
        self._side = 64  # of the probe's image
        self.guesser = Guesser(ecology)
        self._sending, self._basis = threading.Lock(), threading.Lock()
        self._shared: dict[str, str] = {}  # {domain: its basis}
        self._work: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._loaders = ThreadPoolExecutor(LOADERS, "load")

    def run(self) -> None:
        """Take messages in; batches are computed one after the other in a thread."""
        computing = threading.Thread(target=self._compute, daemon=True)
        computing.start()
        self.send("started", os.getpid())
        while True:
            try:
                message = self.pipe.recv()
            except (EOFError, OSError):  # the server is gone: so is the need for us
                os._exit(0)
            word, *rest = message
            if word == "stop":
                self._work.put(None)
                computing.join()
                self._loaders.shutdown(cancel_futures=True)
                return
            if word == "load":
                self._loaders.submit(self._load, *rest)
            elif word == "drop":
                self._drop(*rest)
            elif word == "keep":
                self._loaders.submit(self._beside, self._keep, *rest)
            elif word == "learn":
                self._loaders.submit(self._beside, self.guesser.learn, *rest)
            else:
                self._work.put(message)

    def send(self, *message: Any) -> None:
        """Tell the server."""
        with self._sending:
            self.pipe.send(message)

    # ── batches ──────────────────────────────────────────────────────────────────────────────

    def _compute(self) -> None:
        does: dict[str, Callable[..., Any]] = {
            "batch": self._batch,
            "probe": self._probe,
            "guess": self.guesser.guess,
        }
        while (message := self._work.get()) is not None:
            word, number, *rest = message
            start = time.perf_counter()
            try:
                answer = does[word](*rest)
            except Exception as error:  # a worker that dies of one request serves nobody
                answer = self._fault(error)
            self.send("did", number, answer, time.perf_counter() - start)

    @torch.no_grad()
    def _batch(self, domains: list[str], images: np.ndarray, tops: list[int]) -> list[Answer]:
        """Answers to images (n, 3, s, s), each of its domain; what fails, fails alone."""
        x = torch.from_numpy(images)
        try:
            return self._answers(domains, x, tops)
        except Exception:
            found: list[Answer] = []
            for i, domain in enumerate(domains):
                try:
                    found += self._answers([domain], x[i : i + 1], tops[i : i + 1])
                except Exception as error:
                    found.append(self._fault(error))
            return found

    def _answers(self, domains: list[str], x: Tensor, tops: list[int]) -> list[Answer]:
        inputs = self._inputs(domains, x)
        one = len(set(domains)) == 1
        out: Sequence[Tensor] = self.net(inputs, domain=domains[0] if one else domains)
        found: list[Answer] = []
        for domain, row, top in zip(domains, out, tops, strict=True):
            chances = row.float().softmax(0)
            if not chances.isfinite().all():
                found.append(("broken", "its answers are no numbers: train it anew"))
                continue
            best = chances.topk(min(top, len(chances)))
            names = self.net.domain(domain).classes or [str(i) for i in range(len(chances))]
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            found.append([(names[i], p) for i, p in pairs])
        return found

    def _inputs(self, domains: list[str], x: Tensor) -> Tensor:
        """As each domain reads them; all of one backbone do alike, as a rule."""
        hows = {d: preprocessing(self.net, d) for d in dict.fromkeys(domains)}
        first = hows[domains[0]]
        if all((h["mean"], h["std"]) == (first["mean"], first["std"]) for h in hows.values()):
            return as_input(x, first)
        parts = [as_input(x[i : i + 1], hows[d]) for i, d in enumerate(domains)]
        return torch.cat(parts)

    def _probe(self) -> bool:
        """A real forward pass of the backbone, and finite answers."""
        try:
            return self._runs(self._side)
        except Exception:
            if self._side == self.how["size"]:
                raise
            self._side = self.how["size"]  # some networks take no other
            return self._runs(self._side)

    @torch.no_grad()
    def _runs(self, side: int) -> bool:
        x = as_input(torch.zeros(1, 3, side, side, dtype=torch.uint8), self.how)
        backbone: nn.Module = self.net.backbone
        return bool(torch.as_tensor(backbone(x)).isfinite().all())

    # ── domains ──────────────────────────────────────────────────────────────────────────────

    def _load(self, name: str, version: str) -> None:
        """Exactly this version, or none: "changed" where the store has another by now."""
        start = time.perf_counter()
        try:
            shares = self.ecology.entry(name).basis is not None
            with self._basis if shares else contextlib.nullcontext():
                size = self._put(name, version, self._empty(shares))
        except Exception as error:  # whatever its files do, the others are served
            if self._changed(name, version):
                self.send("changed", name)
            else:
                self.send("failed", name, self._fault(error)[1])
        else:
            self.send("loaded", name, size, time.perf_counter() - start)

    def _put(self, name: str, version: str, beside: MultiDomainNetwork) -> int:
        """Read a domain beside the network and, if all is well, put it there; its bytes."""
        domain = self.ecology.load(beside, name).eval()
        beside.prepare_(name, only=True)
        if self._changed(name, version):
            raise CovNormError(f"domain {name!r} was changed meanwhile")
        for basis, shared in beside.bases.items():
            self.net.bases[basis] = shared
        if domain.basis is not None:
            self._shared[name] = domain.basis
        self.net.domains[name] = domain
        return domain.bytes

    def _empty(self, shares: bool) -> MultiDomainNetwork:
        """The same backbone without domains: a load goes on there, the network that computes and
        the other loads see nothing of it until it is whole."""
        bases = {}
        if shares:
            self._sweep()
            bases = dict(self.net.bases.items())
        return self.net.without_domains(bases)

    def _changed(self, name: str, version: str) -> bool:
        """Whether the store has another version; a manifest that cannot be read says nothing."""
        try:
            there = name in self.ecology.domains
            return not there or version_of(self.ecology, name) != version
        except CovNormError:
            return False

    def _drop(self, name: str) -> None:
        if name in self.net.domains:
            self.net.remove_domain(name)
            if self._shared.pop(name, None) is not None:
                self._loaders.submit(self._sweep_alone)

    def _sweep_alone(self) -> None:
        with self._basis:
            self._sweep()

    def _sweep(self) -> None:
        """Forget the bases that no domain shares any more; nobody may load one meanwhile."""
        used = set(self._shared.values())
        for basis in set(self.net.bases) - used:
            del self.net.bases[basis]

    def _keep(self, name: str, folder: str, replace: bool) -> None:
        keep(self.ecology, name, Path(folder), replace)

    def _beside(self, does: Callable[..., Any], number: int, *rest: Any) -> None:
        try:
            answer = does(*rest)
        except Exception as error:
            answer = self._fault(error)
        self.send("did", number, answer, 0.0)

    def _fault(self, error: Exception) -> Fault:
        """Whose it is, and why; where the store is, is nobody's business."""
        said = str(error).replace(f"{self.ecology.folder}/", "")
        if isinstance(error, CovNormError):
            return "broken", said
        return "failed", f"{type(error).__name__}: {said}"
