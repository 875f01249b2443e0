"""What the server says no with: each refusal has a status, a reason for the metrics, a remedy."""

from __future__ import annotations


class Refused(Exception):
    """A request that is not answered. `reason` is one of a few words, whatever the request says."""

    def __init__(self, status: int, reason: str, message: str, retry: float | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.retry = status, reason, message, retry


def unknown(name: str, known: str) -> Refused:
    """No such domain: never silently the bare backbone."""
    return Refused(404, "unknown_domain", f"unknown domain {name!r}: {known}")


def full(retry: float) -> Refused:
    """More work than can be done within the deadline."""
    return Refused(429, "queue_full", "the queue is full: try again a little later", retry)


def late(deadline: float) -> Refused:
    """The answer would come too late; the work is dropped."""
    return Refused(504, "deadline", f"no answer within {deadline:.3g} s: the work was dropped")


def broken(name: str, why: str) -> Refused:
    """The domain's files cannot be used; the others go on."""
    return Refused(409, "broken_domain", f"domain {name!r} cannot be served: {why}")


def exists(name: str) -> Refused:
    """An upload under a name that is taken."""
    return Refused(409, "exists", f"domain {name!r} exists: send ?replace=true, or another name")


def invalid(why: str) -> Refused:
    """Not what the route takes."""
    return Refused(422, "invalid", why)


def bad_image(why: str) -> Refused:
    """Not an image that is read."""
    return Refused(422, "bad_image", why)


def too_many(most: int) -> Refused:
    """Of images in one request."""
    return Refused(413, "too_many", f"a request has at most {most} images")


def failed(why: str) -> Refused:
    """Ours: nothing that the client could do better."""
    return Refused(500, "failed", why)


def stopped() -> Refused:
    """The server is on its way down, or its worker is."""
    return Refused(503, "unavailable", "the server is stopping or restarting: try again", 1.0)


def no_room(name: str) -> Refused:
    """With what is pinned, the domain is too large for the memory that domains may have."""
    return Refused(503, "no_room", f"domain {name!r} does not fit into memory: raise --resident")
