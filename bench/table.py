"""The tables of a run on the screen, and its progress on standard error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
WIDTH = 150  # where the screen is none
MOST_ROWS = 100  # more are in the file only
SMALL_TOKENS = 64  # up to here launches count
MOST_EMPTY = 0.8  # of a time: then what is left of it tells nothing
PLAIN = ("copy", "memset", "stream", "empty")
SHAPE = ("world", "ranks", "hidden", "top_k", "payload", "routing", "num_sms", "op")


class Progress:
    """A bar on standard error: the cases done, the one under way, and messages above it. Without cases: silent."""

    def __init__(self, num_cases: int) -> None:
        columns = (bars.TextColumn("{task.description:40}"), bars.BarColumn(), bars.MofNCompleteColumn())
        console = Console(stderr=True)
        self._bar = bars.Progress(*columns, bars.TimeElapsedColumn(), console=console, disable=not num_cases)
        self._task = self._bar.add_task("", total=num_cases)
        self._is_silent = not num_cases

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, what: str) -> None:
        """A case begins."""
        self._bar.update(self._task, description=what)

    def end(self) -> None:
        """It has ended."""
        self._bar.advance(self._task)

    def tell(self, text: str) -> None:
        """A line above the bar."""
        if not self._is_silent:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


def show(rows: Sequence[Row]) -> None:
    """All rows, unless they are very many, then what they are of each other; dispatch comes last."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    rows = sorted(rows, key=lambda row: row["op"] == "dispatch")
    for table in (*(details(rows) if len(rows) <= MOST_ROWS else ()), *ratios(rows)):
        console.print(table)
    console.print(
        "pair = dispatch + combine; MB = read + written on all ranks; floor = MB at the copy rate of this run; "
        f"less empty: both times without that of an empty kernel on each rank, unless it is over {MOST_EMPTY} of either"
    )


def shapes(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by shape, world and operation, in their order."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["op"] != "copy":
            found.setdefault(tuple(row[name] for name in SHAPE), []).append(row)
    return found


def title(row: Row) -> str:
    """What all rows of a shape have in common."""
    sms = f", at most {row['num_sms']} CTAs" if row["num_sms"] else ""
    shape = f"H{row['hidden']}, top-{row['top_k']}, {row['payload'].upper()}, {row['routing']}{sms}"
    return f"{row['op']}, {row['ranks']} ranks ({row['world']}), {shape}"


def rate(rows: Sequence[Row]) -> str:
    """The copy rate of the run, where it was kept."""
    copy = next((row for row in rows if row["op"] == "copy"), None)
    return f"; copy {copy['bytes'] / copy['us'] / 1e3:.3g} GB/s" if copy else ""


def details(rows: Sequence[Row]) -> list[Table]:
    """A table for each shape and operation, a line a row."""
    found = []
    for group in shapes(rows).values():
        table = Table(title=title(group[0]) + rate(rows))
        for heading in ("tokens", "variant", "schedule", "us", "min", "max", "MB", "GB/s", "floor us", "floor / us"):
            table.add_column(heading, justify="left" if heading in ("variant", "schedule") else "right")
        for row, after in zip(group, [*group[1:], None]):
            cells = [row["tokens"], row["variant"], row["schedule"] or ""]
            cells += [number(row[name]) for name in ("us", "us_min", "us_max")]
            if row["bytes"]:
                cells += [f"{row['bytes'] / 1e6:.2f}", f"{row['bytes'] / row['us'] / 1e3:.3g}", number(row["floor_us"])]
                cells += [f"{row['floor_us'] / row['us']:.2f}"]
            ends = after is None or after["tokens"] != row["tokens"]
            table.add_row(*map(str, cells), end_section=ends)
        found.append(table)
    return found


def number(us: float) -> str:
    """Three digits or more."""
    return f"{us:.0f}" if us >= 1000 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def ratios(rows: Sequence[Row]) -> list[Table]:
    """Ours against the others, a table for each shape and operation that has others, a line for each token count."""
    found = []
    for group in shapes(rows).values():
        names = list(dict.fromkeys(row["variant"] for row in group))
        peers = [name for name in names if name not in PLAIN and not name.startswith("ours")]
        others = [name for name in ("ours-bf16", "ours-general") if name in names] + peers
        if "ours" not in names or not others:
            continue
        table = Table(title=f"ours / others: {title(group[0])}")
        for heading in ("tokens", "schedule", "ours us", "floor / ours", "empty us"):
            table.add_column(heading, justify="left" if heading == "schedule" else "right")
        for name in others:
            short = name.replace("flashinfer-", "FI ").replace("ours-", "")
            for heading in (f"{short} us", f"ours / {short}", "less empty"):
                table.add_column(heading, justify="right")
        for tokens in dict.fromkeys(row["tokens"] for row in group):
            here = [row for row in group if row["tokens"] == tokens]
            for ours in [row for row in here if row["variant"] == "ours"]:
                table.add_row(*ratio_cells(ours, here, others))
        found.append(table)
    return found


def ratio_cells(ours: Row, here: Sequence[Row], others: Sequence[str]) -> list[str]:
    """A line of `ratios`."""
    us = {row["variant"]: row["us"] for row in here if row["variant"] != "ours"}
    own, empty = ours["us"], us.get("empty")
    cells = [str(ours["tokens"]), ours["schedule"] or "", number(own), f"{ours['floor_us'] / own:.2f}"]
    cells.append("" if empty is None else number(empty))
    for name in others:
        if name not in us:
            cells += ["", "", ""]
            continue
        less = less_empty(own, us[name], empty) if ours["tokens"] <= SMALL_TOKENS else None
        cells += [number(us[name]), f"{own / us[name]:.3f}", "" if less is None else f"{less:.3f}"]
    return cells


def less_empty(ours_us: float, peer_us: float, empty_us: float | None) -> float | None:
    """The ratio of what both take beyond an empty kernel; None where that is most of either."""
    if empty_us is None or empty_us > MOST_EMPTY * min(ours_us, peer_us):
        return None
    return (ours_us - empty_us) / (peer_us - empty_us)
