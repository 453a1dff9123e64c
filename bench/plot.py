#!/usr/bin/env python3
"""Figures of what bench/a2a.py measured, and of who sends how much to whom.

    python bench/plot.py [FILE ...] [--out FOLDER]

From the rows of the files (bench/results/h200_a2a.json if none is given): for each operation and shape the time and the
rate against tokens, and how much faster the best peer is outdone. `traffic` needs no file: the bytes from rank to rank
for several routings. PNG and SVG go to docs/figures. Of rows of the same thing the last one counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

ROOT = Path(__file__).resolve().parent.parent
try:
    import ep_a2a
except ModuleNotFoundError:  # run from a checkout without an installed package
    sys.path.insert(0, str(ROOT))
    import ep_a2a
sys.path.append(str(ROOT))

from bench import harness  # noqa: E402
from bench.cases import PAYLOADS  # noqa: E402
from ep_a2a import testing  # noqa: E402

Row = dict[str, Any]
Points = dict[int, float]  # by tokens
SHAPE = ("device", "world", "op", "hidden", "top_k", "payload", "routing", "num_sms")
NO_PEERS = ("ours", "ours-bf16", "ours-general", "copy", "memset", "stream", "empty")
STYLES = {  # colours that the colour-blind tell apart, and a marker each
    "ours": ("#0072B2", "o", "-"),
    "ours-bf16": ("#0072B2", "", ":"),
    "ours-general": ("#56B4E9", "v", "-"),
    "flashinfer-0.7.4": ("#D55E00", "s", "-"),
    "flashinfer-0.7.0-phased": ("#E69F00", "D", "-"),
    "flashinfer-0.7.0-generic": ("#CC79A7", "^", "-"),
    "nccl": ("#009E73", "P", "-"),
    "empty": ("#888888", "", "-."),
    "stream": ("#000000", "", ":"),
    "floor": ("#000000", "", "--"),
}
NAMES = {
    "ours": "ep_a2a",
    "ours-bf16": "ep_a2a, given bf16",
    "ours-general": "ep_a2a, general schedule",
    "nccl": "NCCL all-to-all",
    "empty": "empty kernels",
    "stream": "the same bytes, contiguous",
    "floor": "floor (bytes at copy rate)",
}
ROUTINGS = {"uniform": "uniform", "zipf": "Zipf", "all_to_one": "all to one rank", "holes": "uniform, a third are -1"}
LABEL_GAP = 0.058  # between the labels of two lines, of a panel's height
MIN_TOKEN_COUNTS = 3  # of a figure: fewer make no line
DPI = 150
LABEL_WIDTH = 0.48  # that of the lines is 1
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "svg.hashsalt": "ep_a2a",
    "svg.fonttype": "none",
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[ROOT / "bench" / "results" / "h200_a2a.json"])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    parser.add_argument("--ops", nargs="+", default=["dispatch"], help="of which there are figures")
    parser.add_argument("--traffic-ranks", type=int, default=8)
    wanted = parser.parse_args(words)
    for file in wanted.files:
        if not file.exists():
            raise SystemExit(f"{file}: no such file; bench/a2a.py --out writes it")
    rows = [row for file in wanted.files for row in harness.read(file) if row["op"] in wanted.ops]
    with plt.rc_context(STYLE):
        figures = {"traffic": traffic_figure(wanted.traffic_ranks)}
        for name, group in shapes(rows).items():
            if len({row["tokens"] for row in group}) < MIN_TOKEN_COUNTS:
                continue
            figures[name] = speed_figure(group)
            if found := speedup_figure(group):
                figures[f"{name}_speedup"] = found
        for name, figure in figures.items():
            save(figure, wanted.out / name)
    return 0


def save(figure: Figure, path: Path) -> None:
    """As PNG and SVG, the same bytes for the same rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".png"), dpi=DPI, metadata={"Software": None})
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)
    print(path.with_suffix(".png"))


# ---- rows --------------------------------------------------------------------------------------------------------


