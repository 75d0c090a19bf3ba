"""A server's numbers, as Prometheus reads them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lilliput.engine.counters import Histogram
from lilliput.errors import BadRequest

if TYPE_CHECKING:
    from lilliput.server.service import Service

_LABELS = ("model", "blocks")


class ServerMetrics(Collector):
    """Reads what the engine and the admission count anyway, when it is asked; serving costs nothing more for it.

    :param service: the one that serves now; None while the server starts, or moves to other blocks
    """

    def __init__(self, service: Callable[[], Service | None]) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service()
        return (
            iter(()) if service is None else _of(service, (service.model, f"{service.span.start}:{service.span.end}"))
        )


def _of(service: Service, names: tuple[str, str]) -> Iterator[Metric]:
    engine, admission = service.engine, service.admission
    counters, pool = engine.counters, engine.pool
    count, now = CounterMetricFamily, GaugeMetricFamily
    for kind, name, text, value in (
        (count, "steps", "Steps of sessions that were computed", counters.steps),
        (count, "tokens", "Tokens that were computed, of all rows", counters.tokens),
        (count, "reused_tokens", "Tokens that sessions found in kept cache pages", counters.reused_tokens),
        (count, "rounds", "Passes over the weights", counters.rounds),
        (count, "training_units", "Blocks that were passed forth or back in training", counters.units),
        (count, "failures", "Steps and passes that could not be computed", counters.failures),
        (now, "sessions", "Sessions that have a place", admission.running),
        (now, "queue", "Sessions that wait for a place", admission.waiting),
        (now, "passes", "Forward and backward passes that wait or run", service.passes),
        (now, "cache_pages_promised", "Cache pages promised to sessions", admission.promised),
        (now, "cache_pages_shared", "Cache pages that several rows use", pool.shared),
        (
            now,
            "cache_page_tokens",
            "Tokens of one row that a cache page holds, for one group of blocks",
            pool.page_size,
        ),
        (now, "cache_groups", "Groups of blocks that have cache pages of their own", admission.groups),
        (now, "draining", "1 while the server is about to leave", int(service.draining)),
    ):
        family = kind(f"lilliput_server_{name}", text, labels=_LABELS)
        family.add_metric(names, value)
        yield family
    pages = GaugeMetricFamily("lilliput_server_cache_pages", "Cache pages: used by sessions, kept for prefixes "
                              "that may return, free", labels=(*_LABELS, "state"))  # fmt: skip
    used, kept = pool.used, pool.kept
    for state, value in (("used", used), ("kept", kept), ("free", max(pool.count - used - kept, 0))):
        pages.add_metric((*names, state), value)
    yield pages
    yield _histogram(names, "batch_rows", "Rows that were computed in one round", counters.batches)
    yield _histogram(names, "step_queued_seconds", "From a step's arrival to its first round", counters.queued)
    yield _histogram(names, "step_computing_seconds", "In the rounds that a step was part of", counters.computing)


def _histogram(names: tuple[str, str], name: str, text: str, seen: Histogram) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"lilliput_server_{name}", text, labels=_LABELS)
    bounds = [*map(str, map(float, seen.bounds)), "+Inf"]
    family.add_metric(names, list(zip(bounds, itertools.accumulate(seen.counts), strict=True)), sum_value=seen.sum)
    return family


class MetricsPage:
    """Answers Prometheus at `http://HOST:PORT/metrics`, in threads of its own.

    :param port: 0 takes a free one

    Raises `BadRequest` if nobody can listen there.
    """

    def __init__(self, service: Callable[[], Service | None], host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(ServerMetrics(service))
        self._server: WSGIServer
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as e:
            raise BadRequest(f"cannot serve metrics on {host}, port {port}: {e.strerror or e}") from e
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def __enter__(self) -> MetricsPage:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
