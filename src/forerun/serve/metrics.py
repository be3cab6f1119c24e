"""Metrics in the format of Prometheus, under the names that dashboards know, with the prefix `forerun:` or `vllm:`.

Steps are counted from their StepReports, and requests from their RequestReports when they end. docs/exactness.md has
the definitions, and docs/serve.md has the names.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from forerun.engine.llm import LLM
from forerun.engine.request import Request
from forerun.types import SequenceStep, StepReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)
_SECONDS = (*_SHORT_SECONDS, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 2400.0)
_DELAYS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_MOST_REMEMBERED = 4096  # sequences
_EXPERTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)  # of drafts, in tokens


class Families:
    """The metrics of a server. Each metric is created once for all models. The label model_name tells the models apart.

    prefix: the first part of every metric's name.
    """

    def __init__(self, prefix: str = "forerun") -> None:
        self._prefix = prefix
        self._registry = CollectorRegistry()
        self._made = dict[str, Any]()

    def get(self, kind: type[Any], name: str, text: str, labels: Seq[str], **more: Any) -> Any:
        """Return the metric `name`, which the first call creates. kind: the metric's class in prometheus_client."""
        if name not in self._made:
            names = ["model_name", *labels]
            self._made[name] = kind(f"{self._prefix}:{name}", text, names, registry=self._registry, **more)
        return self._made[name]

    def text(self) -> bytes:
        """Return all metrics as text, for a scrape. Do not call this in the event loop."""
        return generate_latest(self._registry)