def shapes(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each figure, by the name of its file."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        device = row["device"].replace("NVIDIA", "").split(",")[0].split("(")[0].strip()
        sms = f"sms{row['num_sms']}" if row["num_sms"] else ""
        words = [device, row["op"], f"h{row['hidden']}", f"k{row['top_k']}", row["payload"], row["routing"], sms]
        words.insert(1, "" if row["world"] == "local" else row["world"])
        name = "_".join(word for word in words if word).lower().replace(" ", "-")
        found.setdefault(name, []).append(row)
    return found


def series(rows: Sequence[Row], ranks: int, field: str = "us") -> dict[tuple[str, str], Points]:
    """A field by tokens for each variant and, where several schedules of ours were forced, schedule."""
    found: dict[tuple[str, str], Points] = {}
    for row in rows:
        if row["ranks"] == ranks:
            forced = row["schedule"] if row["variant"] == "ours" and row["choice"] == "forced" else ""
            found.setdefault((row["variant"], forced or ""), {})[row["tokens"]] = row[field]
    order = list(STYLES)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0][0]) if item[0][0] in order else len(order)))


def floors(rows: Sequence[Row], ranks: int) -> Points:
    """The floor by tokens."""
    ours = [row for row in rows if row["ranks"] == ranks and row["variant"].startswith("ours")]
    return {row["tokens"]: row["floor_us"] for row in ours}


def title_of(row: Row) -> str:
    """Device, world and shape, in words."""
    world = "all ranks on one GPU" if row["world"] == "local" and "H200" in row["device"] else row["world"]
    shape = f"hidden {row['hidden']}, top-{row['top_k']}, {row['payload'].upper()} rows"
    routing = ROUTINGS.get(row["routing"], row["routing"])
    sms = f", at most {row['num_sms']} CTAs a kernel" if row["num_sms"] else ""
    return f"{row['device']}, {world} · {shape}, routing {routing}{sms}"


# ---- time and rate against tokens --------------------------------------------------------------------------------


def speed_figure(rows: Sequence[Row]) -> Figure:
    """Time above, rate below; a column for each number of ranks."""
    all_ranks = sorted({row["ranks"] for row in rows})
    all_us: list[float] = []
    figure, panels = plt.subplots(2, len(all_ranks), figsize=(1 + 6 * len(all_ranks), 8.6), squeeze=False, sharey="row")
    for column, ranks in enumerate(all_ranks):
        times = series(rows, ranks)
        moved = {tokens: row_bytes for row_bytes, tokens in bytes_moved(rows, ranks)}
        floor = floors(rows, ranks)
        times.pop(("memset", ""), None)
        rated = {key: points for key, points in times.items() if key[0] != "empty"}
        time_panel, rate_panel = panels[:, column]
        draw(time_panel, {**times, ("floor", ""): floor})
        draw(rate_panel, {key: rates(points, moved) for key, points in {**rated, ("floor", ""): floor}.items()})
        all_us += [us for points in times.values() for us in points.values()]
        time_panel.set_title(f"{ranks} ranks (EP{ranks})", loc="left", fontweight="bold")
        for panel in (time_panel, rate_panel):
            panel.set_xlabel("tokens of each rank")
    panels[0][0].set_ylim(min(all_us) / 2, max(20 * min(all_us), 1.6 * max(all_us)))  # of the row
    panels[0][0].set_ylabel("time of one round's " + rows[0]["op"] + ", us (less is better)")
    panels[1][0].set_ylabel("read + written on all ranks, GB/s (more is better)")
    title = f"{rows[0]['op'].capitalize()} · {title_of(rows[0])}"
    if len(all_ranks) == 1:  # a narrow figure
        title = "\n".join(title.rsplit(" · ", 1))
    figure.suptitle(title, x=0.02, ha="left", fontweight="bold")
    figure.text(0.02, 0.012, footnote(rows), fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.025, 1, 0.98))
    for panel in panels.flat:  # when all places are final
        label_ends(panel)
    return figure


def footnote(rows: Sequence[Row]) -> str:
    """Where the numbers come from."""
    runs, commits = (sorted({row[name] for row in rows}) for name in ("run", "commit"))
    what = "medians of CUDA-graph replays" if "NVIDIA" in rows[0]["device"] else "medians"
    return f"{what}; run {', '.join(runs[-2:])}, commit {', '.join(commits[-2:])}"


