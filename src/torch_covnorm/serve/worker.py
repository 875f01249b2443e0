"""The process that computes: the network and the domains in its memory. It knows nothing of HTTP.

Messages from the server are tuples: ("stop",), ("drop", domain), or (word, number, *arguments), to
which the reply is ("result", number, value, seconds). If something failed, the value is the error.
Domains load in threads, so that a load never delays a batch.
"""

from __future__ import annotations

import contextlib
import os
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
from torch import Tensor

from ..data.loader import as_input
from ..ecology import Ecology
from ..ecology.prediction import preprocessing
from ..errors import CovNormError
from .catalog import version_of
from .errors import DomainChanged, RequestError, broken_domain, without_paths
from .guess import Guesser
from .upload import store_upload

THREADS = 4  # that load domains, and do everything else beside the network
PROBE_SIZE = 64  # side of the probe's image

Result = list[dict[str, Any]] | RequestError  # [{"label", "probability"}], best first


def main(pipe: Connection, folder: str, trust_code: bool, threads: int) -> None:
    """Run until the pipe says "stop" or its other end closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when to stop
        signal.signal(number, signal.SIG_IGN)
    if threads:  # 0: as OMP_NUM_THREADS says
        torch.set_num_threads(threads)
    try:
        worker = Worker(pipe, Ecology(folder, trust_code))
    except CovNormError as error:  # the store was damaged after the server started
        pipe.send(("unfit", str(error)))
        return
    worker.run()


class Worker:
    """One network, the messages for it, and the threads that handle them."""

    def __init__(self, pipe: Connection, ecology: Ecology) -> None:
        self.pipe, self.ecology = pipe, ecology
        self.net = ecology.network().eval()
        self.preprocessing = ecology.backbone["preprocessing"]
        self.guesser = Guesser(ecology)
        self._probe_size = PROBE_SIZE
        self._pipe_lock, self._basis_lock = threading.Lock(), threading.RLock()
        self._basis_of: dict[str, str] = {}  # {domain: its shared basis}
        self._compute = ThreadPoolExecutor(1, "compute")  # one after the other
        self._background = ThreadPoolExecutor(THREADS, "background")

    def run(self) -> None:
        """Handle messages."""
        handlers: dict[str, tuple[ThreadPoolExecutor, Callable[..., Any]]] = {
            "batch": (self._compute, self._batch),
            "probe": (self._compute, self._probe),
            "guess": (self._compute, self.guesser.guess),
            "load": (self._background, self._load),
            "store": (self._background, self._store),
            "learn": (self._background, self.guesser.learn),
        }
        self.send("started", os.getpid())
        while True:
            try:
                word, *rest = self.pipe.recv()
            except (EOFError, OSError):  # the server is gone
                os._exit(0)
            if word == "stop":
                self._compute.shutdown()
                self._background.shutdown(cancel_futures=True)
                return
            if word == "drop":
                self._drop(*rest)
            else:
                threads, function = handlers[word]
                threads.submit(self._reply, function, *rest)

    def send(self, *message: Any) -> None:
        """Send a message to the server."""
        with self._pipe_lock:
            self.pipe.send(message)

    def _reply(self, function: Callable[..., Any], number: int, *args: Any) -> None:
        start = time.perf_counter()
        try:
            value = function(*args)
        except (RequestError, DomainChanged) as error:
            value = error
        except Exception as error:  # one bad request must not end the worker
            value = RequestError("failed", self._message(error))
        self.send("result", number, value, time.perf_counter() - start)

    def _message(self, error: Exception, *folders: str) -> str:
        message = without_paths(str(error), self.ecology.folder, *folders)
        return message if isinstance(error, CovNormError) else f"{type(error).__name__}: {message}"

    def _error(self, error: Exception, domain: str, *folders: str) -> RequestError:
        """Return what a client gets: 409 if the domain is at fault, 500 if the program is."""
        message = self._message(error, *folders)
        if isinstance(error, CovNormError):
            return broken_domain(domain, message)
        return RequestError("failed", f"domain {domain!r}: {message}")

    # ── batches ──────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _batch(self, domains: list[str], images: np.ndarray, tops: list[int]) -> list[Result]:
        """Predict images (n, 3, s, s), one domain per image.

        If the batch fails, its images are computed one by one, so that only the bad ones fail.
        """
        x = torch.from_numpy(images)
        try:
            return self._predict(domains, x, tops)
        except Exception:
            results: list[Result] = []
            for i, domain in enumerate(domains):
                try:
                    results += self._predict([domain], x[i : i + 1], tops[i : i + 1])
                except Exception as error:
                    results.append(self._error(error, domain))
            return results

    def _predict(self, domains: list[str], x: Tensor, tops: list[int]) -> list[Result]:
        configs = [preprocessing(self.net, domain) for domain in domains]
        if all((c["mean"], c["std"]) == (configs[0]["mean"], configs[0]["std"]) for c in configs):
            inputs = as_input(x, configs[0])  # in one step
        else:
            parts = zip(x.split(1), configs, strict=True)
            inputs = torch.cat([as_input(image, config) for image, config in parts])
        mixed = len(set(domains)) > 1
        out: Sequence[Tensor] = self.net(inputs, domain=domains if mixed else domains[0])
        results: list[Result] = []
        for domain, logits, top in zip(domains, out, tops, strict=True):
            probabilities = logits.float().softmax(0)
            if not probabilities.isfinite().all():
                results.append(broken_domain(domain, "its output is not finite. Retrain it."))
                continue
            best = probabilities.topk(min(top, len(probabilities)))
            names = self.net.domain(domain).classes or [str(i) for i in range(len(probabilities))]
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            results.append([{"label": names[i], "probability": p} for i, p in pairs])
        return results

    @torch.no_grad()
    def _probe(self) -> bool:
        """Run a forward pass of the backbone; return whether its output is finite."""
        side, size = self._probe_size, self.preprocessing["size"]
        x = as_input(torch.zeros(1, 3, side, side, dtype=torch.uint8), self.preprocessing)
        try:
            return bool(torch.as_tensor(self.net.backbone(x)).isfinite().all())
        except Exception:
            if side == size:
                raise
            self._probe_size = size  # some networks accept no other size
            return self._probe()

    # ── domains ──────────────────────────────────────────────────────────────────────────────

    def _load(self, name: str, version: str) -> int:
        """Load exactly this version of a domain; return its bytes in memory."""
        try:
            shares = self.ecology.entry(name).basis is not None
            with self._basis_lock if shares else contextlib.nullcontext():
                if shares:
                    self._remove_unused_bases()
                # Beside this network, so that a load that fails changes nothing.
                beside = self.net.without_domains(dict(self.net.bases.items()) if shares else None)
                domain = self.ecology.load(beside, name).eval()
                beside.prepare_(name, only=True)
                if self._is_changed(name, version):
                    raise DomainChanged
                for basis, shared in beside.bases.items():
                    self.net.bases[basis] = shared
                if domain.basis is not None:
                    self._basis_of[name] = domain.basis
                self.net.domains[name] = domain
                return domain.bytes
        except Exception as error:
            if self._is_changed(name, version):
                raise DomainChanged from None
            raise broken_domain(name, self._message(error)) from None

    def _is_changed(self, name: str, version: str) -> bool:
        """Return whether the store has another version; False if the manifest is unreadable."""
        try:
            entry = self.ecology.domains.get(name)
            return entry is None or version_of(entry, self.ecology.bases) != version
        except CovNormError:
            return False

    def _drop(self, name: str) -> None:
        if name in self.net.domains:
            self.net.remove_domain(name)
            if self._basis_of.pop(name, None) is not None:
                self._background.submit(self._remove_unused_bases)

    def _remove_unused_bases(self) -> None:
        with self._basis_lock:  # so none is loading
            for basis in set(self.net.bases) - set(self._basis_of.values()):
                del self.net.bases[basis]

    def _store(self, name: str, folder: str, replace: bool) -> None:
        try:
            store_upload(self.ecology, name, Path(folder), replace)
        except Exception as error:
            raise self._error(error, name, folder) from None
