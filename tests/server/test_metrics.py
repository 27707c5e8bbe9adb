"""Metrics: the numbers that a scrape shows, bounded label values, and the two observers that feed them."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from ds4.server.exposition import render
from ds4.server.metrics import SECONDS, WIDTHS, Histogram, Metrics
from ds4.server.types import Failed, Finish
from tests.support.running_server import Serve
from tests.support.wire import get, run, serving


@dataclass
class Step:
    seconds: float = 0.01
    decode_rows: int = 0
    prefill_rows: int = 0
    prefill_tokens: int = 0
    queued: int = 0
    busy: int = 0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0


@dataclass
class Reuse:
    kind: str
    tokens: int


@dataclass
class Asked:
    dialect: str = "chat"
    created: float = 0.0


@dataclass
class Job:
    request: Asked
    submitted: float = 0.0


def finish(**changes: object) -> Finish:
    values: dict[str, object] = {
        "reason": "stop", "prompt_tokens": 30, "cached_tokens": 10, "cache_write_tokens": 20, "completion_tokens": 5,
        "ttft": 0.3, "decode_seconds": 0.4,
    }  # fmt: skip
    return Finish(**(values | changes))  # type: ignore[arg-type]


def scrape(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    body, content_type = render(metrics)
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_text(body.decode())
        for sample in family.samples
    }


def test_a_new_server_shows_zeros():
    found = scrape(Metrics(slots_total=16))
    assert found["ds4_slots", ()] == 16
    for name in ("ds4_slots_busy", "ds4_queue_length", "ds4_http_connections", "ds4_completion_tokens_total"):
        assert found[name, ()] == 0
    assert found["ds4_inter_token_latency_seconds_count", ()] == 0


def test_the_scheduler_feeds_it():
    metrics = Metrics(slots_total=4)
    job = Job(Asked())
    metrics.on_start(job, Reuse("memory-token", 10), 0.02)
    metrics.on_start(job, Reuse("none", 0), 0.7)
    metrics.on_step(Step(seconds=0.03, prefill_rows=2, prefill_tokens=128, queued=3, busy=2, ttft=[0.3, 0.6]))
    metrics.on_step(Step(seconds=0.02, decode_rows=2, queued=1, busy=2, itl=[0.02, 0.04]))
    metrics.on_end(job, finish())
    metrics.on_end(job, finish(reason="length", prompt_tokens=7))
    metrics.on_end(Job(Asked("messages")), Failed("broken"))
    found = scrape(metrics)
    assert found["ds4_cache_lookups_total", (("tier", "memory-token"),)] == 1
    assert found["ds4_cache_lookups_total", (("tier", "none"),)] == 1
    assert found["ds4_cached_tokens_total", (("tier", "memory-token"),)] == 10
    assert ("ds4_cached_tokens_total", (("tier", "none"),)) not in found
    assert found["ds4_queue_wait_seconds_count", ()] == 2
    assert found["ds4_queue_wait_seconds_sum", ()] == pytest.approx(0.72)
    assert found["ds4_step_seconds_count", ()] == 2
    assert found["ds4_step_rows_sum", ()] == 4
    assert found["ds4_prefill_tokens_total", ()] == 128
    assert found["ds4_prompt_tokens_total", ()] == 37
    assert found["ds4_completion_tokens_total", ()] == 4
    assert found["ds4_queue_length", ()] == 1
    assert found["ds4_slots_busy", ()] == 2
    assert found["ds4_time_to_first_token_seconds_sum", ()] == pytest.approx(0.9)
    assert found["ds4_inter_token_latency_seconds_sum", ()] == pytest.approx(0.06)
    assert found["ds4_generation_seconds_sum", ()] == pytest.approx(1.4)
    assert found["ds4_generations_total", (("dialect", "chat"), ("finish", "stop"))] == 1
    assert found["ds4_generations_total", (("dialect", "chat"), ("finish", "length"))] == 1
    assert found["ds4_generations_total", (("dialect", "messages"), ("finish", "error"))] == 1


@pytest.mark.parametrize("bounds", [SECONDS, WIDTHS])
def test_histograms_agree_with_counting(bounds: tuple[float, ...]):
    rng = random.Random(7)
    values = [rng.choice([*bounds, rng.expovariate(1.0), 1e9, 0.0]) for _ in range(500)]
    one, many = Histogram(bounds), Histogram(bounds)
    for value in values:
        one.observe(value)
    many.observe_all(values)
    repeated = Histogram(bounds)
    repeated.observe(values[0], 3)
    for bound, cumulative in one.buckets():
        assert cumulative == sum(value <= float(bound) for value in values), bound
    assert one.buckets() == many.buckets()
    assert one.total == pytest.approx(many.total) and one.total == pytest.approx(sum(values))
    assert repeated.buckets()[-1] == ("+Inf", 3.0) and repeated.total == pytest.approx(3 * values[0])


def test_clients_cannot_make_up_label_values():
    metrics = Metrics()
    for i in range(1000):
        metrics.response("GET", f"/made-up/{i}", 404, 0.001, "peer", "")
        metrics.response("GET", f"/v1/models/{i}", 404, 0.001, "peer", "")
    assert metrics.http_requests == {("other", 404): 1000, ("/v1/models/{id}", 404): 1000}
    assert metrics.endpoint("/v1/chat/completions") == metrics.endpoint("/chat/completions") == "/v1/chat/completions"
    assert metrics.endpoint("/health") == metrics.endpoint("/health/") == metrics.endpoint("/v1/health") == "/health"
    assert metrics.endpoint("/") == "/"
    assert metrics.endpoint("-") == metrics.endpoint("/v1/v1/models") == metrics.endpoint("/v1") == "other"


def test_both_text_formats_parse():
    metrics = Metrics(slots_total=1)
    metrics.response("POST", '/v1/chat/completions"\n', 200, 0.2, "peer", "")
    metrics.on_step(Step(decode_rows=1, itl=[0.01]))
    body, content_type = render(metrics, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(body.decode())}
    assert {"ds4_http_requests", "ds4_inter_token_latency_seconds", "ds4_slots"} <= names
    assert ("ds4_http_requests_total", (("endpoint", "other"), ("status", "200"))) in scrape(metrics)


def test_two_servers_in_one_process_do_not_share_numbers():
    one, two = Metrics(), Metrics()
    one.on_step(Step(itl=[0.1]))
    assert scrape(two)["ds4_completion_tokens_total", ()] == 0


def test_the_http_server_feeds_it():
    metrics = Metrics()

    async def main():
        async with serving() as wire:
            wire.server.observers = (metrics,)
            client = await wire.connect()
            assert (await client.ask(get("/health"))).status == 200
            assert (await client.ask(get("/health"))).status == 200
            assert metrics.http_connections == 1
            assert (await wire.ask(b"nonsense\r\n\r\n")).status == 400
        assert metrics.http_connections == 0

    run(main)
    found = scrape(metrics)
    assert found["ds4_http_requests_total", (("endpoint", "/health"), ("status", "200"))] == 2
    assert found["ds4_http_requests_total", (("endpoint", "other"), ("status", "400"))] == 1
    assert found["ds4_http_request_seconds_count", ()] == 3


def test_prefill_is_what_no_cache_had(serve: Serve, caplog: pytest.LogCaptureFixture):
    """In the counter and in the log: the new part of a prompt, not the prompt."""
    server = serve("Yes.", slots=1)
    messages = [{"role": "user", "content": "Is it? " * 100}]
    seen = 0.0
    for _ in range(2):
        with caplog.at_level(logging.INFO, "ds4.server"):
            caplog.clear()
            answer = server.http.post("/v1/chat/completions", json={"messages": messages}).json()
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        found = scrape(server.app._service.metrics)
        new = found["ds4_prefill_tokens_total", ()] - seen
        seen += new
        assert new == usage["prompt_tokens"] - cached
        assert f"ctx={cached}..{usage['prompt_tokens']}:{int(new)} " in caplog.text
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
    assert cached > 700 > new
