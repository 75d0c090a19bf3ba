"""Starting the p2p daemon, however busy the machine is."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Any

from hivemind.p2p import P2P, P2PDaemonError

from lilliput.errors import SwarmError, Unreachable
from lilliput.swarm.sockets import remove_stale_sockets

log = logging.getLogger(__name__)

#: a daemon starts in 0.2 s; when many start at once on a slow machine it takes far longer
STARTUP_SECONDS = 60.0
#: how often starting is tried again when the daemon was too slow or the bootstrap peers are not there yet
STARTUP_ATTEMPTS = 3
STOP_SECONDS = 3.0
#: a fork takes milliseconds
_FORK_AGAIN_SECONDS = 0.01, 0.1


async def start_daemon(options: dict[str, Any], kind: type[P2P]) -> P2P:
    """A daemon with `P2P.create`'s options. Raises `SwarmError`, or `Unreachable` if no initial peer is there."""
    for attempt in range(1, STARTUP_ATTEMPTS + 1):
        try:
            return await _create(options, kind)
        except P2PDaemonError as e:
            remove_stale_sockets()  # a daemon that fails leaves its own behind
            reason = reason_of(e)
            nobody = "bootstrap peers" in reason
            if not nobody and "failed to start in" not in reason:
                raise SwarmError(f"the p2p daemon did not start: {reason}") from e
            if attempt == STARTUP_ATTEMPTS:
                if nobody:
                    raise nobody_answers(options["initial_peers"]) from e
                raise SwarmError(
                    f"the p2p daemon did not start in {options['startup_timeout']:.0f} s, {attempt} times in a row; "
                    "is this machine overloaded? A longer startup timeout may help"
                ) from e
            log.info("the p2p daemon did not start (%s); trying again", reason)
            await asyncio.sleep(0.5)
        except (OSError, ValueError) as e:
            raise SwarmError(f"the p2p daemon did not start: {e}") from e
    raise AssertionError("unreachable")


async def _create(options: dict[str, Any], kind: type[P2P]) -> P2P:
    """`P2P.create`, which leaves its daemon running when cancelled. This does not."""
    starting = asyncio.ensure_future(_create_in_turn(options, kind))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait({starting}, timeout=STOP_SECONDS)
        if starting.done() and not starting.cancelled() and starting.exception() is None:
            await starting.result().shutdown()
        else:
            starting.cancel()
        raise


async def _create_in_turn(options: dict[str, Any], kind: type[P2P]) -> P2P:
    """`P2P.create` beside those of other event loops in this process, only one of which uvloop lets fork at a time."""
    while True:
        try:
            return await kind.create(**options)
        except RuntimeError as e:
            if "Racing with another loop" not in str(e):
                raise
            await asyncio.sleep(random.uniform(*_FORK_AGAIN_SECONDS))


def daemon_ended() -> SwarmError:
    """Ours has, and nobody told it to."""
    return SwarmError(
        "this peer's p2p daemon has ended, so nothing comes or goes: was it killed, or is memory short? Start again"
    )


def nobody_answers(initial_peers: Sequence[str]) -> Unreachable:
    """None of these peers does."""
    return Unreachable(
        f"none of the initial peers answers ({', '.join(initial_peers)}); "
        "are they running, and is the address (with the peer id at its end) right?"
    )


def reason_of(error: BaseException) -> str:
    """What the daemon said, without its own date and prefix."""
    text = " ".join(str(error).split()) or type(error).__name__
    for prefix in ("Daemon failed to start: ", "Connect failed. msg="):
        text = text.removeprefix(prefix)
    words = text.split(" ", 2)
    return words[2] if len(words) == 3 and words[0].count("/") == 2 and words[0][:1].isdigit() else text
