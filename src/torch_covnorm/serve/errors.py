"""The errors that a client can get. Each has a fixed reason, a status and a message."""

from __future__ import annotations

STATUS = {
    "client_gone": 400,
    "no_key": 401,
    "unknown_domain": 404,
    "slow": 408,
    "broken_domain": 409,
    "exists": 409,
    "too_large": 413,
    "too_many": 413,
    "media_type": 415,
    "bad_image": 422,
    "invalid": 422,
    "no_domain": 422,
    "no_domain_fits": 422,
    "queue_full": 429,
    "failed": 500,
    "internal": 500,
    "no_room": 503,
    "not_ready": 503,
    "unavailable": 503,
    "deadline": 504,
}


class RequestError(Exception):
    """A request that gets an error instead of a result. Workers send it over their pipe, too.

    reason: a key of `STATUS`, on which clients and metrics rely. message: what happened and what to
    do. retry: seconds for `Retry-After`. status: another one than that of the reason.
    """

    def __init__(
        self, reason: str, message: str, *, retry: float | None = None, status: int | None = None
    ) -> None:
        super().__init__(reason, message)  # so that it can be rebuilt in another process
        self.status = status or STATUS[reason]
        self.reason, self.message, self.retry = reason, message, retry


class DomainChanged(Exception):
    """The store has another version of the domain by now. Look it up again."""


class WorkerDied(Exception):
    """The worker process ended before it replied."""


def without_paths(text: str, *folders: object) -> str:
    """Return a message without the paths of these folders, which clients must not see."""
    for folder in folders:
        text = text.replace(f"{folder}/", "").replace(f"{folder}: ", "")
    return text


def queue_full(seconds: float) -> RequestError:
    """Return the error for work that could not be finished within the deadline."""
    message = "the queue is full. Try again later."
    return RequestError("queue_full", message, retry=max(1.0, seconds))


def deadline_passed(seconds: float) -> RequestError:
    """Return the error for a request whose deadline has passed."""
    return RequestError("deadline", f"no result within {seconds:.3g} s. The request was dropped.")


def broken_domain(name: str, why: str) -> RequestError:
    """Return the error for a domain that cannot be served; the others are not affected."""
    return RequestError("broken_domain", f"domain {name!r} cannot be served: {why}")


def unavailable() -> RequestError:
    """Return the error while the server stops or its worker restarts."""
    message = "the server is stopping or a worker is restarting. Try again later."
    return RequestError("unavailable", message, retry=1.0)
