"""README's figures of the recorded grid, made from docs/bench/cuda.{jsonl,md}: run it after a new record, `--check` says whether it is due."""

from __future__ import annotations

import json
import math
import re
import sys
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


def slower(values: list[float]) -> str:
    count = sum(x < 1 for x in values)
    return "no row slower" if count == 0 else f"{count} row{'s' * (count > 1)} slower"


def mean(values: list[float]) -> str:
    return f"{math.exp(sum(map(math.log, values)) / len(values)):.2f} x"


def bullet(sentences: str) -> str:
    return textwrap.fill(sentences, 160, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def grid() -> str:
    lines = (BENCH / "cuda.jsonl").read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line]

    def of(direction: str, key: str, least_items: int = 0) -> list[float]:
        return [r[key] for r in rows if r["pass"] == direction and r.get(key) and r["items"] >= least_items]

    forward, full, backward = of("fwd", "ratio"), of("fwd", "ratio", 64), of("bwd", "ratio")
    sustained = of("fwd", "ratio_sustained")
    return bullet(
        f"One {rows[0]['gpu'].removeprefix('NVIDIA ')}, the published grid, against the best time known of any peer, ours taken as it was"
        f" (bursts or sustained): forward {mean(forward)} in the geometric mean of {len(forward)} rows and {mean(full)} over the {len(full)}"
        f" that fill half of the card or more, {slower(forward)}, the least {min(forward):.2f}; backward {mean(backward)} over"
        f" {len(backward)} rows, {slower(backward)}, the least {min(backward):.2f}. Ours sustained at the card's power limit against"
        f" peers' bursts: {mean(sustained)}, {slower(sustained)}, the least {min(sustained):.2f}."
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


BLOCKS = {"grid": grid, "host": host}


def main() -> int:
    text = README.read_text(encoding="utf-8")
    if sorted(name for _, name in BLOCK.findall(text)) != sorted(BLOCKS):
        print(
            f"README.md: expected one place for each of {', '.join(BLOCKS)}: '<!-- NAME: tools/readme_figures.py -->' .. '<!-- end -->'"
        )
        return 1
    new = BLOCK.sub(lambda found: found.group(1) + BLOCKS[found.group(2)](), text)
    if "--check" in sys.argv[1:]:
        if new != text:
            print("README.md's figures are not those of docs/bench/cuda.{jsonl,md}: run python3 tools/readme_figures.py")
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
