"""Commands."""

from __future__ import annotations

import signal


def run() -> None:
    """The program `lilliput`. Ctrl-C while its modules are read ends it without a word; nothing is begun by then."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # or else it shall be deaf
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lilliput.cli.main import main

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
