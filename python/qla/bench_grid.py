"""The published grid: its rows, their inputs, the hardware's floors, and how a row is timed on a GPU.

A time is the median of CUDA-graph replays that rotate over input sets larger together than L2, random data throughout.
Inputs of every row: l2-normalised q and k, v ~ N(0,1), g = logsigmoid(N(0,1)) / 16 with g = 0 for a random quarter of the
value heads, beta = sigmoid(N(0,1)), fp32 initial_state given, final state asked for, int32 cu_seqlens, bf16.
"""

from __future__ import annotations

import csv
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qla.lengths import parse_lengths

KNOWN = {
    "flashqla_published_ms": "FlashQLA published",
    "flashqla_0_1_3_ms": "FlashQLA 0.1.3",
    "flashinfer_0_7_4_ms": "FlashInfer 0.7.4",
    "flashinfer_0_7_4_cp_ms": "FlashInfer 0.7.4 CP",
    "fla_published_ms": "FLA published",
}
# How the known times were taken. FlashQLA's own benchmark replays a graph of 100 ms of calls after a warm-up of 10 ms: sustained. The
# columns measured for 0.1.3 and 0.7.4 agree with short bursts (docs/bench/README.md).
TAKEN_IN_BURSTS = ("FlashQLA 0.1.3", "FlashInfer 0.7.4", "FlashInfer 0.7.4 CP")
L2_BYTES = 60 << 20


@dataclass
class Row:
    direction: str
    model: str
    name: str
    lengths: list[int]
    heads: tuple[int, int]
    known: dict[str, float] = field(default_factory=dict)  # peer -> ms

    @property
    def items(self) -> int:
        return len(self.lengths) * self.heads[1]

    @property
    def best_ms(self) -> float | None:
        return min(self.known.values(), default=None)

    def label(self) -> str:
        return f"{self.direction} {self.model} {self.name} {self.heads[0]}:{self.heads[1]}"


