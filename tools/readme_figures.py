"""README's measured figures, made from docs/bench/{cuda,cpu}.{jsonl,md} and beside.jsonl: run it after a new record, `--check` says whether it is due."""

from __future__ import annotations

import argparse
import json
import math
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README, BENCH = ROOT / "README.md", ROOT / "docs/bench"
BLOCK = re.compile(r"(<!-- (\w+): tools/readme_figures\.py -->\n).*?(?= <!-- end -->)", re.DOTALL)
HOST = re.compile(
    r"host cost at T 64, us: forward ([\d.]+) .*?forward \+ backward ([\d.]+) .*?autograd\.Function ([\d.]+); "
    r"without torch's backward thread ([\d.]+) and ([\d.]+)"
)
PYTHON = re.compile(r"host cost at T 64, one head: [\d.]+ us the Python call, [\d.]+ us in C: ([\d.]+) us of Python")
TWO = re.compile(r"forward ([\d.]+)x, backward ([\d.]+)x of one thread's best")


def slower(values: list[float]) -> str:
    count = sum(x < 1 for x in values)
    return "no row slower" if count == 0 else f"{count} row{'s' * (count > 1)} slower"


def mean(values: list[float]) -> str:
    return f"{math.exp(sum(map(math.log, values)) / len(values)):.2f} x"


def bullet(sentences: str) -> str:
    return textwrap.fill(sentences, 160, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (BENCH / name).read_text(encoding="utf-8").splitlines() if line]


def grid() -> str:
    rows = read("cuda.jsonl")

    def of(direction: str, key: str, least_items: int = 0) -> list[float]:
        return [r[key] for r in rows if r["pass"] == direction and r.get(key) and r["items"] >= least_items]

    forward, full, backward = of("fwd", "ratio"), of("fwd", "ratio", 64), of("bwd", "ratio")
    sustained = of("fwd", "ratio_sustained")
    again = [r for r in read("beside.jsonl") if r["pass"] == "fwd"]  # the same library once more, with a peer beside it
    least = min(again, key=lambda r: r["ratio_sustained"])
    return bullet(
        f"One {rows[0]['gpu'].removeprefix('NVIDIA ')}, the published grid, against the best time known of any peer, ours taken as it was"
        f" (bursts or sustained): forward {mean(forward)} in the geometric mean of {len(forward)} rows and {mean(full)} over the {len(full)}"
        f" that fill half of the card or more, {slower(forward)}, the least {min(forward):.2f}; backward {mean(backward)} over"
        f" {len(backward)} rows, {slower(backward)}, the least {min(backward):.2f}. Ours sustained at the card's power limit against"
        f" peers' bursts: {mean(sustained)}, {slower(sustained)}, the least {min(sustained):.3f}; in a second run of the"
        f" same library (docs/bench/beside.md) {slower([r['ratio_sustained'] for r in again])}, the least {least['ratio_sustained']:.3f}"
        f" (({least['heads']}) {least['lengths']})."
    )


def beside() -> str:
    ratios = [r["ratio_beside"] for r in read("beside.jsonl") if r["pass"] == "fwd" and r.get("ratio_beside")]
    return textwrap.indent(
        textwrap.fill(
            f"In turn with FlashInfer 0.7.4, both at the card's power limit, forward is {mean(ratios)} as fast over all {len(ratios)} rows,"
            f" {slower(ratios)}, the least {min(ratios):.2f} ([docs/bench](docs/bench/README.md)).",
            158,
            break_on_hyphens=False,
        ),
        "  ",
    )


def cpu() -> str:
    text = (BENCH / "cpu.md").read_text(encoding="utf-8")
    one, python = read("cpu.jsonl")[0], PYTHON.search(text)
    two = [float(x) for pair in TWO.findall(text) for x in pair]
    if python is None or not two or one["threads"] != 1 or "backward_ratio" not in one:
        raise SystemExit(
            "docs/bench/cpu.*: expected the main case first, two threads and the host cost; ./dev bench --out docs/bench"
        )
    return bullet(
        f"One CPU core with {one['gflops']:.1f} GFLOP/s of AVX2 FMA, fp32, {one['case'].replace('->', ' and ')}: {one['forward_mths']:.2f} million"
        f" token-heads (tokens x value heads) a second forward, {one['forward_share']:.0f} % of that rate and {one['forward_ratio']:.1f} x"
        f" transformers' torch code; backward {one['backward_mths']:.2f} million, {one['backward_share']:.0f} % and {one['backward_ratio']:.1f} x."
        f" Of a call at T = 64 Python takes {float(python[1]):.0f} us. Two cores give {min(two):.2f} to {max(two):.2f} x one, few heads"
        " and gates that forget nothing included,"
    )


def host() -> str:
    found = HOST.search((BENCH / "cuda.md").read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit("docs/bench/cuda.md: no line 'host cost at T 64'; measure it with qla bench --grid published --host")
    forward, step, empty, alone, empty_alone = (f"{float(x):.0f}" for x in found.groups())
    return bullet(
        f"Host cost of a call at T = 64 on the H200's machine: {forward} us. Forward + backward takes {step}, of which an empty"
        f" `autograd.Function` takes {empty}: torch's engine wakes a thread of its own. Without that thread"
        f" (`torch.autograd.set_multithreading_enabled(False)`) {alone}, of which {empty_alone}."
    )


BLOCKS = {"grid": grid, "beside": beside, "cpu": cpu, "host": host}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 where README's figures are not the tables'"
    )
    args = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    if sorted(name for _, name in BLOCK.findall(text)) != sorted(BLOCKS):
        print(
            f"README.md: expected one place for each of {', '.join(BLOCKS)}: '<!-- NAME: tools/readme_figures.py -->' .. '<!-- end -->'"
        )
        return 1
    new = BLOCK.sub(lambda found: found.group(1) + BLOCKS[found.group(2)](), text)
    if args.check:
        if new != text:
            print("README.md's figures are not those of docs/bench: run python3 tools/readme_figures.py")
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
