"""Pictures of the demo, of plans and of benchmarks. matplotlib is only imported here, and never its global state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OURS, THEIRS, THIRD, GREY = "#1f6fb4", "#d1701c", "#3a8f4d", "#888888"


def new_figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"a picture needs matplotlib, got: {error}; pip install matplotlib, or leave the picture out"
        ) from error

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def demo_picture(
    path: Path, ours: Any, theirs: Any, before: list[list[float]], after: list[list[float]], call: dict[str, Any]
) -> None:
    figure = new_figure(12, 8)
    axes = figure.subplots(2, 2)
    draw_losses(axes[0][0], ours, theirs)
    draw_step_times(axes[0][1], ours, theirs)
    draw_half_lives(axes[1][0], before, after, call["q"].shape[1])
    from qla import planview

    plan = planview.plan_of_call(call["q"], call["k"], call["v"], call["g"], call["beta"])
    draw_plan(axes[1][1], plan)
    save(figure, path)


def whole_steps(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_losses(axis: Any, ours: Any, theirs: Any) -> None:
    axis.plot(range(1, len(ours.losses) + 1), ours.losses, color=OURS, lw=1.2, label="qla")
    if theirs.losses:
        axis.plot(range(1, len(theirs.losses) + 1), theirs.losses, color=THEIRS, lw=2.5, ls=(0, (2, 2)), label=theirs.name)
    axis.set(title="Loss, same seed and batches", xlabel="step", ylabel="nats a byte")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, loc="upper right")
    whole_steps(axis)
    if theirs.losses:
        drawn = ours.losses + theirs.losses
        low, high = min(drawn), max(drawn)
        room = max(high - low, 0.01)
        axis.set_ylim(low - 0.05 * room, high + 1.1 * room)  # the curves below, legend and differences above
        inset = axis.inset_axes([0.09, 0.58, 0.42, 0.3])
        steps = range(1, len(theirs.losses) + 1)
        gaps = [max(abs(a - b), 1e-9) for a, b in zip(ours.losses, theirs.losses)]
        inset.semilogy(steps, gaps, color=GREY, marker=".", lw=0.8)
        inset.axhline(1e-3, color=THEIRS, lw=0.8, ls=":")
        inset.set_title("|difference|; dotted: limit 1e-3", fontsize=8)
        inset.tick_params(labelsize=7)
        whole_steps(inset)


def draw_step_times(axis: Any, ours: Any, theirs: Any) -> None:
    for run, color in ((theirs, THEIRS), (ours, OURS)):
        if run.seconds:
            axis.plot(range(1, len(run.seconds) + 1), [s * 1e3 for s in run.seconds], color=color, lw=1.0, label=run.name)
            axis.axhline(run.median_ms(), color=color, lw=0.8, ls=":")
    axis.set(title="Time of a training step (dotted: median)", xlabel="step", ylabel="ms")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    whole_steps(axis)


def draw_half_lives(axis: Any, before: list[list[float]], after: list[list[float]], length: int) -> None:
    position = 0
    ticks, labels = [], []
    for layer, (old, new) in enumerate(zip(before, after)):
        for head, (a, b) in enumerate(zip(old, new)):
            axis.bar(position, b, color=(OURS, THIRD)[layer % 2], width=0.8)
            axis.plot([position - 0.4, position + 0.4], [a, a], color="black", lw=1.5)
            ticks.append(position)
            labels.append(f"{layer}.{head}")
            position += 1
        position += 1
    axis.axhline(length, color=GREY, lw=0.8, ls=":")
    axis.set_yscale("log")
    axis.set_xticks(ticks, labels)
    axis.set(
        title="How fast each head forgets (line: before training)",
        xlabel="layer.value head",
        ylabel="tokens until half is forgotten",
    )


def draw_plan(axis: Any, plan: Any, max_rows: int = 48) -> None:
    """One row a (sequence, value head); a box a segment, hatched where its start is warmed up, coloured by its start state."""
    from matplotlib.patches import Patch, Rectangle

    colors = {0: "#c9d7e8", 1: "#8fb2d8", 2: "#9fcfa8", 3: "#e8b98a"}
    names = {0: "from zero", 1: "from initial_state", 2: "warm-up", 3: "exact merge"}
    rows = sorted({(s.sequence, s.head) for s in plan.segments})
    shown = {row: index for index, row in enumerate(rows[:max_rows])}
    used = set()
    last = 1
    for segment in plan.segments:
        if (segment.sequence, segment.head) not in shown:
            continue
        y = shown[(segment.sequence, segment.head)]
        used.add(segment.start)
        last = max(last, segment.first_chunk + segment.num_chunks)
        axis.add_patch(
            Rectangle(
                (segment.first_chunk, y - 0.4),
                segment.num_chunks,
                0.8,
                facecolor=colors[segment.start],
                edgecolor="black",
                lw=0.6,
            )
        )
        if segment.warmup_chunks:
            axis.add_patch(
                Rectangle(
                    (segment.first_chunk - segment.warmup_chunks, y - 0.15),
                    segment.warmup_chunks,
                    0.3,
                    facecolor="none",
                    edgecolor=THIRD,
                    hatch="////",
                    lw=0.5,
                )
            )
    axis.set_xlim(0, last)
    axis.set_ylim(len(shown) - 0.5, -0.5)
    ticks = list(range(0, len(shown), max(1, len(shown) // 12)))
    axis.set_yticks(ticks, [f"{rows[i][0]}.{rows[i][1]}" for i in ticks])
    note = "" if len(rows) <= max_rows else f" (first {max_rows} of {len(rows)} rows)"
    axis.set_title(f"Plan: {plan.num_items} work items{note}", loc="left")
    axis.set(xlabel="chunk of 64 tokens", ylabel="sequence.value head")
    handles = [Patch(facecolor=colors[start], edgecolor="black", label=names[start]) for start in sorted(used)]
    axis.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncol=4, frameon=False, fontsize=8)


def bench_cpu_picture(path: Path, rows: list[dict[str, Any]]) -> None:
    figure = new_figure(10, 4.5)
    axis = figure.subplots(1, 1)
    labels = [row["case"] for row in rows]
    for offset, key, color in ((-0.2, "forward_mths", OURS), (0.2, "backward_mths", THIRD)):
        values = [row.get(key) or 0.0 for row in rows]
        bars = axis.bar([i + offset for i in range(len(rows))], values, width=0.38, color=color, label=key.split("_")[0])
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
    axis.set_xticks(range(len(rows)), labels, rotation=20, ha="right", fontsize=8)
    axis.set(ylabel="million token-heads a second", title=rows[0].get("title", "qla bench --device cpu") if rows else "")
    axis.legend(frameon=False)
    save(figure, path)


def bench_gpu_picture(path: Path, rows: list[dict[str, Any]], which: str) -> None:
    """Every row of the grid: our time and the best peer's, over the larger of the two floors."""
    rows = [r for r in rows if r.get("ours_ms")]
    figure = new_figure(13, 6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    order = sorted(rows, key=lambda r: r["ours_ms"])
    x = range(len(order))
    upper.semilogy(x, [r["ours_ms"] for r in order], ".", color=OURS, label="qla")
    upper.semilogy(x, [r["best_ms"] or float("nan") for r in order], "x", color=THEIRS, ms=4, label="best known peer")
    upper.semilogy(x, [max(r["tensor_floor_ms"], r["byte_floor_ms"]) for r in order], "-", color=GREY, lw=0.8, label="floor")
    upper.set(ylabel="ms", title=f"{which} on {order[0].get('gpu', 'GPU') if order else 'GPU'}, published grid, rows by our time")
    upper.legend(frameon=False)
    upper.grid(alpha=0.3)
    lower.axhline(1.0, color=GREY, lw=0.8)
    full = [i for i, r in enumerate(order) if r["items"] >= 64]
    few = [i for i, r in enumerate(order) if r["items"] < 64]
    for index, color, label in ((full, OURS, "sequences x value heads >= 64"), (few, THIRD, "fewer")):
        lower.plot(index, [order[i]["ratio"] or float("nan") for i in index], ".", color=color, label=label)
    if any(r.get("ratio_beside") for r in order):
        beside = [r.get("ratio_beside") or float("nan") for r in order]
        lower.plot(x, beside, "o", mfc="none", mec=THEIRS, ms=5, lw=0, label="measured beside it, both sustained")
    lower.set(ylabel="best peer / qla", xlabel="row")
    lower.legend(frameon=False)
    lower.grid(alpha=0.3)
    save(figure, path)


def context_parallel_picture(path: Path, rows: list[dict[str, Any]], uncut: dict[tuple[str, str], float] | None = None) -> None:
    """One sequence of each length: no cut, the planner's choice and the peers, a panel for each number of heads.

    rows: those of `qla bench --grid published` ("ours_ms") or `qla bench --sweep` ("planner_us"), with what peers are known to take (ms)
    under "known". uncut: ms by (lengths, heads), where measured."""
    single = [
        r
        for r in rows
        if r["lengths"].startswith("1x") and r.get("pass", "fwd") == "fwd" and (r.get("ours_ms") or r.get("planner_us"))
    ]
    heads = sorted({r["heads"] for r in single}, key=lambda h: [int(n) for n in h.split(",")][::-1])
    if not heads:
        return
    columns = min(4, len(heads))
    figure = new_figure(3.6 * columns, 3.4 * -(-len(heads) // columns) + 0.5)
    panels = list(figure.subplots(-(-len(heads) // columns), columns, sharex=True, sharey=True, squeeze=False).flat)
    peers = (("FlashInfer 0.7.4 CP", THEIRS, "x"), ("FlashInfer 0.7.4", THEIRS, "+"), ("FlashQLA 0.1.3", THIRD, "x"))
    for axis, name in zip(panels, heads):
        part = sorted({r["lengths"]: r for r in single if r["heads"] == name}.values(), key=lambda r: int(r["lengths"][2:]))
        tokens = [int(r["lengths"][2:]) for r in part]
        for peer, color, marker in peers:
            known = [(n, r["known"][peer]) for n, r in zip(tokens, part) if r.get("known", {}).get(peer)]
            axis.loglog(*zip(*known) if known else ([], []), color=color, marker=marker, ms=5, lw=0.6, label=peer)
        without = [(n, (uncut or {}).get((r["lengths"], name))) for n, r in zip(tokens, part)]
        without = [(n, ms) for n, ms in without if ms]
        axis.loglog(*zip(*without) if without else ([], []), color=GREY, marker="o", ms=4, lw=1.2, ls="--", label="qla, no cut")
        ours = [r.get("ours_ms") or r["planner_us"] / 1e3 for r in part]
        axis.loglog(tokens, ours, color=OURS, marker=".", lw=1.6, label="qla, planner")
        axis.set_title(f"{name.replace(', ', ' / ')} heads", fontsize=10)
        axis.set_xticks(tokens, [f"{n // 1024}k" for n in tokens])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis in panels[len(heads) :]:
        axis.set_visible(False)
    panels[0].set_ylabel("ms")
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle("One sequence by length: context parallelism inside the card", fontsize=11)
    save(figure, path)