def lengths_of(name: str) -> list[int]:
    """ "8192x4", "1x32768", "1024+7168"; the backward rows say "32k_4seq": four equal ones of 32,768 tokens in all."""
    if name.endswith("seq"):
        total, _, count = name.removesuffix("seq").partition("k_")
        return [int(total) * 1024 // int(count)] * int(count)
    return parse_lengths(name)


def find_table(given: Path | None) -> Path:
    here = Path(__file__).resolve().parent
    for path in [given] if given else [here / "data/peers_h200.csv", here.parent.parent / "bench/peers_h200.csv"]:
        if path.exists():
            return path
    raise ValueError("--table: found no bench/peers_h200.csv beside the package; give its path with --table")


def read_rows(table: Path, direction: str, words: str | None) -> list[Row]:
    rows = []
    with table.open() as f:
        for line in csv.DictReader(f):
            if direction != "both" and line["pass"] != direction:
                continue
            known = {title: float(line[key]) for key, title in KNOWN.items() if line.get(key)}
            if line.get("best_ms") and line.get("best_is"):
                known.setdefault(line["best_is"], float(line["best_ms"]))  # some best times have no column of their own
            heads = (int(line["h_qk"]), int(line["h_v"]))
            rows.append(
                Row(
                    line["pass"],
                    line["model"],
                    line["seqlens"],
                    lengths_of(line["seqlens"]),
                    heads,
                    known,
                )
            )
    if words:
        rows = [row for row in rows if all(word.strip() in row.label() for word in words.split(","))]
    if not rows:
        raise ValueError(
            f"--rows {words!r}: no row of {table} has all of these words; a row reads like 'fwd Sym h32 8192x4 32:32'"
        )
    return rows


# ---- floors (docs/math.md, work and bytes) ----------------------------------------------------------------------


def floors_ms(row: Row, multiprocessors: int, clock_ghz: float = 1.75, terabytes_a_second: float = 4.3) -> tuple[float, float]:
    """-> (tensor-core floor, byte floor) in ms: chunk-heads x cycles over all SMs; the least traffic that a design we know needs."""
    group = row.heads[1] // row.heads[0]
    chunks = sum(math.ceil(n / 64) for n in row.lengths) * row.heads[1]
    token_chunks = sum(row.lengths) / 64 * row.heads[1]
    if row.direction == "fwd":
        cycles, kib = 2304, 32 / group + 32.5
        states = 2 * row.items * 64  # initial_state in, final_state out, fp32
    else:
        cycles, kib = 6912, 96 / group + 161.5
        states = 2 * row.items * 64
    tensor = chunks * cycles / multiprocessors / (clock_ghz * 1e9)
    moved = (token_chunks * kib + states) * 1024 / (terabytes_a_second * 1e12)
    return tensor * 1e3, moved * 1e3


# ---- inputs and timing ------------------------------------------------------------------------------------------


def make_inputs(row: Row, seed: int, requires_grad: bool) -> dict[str, Any]:
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    tokens, (hk, hv), n = sum(row.lengths), row.heads, len(row.lengths)

    def normal(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)

    def unit(x: Any) -> Any:
        return x / x.norm(dim=-1, keepdim=True)

    g = torch.nn.functional.logsigmoid(normal(1, tokens, hv, dtype=torch.float32)) / 16
    still = torch.randperm(hv, generator=generator, device="cuda")[: hv // 4]
    g[:, :, still] = 0.0
    inputs = {
        "q": unit(normal(1, tokens, hk, 128)),
        "k": unit(normal(1, tokens, hk, 128)),
        "v": normal(1, tokens, hv, 128),
        "g": g,
        "beta": torch.sigmoid(normal(1, tokens, hv, dtype=torch.float32)),
        "initial_state": normal(n, hv, 128, 128, dtype=torch.float32),
    }
    if requires_grad:
        inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    return inputs


def boundaries(row: Row) -> Any:
    import torch

    return torch.tensor([0, *itertools.accumulate(row.lengths)], dtype=torch.int32, device="cuda")


def set_count(row: Row) -> int:
    tokens, (hk, hv) = sum(row.lengths), row.heads
    one = tokens * (2 * hk + 2 * hv) * 256 + 2 * row.items * 65536
    return min(8, max(2, math.ceil(2 * L2_BYTES / one)))


def plain_arguments(inputs: dict[str, Any], cu_seqlens: Any) -> dict[str, Any]:
    return {**inputs, "cu_seqlens": cu_seqlens}


def work(
    row: Row, call: Callable[..., Any], arguments: Callable[[dict[str, Any], Any], dict[str, Any]], seed: int, cu_seqlens: Any
) -> tuple[Callable[[], Any], list[Any]]:
    """-> (what is timed of one input set: the forward call, or for backward rows the backward alone; what must live as long)."""
    import torch

    backward = row.direction == "bwd"
    inputs = make_inputs(row, seed, backward)
    given = arguments(inputs, cu_seqlens)  # a peer's own layout, made outside of what is timed
    if not backward:

        def forward() -> Any:
            with torch.no_grad():
                return call(**given)

        return forward, [inputs, given]
    outputs = call(**given)
    gradients = (torch.randn_like(outputs[0]), torch.randn_like(outputs[1]) / 8)
    leaves = list(inputs.values())
    return lambda: torch.autograd.grad(outputs, leaves, gradients, retain_graph=True), [given, outputs, gradients]


def prepare(
    row: Row, call: Callable[..., Any], arguments: Callable[[dict[str, Any], Any], dict[str, Any]] = plain_arguments
) -> list[Any]:
    """One captured graph for each input set; of the backward alone for backward rows."""
    import torch

    graphs: list[Any] = []
    keep: list[Any] = []
    cu = boundaries(row)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.stream(side):
        for seed in range(set_count(row)):
            run, alive = work(row, call, arguments, seed, cu)
            if seed == 0:
                keep.append(run())  # loads modules, fills caches
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                keep.append(run())
            keep += alive
            graphs.append(graph)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graphs.append(keep)  # alive as long as the graphs
    return graphs


class Eager:
    """Stands in for a graph where a peer's call cannot be captured: its replay is the call, the host's work included."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run

    def replay(self) -> None:
        self.run()


def prepare_eager(
    row: Row, call: Callable[..., Any], arguments: Callable[[dict[str, Any], Any], dict[str, Any]] = plain_arguments
) -> list[Any]:
    """What prepare() returns, uncaptured."""
    made = [work(row, call, arguments, seed, boundaries(row)) for seed in range(set_count(row))]
    for run, _ in made:
        run()
    return [*(Eager(run) for run, _ in made), [alive for _, alive in made]]


def peak_mib(
    row: Row, call: Callable[..., Any], arguments: Callable[[dict[str, Any], Any], dict[str, Any]] = plain_arguments
) -> float:
    """Device memory that one eager call takes at its peak beyond its inputs, outputs included; of backward rows the training step:
    forward, what it keeps, and backward."""
    import torch

    backward = row.direction == "bwd"
    given = arguments(make_inputs(row, 0, backward), boundaries(row))

    def once() -> None:
        if not backward:
            with torch.no_grad():
                call(**given)
            return
        outputs = call(**given)
        leaves = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        torch.autograd.grad(outputs, leaves, tuple(torch.ones_like(x) for x in outputs))

    once()  # what a peer tunes or caches at its first call does not count
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**20


WARM_UP_MS, CLOCK_CYCLES = 25.0, 1_000_000


def _event() -> Any:
    import torch

    made = torch.cuda.Event(enable_timing=True)
    made.record()
    return made


def replay_once(graphs: list[Any]) -> float:
    """-> mean of one replay of each, in ms."""
    start = _event()
    for graph in graphs:
        graph.replay()
    end = _event()
    end.synchronize()
    return max(start.elapsed_time(end) / len(graphs), 1e-3)


def replay_events(graphs: list[Any], count: int) -> list[Any]:
    """Queues count replays in turn; -> the events between them."""
    events = [_event()]
    for i in range(count):
        graphs[i % len(graphs)].replay()
        events.append(_event())
    return events


def times_between(events: list[Any]) -> list[float]:
    """-> ms, sorted; the events have passed."""
    return sorted(a.elapsed_time(b) for a, b in zip(events, events[1:]))


def replay_ms(graphs: list[Any], budget_s: float, warm_up_ms: float = WARM_UP_MS) -> tuple[float, float, int, float]:
    """-> (median ms, spread in %, replays, SM clock in MHz at the end).

    A burst after a pause runs at 1.98 GHz and up to 1.4 times as quick as what follows some ten milliseconds later, when the
    card has reached its power limit: 25 ms of replays go before the timed ones, without a gap. The queue is filled behind a
    short sleep, so that the host is never waited for. The clock is read off the card by a kernel that counts cycles: NVML still
    says 1980 MHz then.
    """
    import torch

    *graphs, _keep = graphs

    once = replay_once(graphs)
    count = int(min(max(budget_s * 1e3 / once, 2 * len(graphs), 5), 1000))
    torch.cuda._sleep(3_000_000)
    for i in range(math.ceil(min(warm_up_ms / once, 2000))):
        graphs[i % len(graphs)].replay()
    events = replay_events(graphs, count)
    torch.cuda._sleep(CLOCK_CYCLES)
    after = _event()
    after.synchronize()
    times = times_between(events)
    middle = times[count // 2]
    mhz = CLOCK_CYCLES / events[-1].elapsed_time(after) / 1e3
    return middle, 100 * (times[3 * count // 4] - times[count // 4]) / middle, count, mhz


BURST_MS, BURST_PAUSE_S, BURSTS = 2.0, 0.02, 3


def burst_ms(graphs: list[Any]) -> float:
    """Median ms of a replay in a short burst: about 2 ms of them (3 at least) after the card has idled for 20 ms; the least of three
    bursts' medians. The clock is at its highest then: what a timing says that does not load the card for long."""
    import torch

    *graphs, _keep = graphs
    count = int(min(max(math.ceil(BURST_MS / replay_once(graphs)), 3), 50))
    medians = []
    for _ in range(BURSTS):
        torch.cuda.synchronize()
        time.sleep(BURST_PAUSE_S)
        torch.cuda._sleep(200_000)  # a tenth of a millisecond, so that the host is never waited for
        events = replay_events(graphs, count)
        events[-1].synchronize()
        medians.append(times_between(events)[count // 2])
    return min(medians)
