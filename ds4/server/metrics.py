"""Counters, gauges and histograms of the server, in Prometheus form.

`exposition.py` renders them. The values live in plain lists and dicts of our own, because the engine thread
observes an inter-token latency for every row of every step: that must cost a fraction of a microsecond, without a
lock. Each value has one writer, the engine thread (`on_*`) or the event loop (`connections`, `response`), and a scrape
may be one step behind.

`Metrics` is an observer of the scheduler and of the HTTP server: hand it to both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Protocol

from ds4.server.types import Failed, Finish

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of latency buckets: from one decode step of a small model to a long prefill."""

WIDTHS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Upper bounds of the rows-per-step buckets."""

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/health",
    "/metrics",
    "/slots",
    "/",
)
"""Paths that are label values. All others are `other`: a client must not be able to make up series."""


class Histogram:
    """Counts of values by upper bound, `len(bounds) + 1` buckets, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def observe_all(self, values: Iterable[float]) -> None:
        counts, bounds, total = self.counts, self.bounds, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.total += total

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as the exposition format wants them."""
        found, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), tuple(self.counts), strict=True):
            running += count
            found.append((bound, float(running)))
        return found


class StepLike(Protocol):
    """What the scheduler reports of a step. Times in seconds; one `itl` per token sampled by a decode row."""

    @property
    def seconds(self) -> float: ...
    @property
    def decode_rows(self) -> int: ...
    @property
    def prefill_rows(self) -> int: ...
    @property
    def prefill_tokens(self) -> int: ...
    @property
    def queued(self) -> int: ...
    @property
    def busy(self) -> int: ...
    @property
    def ttft(self) -> Sequence[float]: ...
    @property
    def itl(self) -> Sequence[float]: ...
    @property
    def drafted(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def draft_seconds(self) -> float: ...


class ReuseLike(Protocol):
    """What a slot could reuse for a prompt: the tier's name, and tokens."""

    @property
    def kind(self) -> str: ...
    @property
    def tokens(self) -> int: ...


class RequestLike(Protocol):
    """The identity of a generation."""

    @property
    def dialect(self) -> str: ...
    @property
    def created(self) -> float: ...


class JobLike(Protocol):
    """A submitted request."""

    @property
    def request(self) -> RequestLike: ...
    @property
    def submitted(self) -> float: ...


class Metrics:
    """Everything that is measured. `slots_total` is the number of resident sessions.

    `clock` is the scheduler's (`time.monotonic`): end-to-end times are taken against `request.created`.
    """

    def __init__(self, slots_total: int = 0, endpoints: Sequence[str] = ENDPOINTS) -> None:
        self.slots_total = slots_total
        self.slots_busy = 0
        self.queue_length = 0
        self.http_connections = 0
        self.http_requests: dict[tuple[str, int], int] = {}
        self.http_seconds = Histogram(SECONDS)
        self.finished: dict[tuple[str, str], int] = {}
        self.prompt_tokens = 0
        self.cached_tokens: dict[str, int] = {}
        self.completion_tokens = 0
        self.reuse: dict[str, int] = {}
        self.ttft = Histogram(SECONDS)
        self.itl = Histogram(SECONDS)
        self.e2e = Histogram(SECONDS)
        self.queue_wait = Histogram(SECONDS)
        self.step_seconds = Histogram(SECONDS)
        self.step_rows = Histogram(WIDTHS)
        self.prefill_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.draft_seconds = 0.0
        # Every path works with and without `/v1`.
        self._labels = {
            prefix + name.removeprefix("/v1"): name
            for name in endpoints
            for prefix in ("", "/v1")
            if prefix + name != "/v1/"
        }

    # Observer of the HTTP server; event loop

    def connections(self, open_now: int) -> None:
        self.http_connections = open_now

    def response(self, method: str, path: str, status: int, seconds: float, peer: str, reason: str) -> None:
        key = (self.endpoint(path), status)
        self.http_requests[key] = self.http_requests.get(key, 0) + 1
        self.http_seconds.observe(seconds)

    def endpoint(self, path: str) -> str:
        """The label value of a path: itself when it is one of ours, with or without `/v1`."""
        label = self._labels.get(path.rstrip("/") or "/")
        if label is not None:
            return label
        return "/v1/models/{id}" if path.startswith(("/v1/models/", "/models/")) else "other"

    # Observer of the scheduler; engine thread

    def on_start(self, job: JobLike, reuse: ReuseLike, queue_seconds: float) -> None:
        self.queue_wait.observe(queue_seconds)
        self.reuse[reuse.kind] = self.reuse.get(reuse.kind, 0) + 1
        if reuse.tokens:
            self.cached_tokens[reuse.kind] = self.cached_tokens.get(reuse.kind, 0) + reuse.tokens

    def on_step(self, report: StepLike) -> None:
        self.step_seconds.observe(report.seconds)
        self.step_rows.observe(report.decode_rows + report.prefill_rows)
        self.prefill_tokens += report.prefill_tokens
        self.completion_tokens += len(report.itl) + len(report.ttft)
        self.queue_length = report.queued
        self.slots_busy = report.busy
        self.itl.observe_all(report.itl)
        self.drafted_tokens += report.drafted
        self.accepted_tokens += report.accepted
        self.draft_seconds += report.draft_seconds
        if report.ttft:
            self.ttft.observe_all(report.ttft)

    def on_end(self, job: JobLike, event: Finish | Failed) -> None:
        reason = "error"
        if isinstance(event, Finish):
            reason = event.reason
            self.prompt_tokens += event.prompt_tokens
            self.e2e.observe(event.ttft + event.decode_seconds)
        key = (job.request.dialect, reason)
        self.finished[key] = self.finished.get(key, 0) + 1

    def on_idle(self) -> None:
        self.queue_length = 0
        self.slots_busy = 0
