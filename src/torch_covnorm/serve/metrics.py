"""The Prometheus metrics of the server. No label holds a name that a client sent."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one server, in their own registry, so that a process can hold several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="covnorm", registry=self.registry)
        gauge = partial(Gauge, namespace="covnorm", registry=self.registry)
        histogram = partial(Histogram, namespace="covnorm", registry=self.registry)
        seconds, sizes = partial(histogram, buckets=SECONDS), partial(histogram, buckets=SIZES)

        self.requests = counter("requests", "Responses by route and status", ("route", "status"))
        self.errors = counter("errors", "Images without a prediction, by reason", ("reason",))
        self.images = counter("images", "Images with a prediction")
        self.request_seconds = seconds("request_seconds", "Time from image to prediction")
        self.queue_seconds = seconds("queue_seconds", "Time an image waits for its batch")
        self.compute_seconds = seconds("compute_seconds", "Time a batch takes in the network")
        self.batch_images = sizes("batch_images", "Images per batch")
        self.batch_domains = sizes("batch_domains", "Domains per batch")
        self.load_seconds = seconds("load_seconds", "Time to load a domain into memory")
        self.loads = counter("loads", "Domains loaded", ("result",))
        self.evictions = counter("evictions", "Domains evicted from memory to make room")
        self.restarts = counter("worker_restarts", "Workers that died or hung")
        self.queue_depth = gauge("queue_depth", "Images accepted and not yet answered")
        self.residents = gauge("resident_domains", "Domains in memory", ("worker",))
        self.resident_bytes = gauge("resident_bytes", "Bytes of domains in memory", ("worker",))
        self.domains = gauge("domains", "Domains in the store")

    def total(self, sample: str) -> int:
        """Return a count so far, such as "images_total"."""
        return int(self.registry.get_sample_value(f"covnorm_{sample}") or 0)

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)
