"""The text of a scrape: what `metrics.py` counts, in Prometheus or OpenMetrics form, by `prometheus_client`.

A room of its own, because that package brings an HTTP server along, which a start without a scrape does not wait for.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ds4.server.metrics import Histogram, Metrics


def render(metrics: Metrics, accept: str = "") -> tuple[bytes, str]:
    """(body, content type) of a scrape: OpenMetrics if `accept` asks for it, else the Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(metrics))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Collector:
    """Turns a Metrics into metric families at scrape time."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        """Nothing: spares the registry a collection when it is made."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        m = self._metrics
        yield GaugeMetricFamily("ds4_http_connections", "Open client connections.", m.http_connections)
        requests = CounterMetricFamily(
            "ds4_http_requests", "HTTP responses by endpoint and status.", labels=("endpoint", "status")
        )
        for (endpoint, status), count in tuple(m.http_requests.items()):
            requests.add_metric((endpoint, str(status)), count)
        yield requests
        yield _histogram("ds4_http_request_seconds", "From a request's last byte to its response's.", m.http_seconds)
        yield GaugeMetricFamily("ds4_queue_length", "Generations that wait for a slot.", m.queue_length)
        yield GaugeMetricFamily("ds4_slots", "Resident sessions.", m.slots_total)
        yield GaugeMetricFamily("ds4_slots_busy", "Resident sessions that are generating.", m.slots_busy)
        finished = CounterMetricFamily(
            "ds4_generations", "Ended generations by dialect and finish reason.", labels=("dialect", "finish")
        )
        for (dialect, reason), count in tuple(m.finished.items()):
            finished.add_metric((dialect, reason), count)
        yield finished
        yield CounterMetricFamily("ds4_prompt_tokens", "Prompt tokens of ended generations.", m.prompt_tokens)
        yield CounterMetricFamily("ds4_prefill_tokens", "Prompt tokens evaluated.", m.prefill_tokens)
        yield CounterMetricFamily("ds4_completion_tokens", "Tokens sampled.", m.completion_tokens)
        yield CounterMetricFamily("ds4_draft_tokens", "Tokens guessed ahead.", m.drafted_tokens)
        yield CounterMetricFamily("ds4_draft_tokens_accepted", "Guesses that were sampled.", m.accepted_tokens)
        yield CounterMetricFamily("ds4_draft_seconds", "Time that guessing took.", m.draft_seconds)
        cached = CounterMetricFamily(
            "ds4_cached_tokens", "Prompt tokens not evaluated again, by cache tier.", labels=("tier",)
        )
        for tier, count in tuple(m.cached_tokens.items()):
            cached.add_metric((tier,), count)
        yield cached
        reuse = CounterMetricFamily(
            "ds4_cache_lookups", "Started generations by the cache tier that served them.", labels=("tier",)
        )
        for tier, count in tuple(m.reuse.items()):
            reuse.add_metric((tier,), count)
        yield reuse
        yield _histogram("ds4_queue_wait_seconds", "From submission to a slot.", m.queue_wait)
        yield _histogram("ds4_time_to_first_token_seconds", "From the request's last byte to its first token.", m.ttft)
        yield _histogram("ds4_inter_token_latency_seconds", "Between two tokens of a generation.", m.itl)
        yield _histogram("ds4_generation_seconds", "From the request's last byte to its last token.", m.e2e)
        yield _histogram("ds4_step_seconds", "One forward pass with sampling and commit.", m.step_seconds)
        yield _histogram("ds4_step_rows", "Sessions that share a forward pass.", m.step_rows)


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.total)
