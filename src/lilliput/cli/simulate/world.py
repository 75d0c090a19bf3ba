"""A swarm of thousands of servers as records and events: placement and routing are the real ones, time is not."""

from __future__ import annotations

import contextlib
import heapq
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lilliput.cli.simulate.flow import most_throughput
from lilliput.client.route import find_chain
from lilliput.errors import MissingBlocks
from lilliput.swarm.directory import LEASE_SECONDS
from lilliput.swarm.placement import (
    LOOKS_TO_STAY,
    SECOND_LOOK_SECONDS,
    Coverage,
    Span,
    best_span,
    better_claim,
    better_span,
    jittered,
)
from lilliput.swarm.records import ServerRecord, State

#: machines by memory for weights (GB), how fast they read it (GB/s), and their share of the swarm: small computers,
#: laptops, desktops, graphics cards of two sizes
MACHINES = ((4, 30, 0.30), (8, 60, 0.30), (16, 200, 0.20), (24, 400, 0.15), (48, 900, 0.05))
#: how unlike machines of a kind are: the spread of the logarithm of their speed
_SPREAD = 0.3
#: of a machine's memory, for weights
_FOR_WEIGHTS = 0.8
#: until others see what a server has announced, on average (seconds)
_NEWS_SECONDS = 1.0
#: fetching and reading a block, and measuring
_LOAD_SECONDS_A_BLOCK = 20.0
#: sessions move to others
_DRAIN_SECONDS = 5.0
_LOOK_SECONDS = 120.0
_THROUGHPUT_EVERY = 300.0
_ROUTE_EVERY = 900.0
#: to a server and back: the median, and the spread of the logarithm
_ROUND_TRIP_SECONDS, _ROUND_TRIP_SPREAD = 0.04, 0.5


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    :ivar blocks: of the model
    :ivar block_gigabytes: of one block's weights
    :ivar servers: on average
    :ivar coverage: instead of `servers`, as many as hold the model so often
    :ivar departures: share of the servers that leave in an hour; as many others join
    :ivar silent: share of those that leave without a goodbye
    """

    blocks: int
    block_gigabytes: float
    hours: float
    servers: int = 0
    coverage: float | None = None
    departures: float = 0.1
    silent: float = 0.5
    seed: int = 0


@dataclass
class Result:
    """What came of it. Throughputs are shares of the sum of all living servers' rates through the number of blocks: no
    placement can do better."""

    servers: float = 0.0
    joins: int = 0
    departures: int = 0
    moves: int = 0
    server_hours: float = 0.0
    #: seconds in which some block had no server, and how often that began
    hole_seconds: float = 0.0
    holes: int = 0
    seconds: float = 0.0
    #: (hour, share of the optimum that could be reached, share that the weakest block has if servers share evenly)
    throughput: list[tuple[float, float, float]] = field(default_factory=list)
    #: (hour, how often living servers could hold the model, how many hold the block that fewest hold)
    held: list[tuple[float, float, int]] = field(default_factory=list)
    hops: list[int] = field(default_factory=list)
    route_ms: list[float] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        return {
            "servers": round(self.servers),
            "coverage": statistics.mean(coverage for _, coverage, _ in self.held),
            "coverage_least": min(coverage for _, coverage, _ in self.held),
            "holders_least": min(holders for _, _, holders in self.held),
            "joins": self.joins,
            "departures": self.departures,
            "moves": self.moves,
            "moves_per_server_and_hour": self.moves / self.server_hours,
            "served_share_of_time": 1 - self.hole_seconds / self.seconds,
            "holes": self.holes,
            "throughput_share": statistics.mean(share for _, share, _ in self.throughput),
            "throughput_share_least": min(share for _, share, _ in self.throughput),
            "throughput_share_even": statistics.mean(even for _, _, even in self.throughput),
            "hops": statistics.mean(self.hops) if self.hops else None,
            "route_ms": statistics.median(self.route_ms) if self.route_ms else None,
            "route_ms_most": max(self.route_ms, default=None),
        }


@dataclass(eq=False)
class _Server:
    """:ivar rate: tokens a second through one block"""

    name: str
    length: int
    rate: float
    span: Span = (0, 0)
    serves: bool = False
    gone: bool = False
    stays_until: float = 0.0


class World:
    """Runs one scenario: `World(scenario).run()`."""

    def __init__(self, scenario: Scenario, progress: Callable[[float], None] = lambda share: None) -> None:
        self._scenario, self._progress = scenario, progress
        #: who comes and goes, when: the same for every way to place them
        self._fate = random.Random(scenario.seed)
        #: the waits in between
        self._random = random.Random(scenario.seed)
        self._now, self._events, self._number = 0.0, list[tuple[float, int, Callable[[], None]]](), 0
        self._servers: dict[str, _Server] = {}
        self._made = 0
        #: what the directory tells, and what of it is counted in `_coverage`
        self._seen: dict[str, ServerRecord] = {}
        self._coverage = Coverage.of([], scenario.blocks)
        self._holders = np.zeros(scenario.blocks, dtype=np.int64)  # in truth
        self._hole_since: float | None = None
        self._round_trips: dict[str, float | None] = {}
        self._result = Result()

    def run(self) -> Result:
        scenario, result = self._scenario, self._result
        self._populate()
        end = scenario.hours * 3600
        leave_rate = scenario.departures / 3600
        if leave_rate:
            self._in(self._fate.expovariate(leave_rate * len(self._servers)), self._arrive, len(self._servers))
        self._in(0.0, self._measure_throughput)
        self._in(0.0, self._measure_route)
        while self._events and self._events[0][0] < end:
            at, _, act = heapq.heappop(self._events)
            result.server_hours += (at - self._now) / 3600 * len(self._servers)
            self._now = at
            act()
        result.seconds = end
        result.server_hours += (end - self._now) / 3600 * len(self._servers)
        result.servers = result.server_hours / scenario.hours
        if self._hole_since is not None:
            result.hole_seconds += end - self._hole_since
        return result

    # ---- what happens ----

    def _populate(self) -> None:
        """Servers that came one after the other, long ago."""
        scenario, held = self._scenario, 0
        wanted = (scenario.coverage or 0.0) * scenario.blocks
        while len(self._servers) < scenario.servers or held < wanted:
            server = self._make()
            held += server.length
            server.span = best_span(self._coverage, server.length, server.rate)
            self._see(server.name, self._record(server, "serving"))
            self._set_serving(server, True)
            self._in(_LOOK_SECONDS * self._random.random(), self._look, server)

    def _make(self) -> _Server:
        scenario, chance = self._scenario, self._fate
        while True:
            (memory, bandwidth, _) = chance.choices(MACHINES, [share for _, _, share in MACHINES])[0]
            length = min(int(memory * _FOR_WEIGHTS / scenario.block_gigabytes), scenario.blocks)
            if length:
                break
        rate = bandwidth * chance.lognormvariate(0.0, _SPREAD) / scenario.block_gigabytes
        self._made += 1
        server = _Server(f"server-{self._made}", length, rate)
        self._servers[server.name] = server
        self._round_trips[server.name] = _ROUND_TRIP_SECONDS * chance.lognormvariate(0.0, _ROUND_TRIP_SPREAD)
        if scenario.departures:
            silent = chance.random() < scenario.silent
            self._in(chance.expovariate(scenario.departures / 3600), self._depart, server, silent)
        return server

    def _arrive(self, usually: int) -> None:
        self._in(self._fate.expovariate(self._scenario.departures / 3600 * usually), self._arrive, usually)
        self._result.joins += 1
        server = self._make()
        self._aim(server, best_span(self._coverage, server.length, server.rate))

    def _aim(self, server: _Server, span: Span, looks: int = 2) -> None:
        """Say where one is going, wait a moment, see whether others go there, too."""
        server.span = span
        self._announce(server, "joining")

        def look_again() -> None:
            with self._others(server) as others:
                elsewhere = better_claim(others, span, server.rate)
            if looks and elsewhere is not None:
                self._aim(server, elsewhere, looks - 1)
            else:
                self._load(server, span)

        self._in(jittered(SECOND_LOOK_SECONDS, self._random.random()), look_again, of=server)

    def _load(self, server: _Server, span: Span) -> None:
        server.span = span
        self._announce(server, "joining")
        self._in(_LOAD_SECONDS_A_BLOCK * server.length, self._serve, server)

    def _serve(self, server: _Server) -> None:
        if not server.gone:
            self._set_serving(server, True)
            self._announce(server, "serving")
            self._in(jittered(_LOOK_SECONDS, self._random.random()), self._look, server)

    def _look(self, server: _Server) -> None:
        """See whether to move."""
        if server.gone:
            return
        wait = jittered(_LOOK_SECONDS, self._random.random())
        span = None
        if self._now >= server.stays_until:
            with self._others(server) as others:
                span = better_span(others, server.span, server.rate)
        if span is None:
            self._in(wait, self._look, server)
            return
        self._announce(server, "serving", span)

        def look_again() -> None:
            with self._others(server) as others:
                span = better_span(others, server.span, server.rate)
            if span is None:
                self._serve(server)
                return
            self._set_serving(server, False)
            server.stays_until = self._now + LOOKS_TO_STAY * wait
            self._result.moves += 1
            self._announce(server, "draining", span)
            self._in(_DRAIN_SECONDS, self._load, server, span, of=server)

        self._in(jittered(SECOND_LOOK_SECONDS, self._random.random()), look_again, of=server)

    def _depart(self, server: _Server, silent: bool) -> None:
        self._result.departures += 1
        server.gone = True
        del self._servers[server.name], self._round_trips[server.name]
        self._set_serving(server, False)
        # the last announcement was up to a third of a lease ago
        lease = LEASE_SECONDS * (1 - self._random.random() / 3) if silent else self._delay()
        self._in(lease, self._see, server.name, None)

    # ---- what others see ----

    def _record(self, server: _Server, state: State, moving_to: Span | None = None) -> ServerRecord:
        start, end = server.span
        rate = server.rate / (end - start)
        return ServerRecord(
            peer_id=server.name,
            model="model",
            start=start,
            end=end,
            state=state,
            tokens_per_second=rate,
            throughput=rate,
            moving_to=moving_to,
        )

    def _announce(self, server: _Server, state: State, moving_to: Span | None = None) -> None:
        self._in(self._delay(), self._see, server.name, self._record(server, state, moving_to), of=server)

    def _see(self, name: str, record: ServerRecord | None) -> None:
        if (before := self._seen.pop(name, None)) is not None:
            self._coverage.add(before, sign=-1)
        if record is not None:
            self._seen[name] = record
            self._coverage.add(record)

    @contextlib.contextmanager
    def _others(self, server: _Server) -> Iterator[Coverage]:
        """What the others hold, as far as a server can see."""
        mine = self._seen.get(server.name)
        if mine is not None:
            self._coverage.add(mine, sign=-1)
        yield self._coverage
        if mine is not None:
            self._coverage.add(mine)

    def _delay(self) -> float:
        return jittered(_NEWS_SECONDS, self._random.random())

    # ---- what is measured ----

    def _set_serving(self, server: _Server, serves: bool) -> None:
        if server.serves == serves:
            return
        server.serves = serves
        self._holders[server.span[0] : server.span[1]] += 1 if serves else -1
        if self._holders.all():
            if self._hole_since is not None:
                self._result.hole_seconds += self._now - self._hole_since
                self._hole_since = None
        elif self._hole_since is None and self._now > 0:
            self._hole_since = self._now
            self._result.holes += 1

    def _measure_throughput(self) -> None:
        blocks = self._scenario.blocks
        serving = [(*server.span, server.rate) for server in self._servers.values() if server.serves]
        even = np.zeros(blocks)
        for start, end, rate in serving:
            even[start:end] += rate / (end - start)
        optimum = sum(server.rate for server in self._servers.values()) / blocks
        hour = self._now / 3600
        share = most_throughput(serving, blocks) / optimum
        self._result.throughput.append((hour, share, float(even.min()) / optimum))
        coverage = sum(server.length for server in self._servers.values()) / blocks
        self._result.held.append((hour, coverage, int(self._holders.min())))
        self._progress(hour / self._scenario.hours)
        self._in(_THROUGHPUT_EVERY, self._measure_throughput)

    def _measure_route(self) -> None:
        records = list(self._seen.values())
        begun = time.perf_counter()
        try:
            chain = find_chain(records, 0, self._scenario.blocks, round_trips=self._round_trips, pushes=True)
        except MissingBlocks:
            pass
        else:
            self._result.route_ms.append((time.perf_counter() - begun) * 1e3)
            self._result.hops.append(len(chain))
        self._in(_ROUTE_EVERY, self._measure_route)

    def _in(self, seconds: float, act: Callable[..., None], *args: Any, of: _Server | None = None) -> None:
        """Do something in so many seconds, unless the server that it is of has gone by then."""

        def event() -> None:
            if of is None or not of.gone:
                act(*args)

        self._number += 1
        heapq.heappush(self._events, (self._now + seconds, self._number, event))
