"""What was measured, as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path


@dataclass
class Figure:
    """One measure: every round's value, ours and transformers'."""

    name: str
    unit: str
    values: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def reference_median(self) -> float | None:
        return statistics.median(self.reference) if self.reference else None

    @property
    def ratio(self) -> float | None:
        """How many times transformers' figure ours is, round by round."""
        pairs = list(zip(self.values, self.reference, strict=False))
        return statistics.median(ours / theirs for ours, theirs in pairs) if pairs else None


@dataclass
class Report:
    """All figures of a run, and the machine that they were taken on."""

    model: str
    dtype: str
    servers: int
    machine: dict[str, str | int | float] = field(default_factory=lambda: machine())
    figures: list[Figure] = field(default_factory=list)

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)

    def to_json(self) -> str:
        figures = [
            {**asdict(f), "median": f.median, "reference_median": f.reference_median, "ratio": f.ratio}
            for f in self.figures
        ]
        return json.dumps({**asdict(self), "figures": figures}, indent=1) + "\n"

    def show(self, file: Path) -> None:
        from rich.console import Console
        from rich.table import Table

        title = f"{self.model}, {self.dtype}, {self.servers} servers and a client on one machine"
        table = Table(title=title, title_justify="left")
        for column in ("", "Lilliput", "transformers here", "ratio"):
            table.add_column(column, justify="left" if not column else "right")
        for f in self.figures:
            theirs = f.reference_median
            table.add_row(
                f"{f.name}, {f.unit}" + (f" [dim]{f.note}[/dim]" if f.note else ""),
                _number(f.median),
                "" if theirs is None else _number(theirs),
                "" if f.ratio is None else f"{f.ratio:.2f}",
            )
        console = Console()
        console.print(table)
        facts = self.machine
        console.print(
            f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gib']} GiB, load {facts['load']} at the "
            f"start; Python {facts['python']}, torch {facts['torch']}, transformers {facts['transformers']}. "
            f"Every round's figures are in {file}."
        )


def machine() -> dict[str, str | int | float]:
    """What the figures depend on."""
    import psutil

    return {
        "processor": _processor(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "hivemind")},
        "time": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
