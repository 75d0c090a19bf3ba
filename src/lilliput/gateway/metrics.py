"""The gateway's numbers, as Prometheus reads them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lilliput.client.recovery import Recovery
from lilliput.client.step_trace import StepTrace
from lilliput.gateway.account import Account
from lilliput.swarm.held_model import HeldModel

_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_REQUEST_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
#: what is counted by its path; anything else is `other`, or a stranger could fill the memory with paths
_PATHS = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/swarm.json"}


class Metrics:
    """Counts for one model."""

    def __init__(self, model: str) -> None:
        self._model, self._registry = model, CollectorRegistry()
        self._requests = self._new(Counter, "requests", "Requests that were answered", "path", "status")
        self._seconds = self._new(Histogram, "request_seconds", "From a request to the end of its answer",
                                  buckets=_REQUEST_SECONDS)  # fmt: skip
        self._first = self._new(Histogram, "first_token_seconds", "From where an answer has its place to its first "
                                "token", buckets=_REQUEST_SECONDS)  # fmt: skip
        self._steps = self._new(Counter, "steps", "Steps through the chain")
        self._step = self._new(Histogram, "step_seconds", "Time of a step: part is network, queue or compute, summed "
                               "over the chain", "part", buckets=_STEP_SECONDS)  # fmt: skip
        self._tokens = self._new(Counter, "tokens", "Tokens: kind is prompt, cached (of the prompts) or answer", "kind")
        self._running = self._new(Gauge, "running", "Requests that are being answered")
        self._waiting = self._new(Gauge, "waiting", "Requests that wait for a place")
        self._failures = self._new(Counter, "failures", "Servers whose blocks others took over in an answer; kind is "
                                   "lost or moved", "kind")  # fmt: skip
        self._replayed = self._new(Counter, "replayed_tokens", "Tokens that others computed anew for that, per row")
        self._waited = self._new(Counter, "recovery_seconds", "Time that answers waited for it")
        self._servers = self._new(Gauge, "swarm_servers", "Servers of the model that serve")
        self._missing = self._new(Gauge, "swarm_missing_blocks", "Blocks of the model that nobody serves")
        # there from the start, so that rates begin at 0; and steps are many
        self._step_count = self._steps.labels(model)
        self._step_parts = [self._step.labels(model, part) for part in ("network", "queue", "compute")]
        for kind in ("prompt", "cached", "answer"):
            self._tokens.labels(model, kind)
        for kind in ("lost", "moved"):
            self._failures.labels(model, kind)

    def _new(self, kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
        metric = kind(f"lilliput_api_{name}", text, ("model", *labels), registry=self._registry, **options)
        if not labels:
            metric.labels(self._model)
        return metric

    def watch(self, accounts: Sequence[Account]) -> None:
        """Count what these keys use."""
        self._registry.register(_KeysUse(self._model, accounts))

    def page(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    # ---- what happens

    def saw_request(self, path: str, status: int, seconds: float) -> None:
        path = path if path in _PATHS else "other"
        self._requests.labels(self._model, path, str(status)).inc()
        self._seconds.labels(self._model).observe(seconds)

    def saw_step(self, step: StepTrace) -> None:
        self._step_count.inc()
        for part, seconds in zip(self._step_parts, (step.network, step.queued, step.computing), strict=True):
            part.observe(seconds)

    def saw_first_token(self, seconds: float) -> None:
        self._first.labels(self._model).observe(seconds)

    def saw_answer(self, *, prompt: int, cached: int, tokens: int) -> None:
        """An answer has ended; its prompt counts for each answer."""
        for kind, count in (("prompt", prompt), ("cached", cached), ("answer", tokens)):
            self._tokens.labels(self._model, kind).inc(count)

    def saw_recovery(self, recovery: Recovery) -> None:
        self._failures.labels(self._model, "moved" if recovery.moved else "lost").inc()
        self._replayed.labels(self._model).inc(recovery.replayed_tokens)
        self._waited.labels(self._model).inc(recovery.seconds)

    def saw_places(self, running: int, waiting: int) -> None:
        self._running.labels(self._model).set(running)
        self._waiting.labels(self._model).set(waiting)

    def saw_swarm(self, held: HeldModel) -> None:
        self._servers.labels(self._model).set(sum(map(held.serves, held.servers)))
        self._missing.labels(self._model).set(held.coverage().count(0))


class _KeysUse(Collector):
    """What each key has used, by its name."""

    def __init__(self, model: str, accounts: Sequence[Account]) -> None:
        self._model, self._accounts = model, accounts

    def collect(self) -> Iterator[Metric]:
        requests, tokens = (
            CounterMetricFamily(f"lilliput_api_key_{name}", text, labels=("model", "key", kind))
            for name, text, kind in (
                ("requests", "Requests with a key; outcome is admitted, or refused for its limits", "outcome"),
                ("tokens", "Tokens of a key's requests: kind is prompt or answer", "kind"),
            )
        )
        for account in self._accounts:
            names = self._model, account.name
            requests.add_metric((*names, "admitted"), account.requests)
            requests.add_metric((*names, "refused"), account.refused)
            tokens.add_metric((*names, "prompt"), account.prompt_tokens)
            tokens.add_metric((*names, "answer"), account.answer_tokens)
        yield from (requests, tokens)


class Counted:
    """Counts the requests that an application answers."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 499  # who hung up before an answer began

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._metrics.saw_request(scope["path"], status, time.perf_counter() - began)
