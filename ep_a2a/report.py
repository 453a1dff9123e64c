"""What the demo shows: progress, tables and the traffic matrix, by rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ep_a2a.config import Config

_SHADES = ("grey30", "steel_blue", "dodger_blue2", "deep_sky_blue1", "cyan1")


class Report:
    """Prints on one rank and does nothing on the others."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(quiet=quiet, width=None if Console().is_terminal else 120)

    def title(self, text: str) -> None:
        """A headline."""
        self._console.rule(f"[bold]{text}")

    def success(self, text: str) -> None:
        """The last line of a run that went well."""
        self._console.print(f"[bold green]{text}")

    def failure(self, text: str) -> None:
        """What went wrong."""
        self._console.print(f"[bold red]{text}")

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar of `total` steps; the value is the function that makes one."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=self._console.is_terminal) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)

    def layer(self, name: str, config: Config, row_bytes: int, ranks: Sequence[dict[str, Any]]) -> None:
        """Tables of one layer; `ranks` are the rows that the demo gathered."""
        self._console.print(
            f"\n[bold]{name}[/]: hidden {config.hidden}, top-{config.top_k} of {config.num_experts} experts, "
            f"{config.payload} rows of {row_bytes} B, {config.combine} results"
        )
        result_bytes = config.hidden * config.combine.columns[0].dtype.itemsize
        table = Table(title="per rank (times: median of the timed rounds)")
        phases = list(ranks[0]["ms"])
        for heading in ("rank", "tokens", "rows in", "MB in", "MB back", "pairs", *(f"{p} ms" for p in phases)):
            table.add_column(heading, justify="right")
        table.add_column("max |error|", justify="right")
        table.add_column("error / bound", justify="right")
        for row in ranks:
            rows_in = sum(row["from"])
            moved = (f"{rows_in * num_bytes / 1e6:.3f}" for num_bytes in (row_bytes, result_bytes))
            cells = [row["rank"], row["out"], rows_in, *moved, row["pairs"]]
            cells += [f"{row['ms'][phase]:.1f}" for phase in phases]
            cells += [f"{row['error']:.2e}", f"{row['ratio']:.0%}"]
            table.add_row(*map(str, cells), style=None if row["ratio"] <= 1 else "bold red")
        self._console.print(table)
        self._console.print(
            "rows in and MB in: dispatched to this rank, its own included; MB back: its results; pairs: of a row and a "
            "local expert; combine includes waiting for the slowest rank's experts",
            style="dim",
        )
        self._traffic([row["from"] for row in ranks], row_bytes)

    def _traffic(self, rows_from: Sequence[Sequence[int]], row_bytes: int) -> None:
        """kB of rows from each source (line) to each destination (column), brighter where there is more."""
        table = Table(title="dispatch traffic, kB from the rank of the line to the rank of the column")
        table.add_column("from \\ to", justify="right")
        most = max(1, *(n for rows in rows_from for n in rows))
        for rank in range(len(rows_from)):
            table.add_column(str(rank), justify="right")
        for source in range(len(rows_from)):
            cells = []
            for rows in rows_from:
                shade = _SHADES[min(len(_SHADES) - 1, rows[source] * len(_SHADES) // (most + 1))]
                cells.append(Text(f"{rows[source] * row_bytes / 1e3:.1f}", style=shade))
            table.add_row(str(source), *cells)
        self._console.print(table)