class Metrics:
    """Counts every step of an LLM and every request that ends.

    model: the value of the label model_name. families: the server's metrics; None = the LLM is the only model.
    """

    def __init__(self, llm: LLM, model: str, families: Families | None = None) -> None:
        self._llm = llm
        self._model = model
        self._families = families or Families()
        self._make_gauges()
        self._prompt_tokens = self._counter("prompt_tokens", "prompt tokens, those found in the cache included")
        self._generated = self._counter("generation_tokens", "tokens that were generated")
        self._queries = self._counter("prefix_cache_queries", "prompt tokens that were looked for in the prefix cache")
        self._hits = self._counter("prefix_cache_hits", "prompt tokens that were found there")
        self._disk_hits = self._counter("prefix_cache_disk_hits", "of these, tokens that came from disk")
        self._preemptions = self._counter("num_preemptions", "requests that lost their cache to others")
        self._ended = self._counter("request_success", "requests that ended, by reason", "finished_reason")
        self._answers = self._counter("http_requests", "answers, by route and status", "path", "status")
        self._first = self._seconds("time_to_first_token", "from a request's arrival to its first token")
        self._gap = self._seconds("inter_token_latency", "between two steps that brought a request on")
        self._each = self._seconds("request_time_per_output_token", "the mean of a request behind its first token")
        self._whole = self._seconds("e2e_request_latency", "from a request's arrival to its last token")
        self._queued = self._seconds("request_queue_time", "from a request's arrival to its first pass")
        self._prompt_length = self._histogram("request_prompt_tokens", "prompt tokens of a request", _TOKENS)
        self._length = self._histogram("request_generation_tokens", "generated tokens of a request", _TOKENS)
        drafted = "by drafter"
        self._num_drafts = self._counter(
            "spec_decode_num_drafts", f"steps of a request that drafted, {drafted}", "draft"
        )
        self._drafted = self._counter("spec_decode_num_draft_tokens", f"drafted tokens, {drafted}", "draft")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", f"accepted ones, {drafted}", "draft")
        self._tested = self._counter(
            "spec_decode_num_tested_tokens", f"ones at which the path stood, {drafted}", "draft"
        )
        self._at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            f"accepted ones by their position, {drafted}",
            "draft",
            "position",
        )
        self._granted = self._histogram(
            "spec_decode_draft_length", "tokens drafted for a request in a step, as paced; 0 = plain", _LENGTHS, "draft"
        )
        self._steps = self._seconds("step_duration", "of one step of the whole batch")
        self._experts = None
        if llm.engine.runner.has_experts:
            chosen = "experts of a layer that the rows of a step chose, on average over layers"
            self._experts = self._histogram("step_experts", chosen, _EXPERTS)
        delays = "of the event loop behind a timer of 50 ms: how late it comes to what it should do"
        self._delay = self._histogram("event_loop_delay_seconds", f"seconds {delays}", _DELAYS)
        self._last_s: dict[int, float] = {}  # sequence id -> when a step last emitted for it
        self._children: dict[tuple[int, tuple[str, ...]], Any] = {}
        self._end = llm.listen(self._hear)

    def close(self) -> None:
        """Stop listening to the engine's step reports."""
        self._end()

    def text(self) -> bytes:
        """Return the metrics of all models as text, for a scrape. Do not call this in the event loop."""
        return self._families.text()

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP answer. path: the path in the route's definition, never the path that the client sent."""
        self._of(self._answers, path, str(status)).inc()

    def delayed(self, seconds: float) -> None:
        """Record by how many seconds the event loop was late for a timer."""
        self._of(self._delay).observe(seconds)

    def ended(self, requests: Seq[Request], *, is_failed: bool = False) -> None:
        """Count requests that have ended or are about to end. is_failed: whether the engine's failure ends them."""
        for request in requests:
            seq, report = request.seq, request.report
            self._last_s.pop(seq.id, None)
            self._of(self._ended, "error" if is_failed or request.error else seq.finish_reason or "abort").inc()
            num_prompt_tokens = len(seq.source_ids) or seq.num_prompt_tokens  # of an encoder-decoder, the source
            if report.scheduled_at_s is not None:
                self._of(self._queued).observe(report.scheduled_at_s - report.arrived_at_s)
                self._of(self._prompt_tokens).inc(num_prompt_tokens)
                self._of(self._queries).inc(num_prompt_tokens)
                self._of(self._hits).inc(report.num_cached_tokens)
                self._of(self._disk_hits).inc(report.num_disk_tokens)
                self._of(self._prompt_length).observe(num_prompt_tokens)
                self._of(self._preemptions).inc(report.num_preemptions)
            if report.ended_at_s is None:
                continue
            self._of(self._whole).observe(report.ended_at_s - report.arrived_at_s)
            self._of(self._length).observe(seq.num_output_tokens)
            if report.first_token_at_s is None or report.last_token_at_s is None:
                continue
            self._of(self._first).observe(report.first_token_at_s - report.arrived_at_s)
            if seq.num_output_tokens > 1:
                behind = (report.last_token_at_s - report.first_token_at_s) / (seq.num_output_tokens - 1)
                self._of(self._each).observe(behind)

    def _hear(self, report: StepReport) -> None:
        """Count a step. Called by the engine's thread inside the step."""
        now_s = time.monotonic()
        self._of(self._generated).inc(report.num_committed)
        self._of(self._steps).observe(report.seconds)
        if self._experts is not None and report.num_experts:
            self._of(self._experts).observe(report.num_experts)
        if len(self._last_s) > _MOST_REMEMBERED:  # some ended while a step ran; the event loop removes some, too
            for oldest in tuple(self._last_s)[:-_MOST_REMEMBERED]:
                self._last_s.pop(oldest, None)
        for step in report.sequences:
            before_s = self._last_s.pop(step.sequence_id, None)
            if before_s is not None:
                self._of(self._gap).observe(now_s - before_s)
            self._last_s[step.sequence_id] = now_s
            for part in step.parts:
                self._hear_part(part)

    def _hear_part(self, part: SequenceStep) -> None:
        """Count the tokens that one drafter drafted for one request, and how many were tested and accepted.

        part: the step of one request, with the nodes of one drafter. The tested tokens of a chain are the accepted
        tokens and the first rejected token.
        """
        self._of(self._granted, part.draft).observe(part.num_drafted)
        if part.num_drafted:
            self._of(self._num_drafts, part.draft).inc()
            self._of(self._drafted, part.draft).inc(part.num_drafted)
            self._of(self._tested, part.draft).inc(part.num_tested)
            self._of(self._accepted, part.draft).inc(part.num_accepted)
            for position in range(part.num_accepted):
                self._of(self._at, part.draft, str(position)).inc()

    def _make_gauges(self) -> None:
        scheduler, cache = self._llm.engine.scheduler, self._llm.engine.runner.cache
        num_tokens = cache.num_blocks * cache.block_tokens
        gauges = {
            "num_requests_running": ("requests in the batch", lambda: len(scheduler.running)),
            "num_requests_waiting": ("requests that wait for it", lambda: len(scheduler.waiting)),
            "kv_cache_usage_perc": (
                "share of the KV cache that is in use, 0 to 1",
                lambda: 1 - cache.free_tokens() / num_tokens,
            ),
        }
        for name, (text, read) in gauges.items():
            gauge = self._families.get(Gauge, name, text, ())
            gauge.labels(self._model).set_function(read)

    def _of(self, metric: Any, *labels: str) -> Any:
        """Return the child of a metric for these labels, in the sense of prometheus_client.

        Children are cached, because looking up a child in the metric takes longer than counting.
        """
        key = (id(metric), labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(self._model, *labels)
        return child

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._families.get(Counter, name, text, labels)

    def _seconds(self, name: str, text: str) -> Any:
        return self._histogram(f"{name}_seconds", f"seconds {text}", _SECONDS)

    def _histogram(self, name: str, text: str, buckets: Seq[float], *labels: str) -> Any:
        return self._families.get(Histogram, name, text, labels, buckets=buckets)