def bytes_moved(rows: Sequence[Row], ranks: int) -> list[tuple[int, int]]:
    """Bytes and tokens of each case."""
    return [
        (row["bytes"], row["tokens"]) for row in rows if row["ranks"] == ranks and row["variant"].startswith("ours")
    ]


def rates(points: Points, moved: dict[int, int]) -> Points:
    """GB/s of times in us."""
    return {tokens: moved[tokens] / us / 1e3 for tokens, us in points.items() if tokens in moved and us}


def draw(panel: Axes, lines: dict[tuple[str, str], Points]) -> None:
    """The lines of a panel, both axes logarithmic."""
    for (name, schedule), points in lines.items():
        tokens = sorted(points)
        color, marker, dashes = STYLES.get(name, ("#000000", "x", "-"))
        if schedule == "general":  # two lines of ours
            color, marker = STYLES["ours-general"][:2]
        label = NAMES.get(name, name.replace("flashinfer-", "FlashInfer ").replace("-", " "))
        label += f", {schedule}" if schedule else ""
        width = 2.4 if name == "ours" else 1.4
        panel.plot(
            tokens, [points[one] for one in tokens], dashes, color=color, marker=marker, ms=5, lw=width, label=label
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    ticks = sorted({tokens for points in lines.values() for tokens in points})
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_locator(NullLocator())
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    panel.xaxis.set_major_formatter(plain)
    panel.yaxis.set_major_formatter(plain)
    panel.tick_params(axis="x", labelrotation=45)
    panel.tick_params(labelbottom=True, labelleft=True)


def label_ends(panel: Axes) -> None:
    """The name of each line at its right end, moved apart where they would touch."""
    low, high = panel.get_xlim()
    panel.set_xlim(low, high * (high / low) ** LABEL_WIDTH)
    to_height = panel.transData + panel.transAxes.inverted()
    ends = []
    for line in panel.lines:
        x, y = line.get_xydata()[-1]
        ends.append((float(to_height.transform((x, y))[1]), float(x), float(y), line))
    ends.sort(key=lambda end: end[0])
    heights = spread([end[0] for end in ends], LABEL_GAP)
    for height, (_, x, y, line) in zip(heights, ends):
        panel.annotate(
            str(line.get_label()),
            (x, y),
            xytext=(float(to_height.transform((high, y))[0]) + 0.02, height),
            textcoords="axes fraction",
            va="center",
            fontsize=8.5,
            color=line.get_color(),
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
                "lw": 0.6,
                "shrinkA": 1,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights, moved as little as it takes to be `gap` apart, between 0 and 1 if they fit."""
    found = list(heights)
    for _ in range(200):
        for i in range(len(found) - 1):
            if (lack := gap - (found[i + 1] - found[i])) > 1e-6:
                found[i], found[i + 1] = found[i] - lack / 2, found[i + 1] + lack / 2
        found = [min(max(height, 0.0), 1.0) for height in found]
    return found


# ---- against the best peer ---------------------------------------------------------------------------------------


def speedup_figure(rows: Sequence[Row]) -> Figure | None:
    """How many times faster than the fastest peer; None without peers."""
    bars = {ranks: found for ranks in sorted({row["ranks"] for row in rows}) if (found := speedups(rows, ranks))}
    if not bars:
        return None
    all_tokens = sorted({tokens for found in bars.values() for tokens in found})
    figure, panel = plt.subplots(figsize=(max(7.0, 2 + 0.85 * len(all_tokens)), 4.8))
    width = 0.8 / len(bars)
    for i, (ranks, found) in enumerate(bars.items()):
        color = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")[i % 4]
        at = [all_tokens.index(tokens) - 0.4 + width * (i + 0.5) for tokens in found]
        panel.bar(
            at, [ratio for ratio, _ in found.values()], width * 0.92, color=color, label=f"{ranks} ranks (EP{ranks})"
        )
        for x, (ratio, _) in zip(at, found.values()):
            panel.text(x, ratio, f"{ratio:.2f}", ha="center", va="bottom", fontsize=7.5, color="#222222")
    panel.plot([-0.6, len(all_tokens) - 0.5], [1, 1], color="black", lw=1)
    panel.text(len(all_tokens) - 0.45, 1, "as fast", va="center", fontsize=8.5)
    panel.set_axisbelow(True)
    panel.set_xticks(range(len(all_tokens)), [f"{tokens}" for tokens in all_tokens])
    panel.set_xlim(-0.6, len(all_tokens) + 0.15)
    panel.grid(axis="x", visible=False)
    panel.set_xlabel("tokens of each rank")
    panel.set_ylabel("time of the fastest peer / time of ep_a2a")
    panel.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(bars))
    op = rows[0]["op"].capitalize()
    figure.suptitle(f"{op}, times faster than the fastest peer\n{title_of(rows[0])}", x=0.02, ha="left", fontsize=10.5)
    best = sorted({name for found in bars.values() for _, name in found.values()})
    words = ", ".join(name.replace("flashinfer-", "FlashInfer ") for name in best)
    figure.text(0.02, 0.015, f"fastest peer: {words}; {footnote(rows)}", fontsize=7.5, color="#555555")
    figure.tight_layout(rect=(0, 0.035, 1, 1))
    return figure


def speedups(rows: Sequence[Row], ranks: int) -> dict[int, tuple[float, str]]:
    """By tokens: the fastest peer's time over the best of ours in the last run that has both, and its name."""
    found = {}
    for tokens in sorted({row["tokens"] for row in rows}):
        for run in dict.fromkeys(row["run"] for row in rows):
            here = [row for row in rows if (row["ranks"], row["tokens"], row["run"]) == (ranks, tokens, run)]
            ours = [row["us"] for row in here if row["variant"] == "ours"]
            theirs = [(row["us"], row["variant"]) for row in here if row["variant"] not in NO_PEERS]
            if ours and theirs:
                us, name = min(theirs)
                found[tokens] = us / min(ours), name
    return found


# ---- who sends how much to whom ----------------------------------------------------------------------------------


def traffic(routing: str, config: ep_a2a.Config, num_ranks: int) -> torch.Tensor:
    """Bytes from each rank to each, [R, R], when all dispatch `max_tokens` tokens."""
    generator = torch.Generator().manual_seed(3)
    tokens = config.max_tokens
    ids, _ = testing.ROUTINGS[routing](num_ranks * tokens, config.num_experts, config.top_k, generator)
    goes = testing.destinations(ids, config.num_experts, num_ranks).view(num_ranks, tokens, num_ranks)
    return goes.sum(dim=1) * config.bytes(num_ranks).row_bytes


def traffic_figure(num_ranks: int, tokens: int = 1024) -> Figure:
    """A matrix for each routing, in MB."""
    config = ep_a2a.Config(num_experts=512, top_k=22, hidden=2048, max_tokens=tokens, payload=PAYLOADS["nvfp4"])
    matrices = {name: traffic(name, config, num_ranks) / 1e6 for name in ROUTINGS}
    most = max(float(matrix.max()) for matrix in matrices.values())
    figure, panels = plt.subplots(2, 2, figsize=(10.4, 10), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08))
    for panel, (name, matrix) in zip(panels.flat, matrices.items()):
        image = panel.imshow(matrix.numpy(), cmap="cividis", vmin=0, vmax=most)
        for source in range(num_ranks):
            for target in range(num_ranks):
                value = float(matrix[source, target])
                color = "black" if value > 0.55 * most else "white"
                panel.text(
                    target,
                    source,
                    f"{value:.2f}" if value else "0",
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color=color,
                )
        panel.set_title(f"{ROUTINGS[name]}: {float(matrix.sum()):.1f} MB in all", fontsize=10.5, loc="left")
        panel.set_xticks(range(num_ranks))
        panel.set_yticks(range(num_ranks))
        panel.set_xlabel("to rank")
        panel.set_ylabel("from rank")
        panel.grid(visible=False)
    figure.colorbar(image, ax=panels, label="MB in one dispatch", shrink=0.6, pad=0.02)
    figure.suptitle(
        f"What {num_ranks} ranks send each other in one dispatch, MB\n{tokens} tokens a rank, {config.num_experts} "
        f"experts, top-{config.top_k}, hidden {config.hidden}, NVFP4 ({config.bytes(num_ranks).row_bytes} bytes a row)",
        x=0.01,
        ha="left",
        fontweight="bold",
        fontsize=11,
    )
    return figure


if __name__ == "__main__":
    sys.exit(main())
