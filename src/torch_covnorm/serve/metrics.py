"""What the server counts, for Prometheus. No label is a name that somebody sends."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """One registry a server, so that two of them in one process do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.switches = 0

        def counter(name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"covnorm_{name}", about, labels, registry=self.registry)

        def gauge(name: str, about: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"covnorm_{name}", about, labels, registry=self.registry)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"covnorm_{name}", about, buckets=buckets, registry=self.registry)

        self.requests = counter("requests", "Answers by route and status", ("route", "status"))
        self.errors = counter("errors", "Images that got no answer, by reason", ("reason",))
        self.images = counter("images", "Images answered")
        self.request_seconds = histogram("request_seconds", "From image to answer", SECONDS)
        self.queue_seconds = histogram("queue_seconds", "An image's wait for its batch", SECONDS)
        self.compute_seconds = histogram("compute_seconds", "A batch in the network", SECONDS)
        self.batch_images = histogram("batch_images", "Images of a batch", SIZES)
        self.batch_domains = histogram("batch_domains", "Domains of a batch", SIZES)
        self.load_seconds = histogram("load_seconds", "A domain into memory", SECONDS)
        self.loads = counter("loads", "Domains loaded", ("result",))
        self.evictions = counter("evictions", "Domains that went to make room")
        self.restarts = counter("worker_restarts", "Workers that died or hung")
        self.queue_depth = gauge("queue_depth", "Images accepted and not answered")
        self.residents = gauge("resident_domains", "Domains in memory", ("worker",))
        self.resident_bytes = gauge("resident_bytes", "Bytes of domains in memory", ("worker",))
        self.domains = gauge("domains", "Domains in the store")

    def batch(self, images: int, domains: int, seconds: float) -> None:
        """A batch was computed: as many switches as it has domains."""
        self.switches += domains
        self.batch_images.observe(images)
        self.batch_domains.observe(domains)
        self.compute_seconds.observe(seconds)

    @staticmethod
    def total(counter: Counter) -> int:
        """What a counter without labels has counted."""
        return int(sum(s.value for m in counter.collect() for s in m.samples if "total" in s.name))

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self.registry)
