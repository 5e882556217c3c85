"""README's figures of the recorded grid, made from docs/bench/cuda.jsonl: run it after a new record, `--check` says whether it is due."""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README, TABLE = ROOT / "README.md", ROOT / "docs/bench/cuda.jsonl"
BLOCK = re.compile(r"(<!-- from docs/bench/cuda\.jsonl: tools/readme_figures\.py -->\n).*?(?= <!-- end -->)", re.DOTALL)


def slower(values: list[float]) -> str:
    count = sum(x < 1 for x in values)
    return "no row slower" if count == 0 else f"{count} row{'s' * (count > 1)} slower"


def mean(values: list[float]) -> str:
    return f"{math.exp(sum(map(math.log, values)) / len(values)):.2f} x"


def figures(rows: list[dict[str, Any]]) -> str:
    def of(direction: str, key: str, least_items: int = 0) -> list[float]:
        return [r[key] for r in rows if r["pass"] == direction and r.get(key) and r["items"] >= least_items]

    forward, full, backward = of("fwd", "ratio"), of("fwd", "ratio", 64), of("bwd", "ratio")
    sustained = of("fwd", "ratio_sustained")
    sentences = (
        f"One {rows[0]['gpu'].removeprefix('NVIDIA ')}, the published grid, against the best time known of any peer, ours taken as it was"
        f" (bursts or sustained): forward {mean(forward)} in the geometric mean of {len(forward)} rows and {mean(full)} over the {len(full)}"
        f" that fill half of the card or more, {slower(forward)}, the least {min(forward):.2f}; backward {mean(backward)} over"
        f" {len(backward)} rows, {slower(backward)}, the least {min(backward):.2f}. Ours sustained at the card's power limit against"
        f" peers' bursts: {mean(sustained)}, {slower(sustained)}, the least {min(sustained):.2f}."
    )
    return textwrap.fill(sentences, 160, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def main() -> int:
    text = README.read_text(encoding="utf-8")
    if not BLOCK.search(text):
        print(
            f"{README}: no place for the figures; expected the comment '<!-- from docs/bench/cuda.jsonl: .. -->' and '<!-- end -->'"
        )
        return 1
    rows = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines() if line]
    new = BLOCK.sub(lambda found: found.group(1) + figures(rows), text)
    if "--check" in sys.argv[1:]:
        if new != text:
            print("README.md's figures are not those of docs/bench/cuda.jsonl: run python3 tools/readme_figures.py")
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
