"""The peers' side of the bench, without a GPU and without a peer: a stand-in process answers in a peer's place."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from qla import bench, bench_beside, bench_cuda, bench_grid

STAND_IN = """
import json, sys
name, path, table, budget = sys.argv[1:]
print(json.dumps({"what": "stand-in " + budget}), flush=True)
rounds = 0
for line in sys.stdin:
    asked = json.loads(line)
    print("a peer that prints")
    if "prepare" in asked:
        one = {"burst_ms": 0.4, "captured": True, "difference": 0.004, "peak_mib": 7.0}
        answer = {"P": one, "slow": {**one, "captured": False}, "other": {"refused": asked["prepare"]}}
    else:
        rounds += 1
        if rounds > 5:
            sys.exit("out of memory")
        answer = {name: [{"P": 0.5, "slow": 2.0}[name] + rounds / 100, 1.0, 9, 1700.0] for name in asked["time"]}
    print(json.dumps({"answer": answer}), flush=True)
"""


def arguments(peers: str, path: Path | None = None) -> argparse.Namespace:
    return argparse.Namespace(peers=peers, flash_qla_path=path, table=None, budget=0.25)


def test_a_peer_answers_row_by_row_until_it_dies(tmp_path, monkeypatch):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(bench_beside, "SCRIPT", script)
    (peer,) = bench_beside.wanted(arguments("flash_qla", tmp_path))
    assert peer.alive and peer.what == "stand-in 0.25"
    row = bench_grid.read_rows(bench_grid.find_table(None), "fwd", "8192x4,16:64")[0]

    def measure():
        order = []

        def ours(first):
            order.append(first)
            return 0.4, 2.0, 5, 1600.0

        out = {"pass": "fwd", "model": row.model, "lengths": row.name, "heads": "16, 64", "items": 256, "burst_ms": 0.5}
        out.update(bench_beside.rounds([peer], row, ours, 3))
        bench_beside.rate(out)
        return out, order

    out, order = measure()
    assert order == [True, False, False] and out["ours_ms"] == 0.4 and out["sm_mhz"] == 1600
    # three rounds of the better form, one of the hopeless one, none of the one that refused
    assert out["beside"]["P"]["ms"] == pytest.approx(0.52) and out["beside"]["slow"]["ms"] == pytest.approx(2.01)
    assert out["beside"]["other"] == {"refused": row.label()}
    assert out["beside_is"] == "P" and out["ratio_beside"] == pytest.approx(1.3) and out["ratio_burst"] == pytest.approx(0.8)
    assert out["peer_mib"] == "P 7; slow 7"
    lines = bench_cuda.summary([out])
    assert len(lines) == 4 and "1.300 x" in lines[0] and "0 slower" in lines[0] and "1 slower" in lines[2]
    columns = bench_cuda.columns_of([out])
    assert "beside_ms" in columns and "beside_ms" not in bench_cuda.columns_of([{}])

    cut_short, _ = measure()  # two rounds are answered, then none
    assert cut_short["beside"]["P"]["ms"] == pytest.approx(0.545) and not peer.alive
    alone, order = measure()
    assert "beside" not in alone and len(order) == 3 and "ratio_beside" not in alone
    assert peer.what == "stand-in 0.25: not measured any further: out of memory"


def test_ours_is_taken_as_the_known_time_was():
    known = {"FlashInfer 0.7.4": 1.0, "FlashQLA published": 1.1}
    told = bench_cuda.against_known(known, sustained=1.0, burst=0.8)
    assert told["best_is"] == "FlashQLA published" and told["ratio"] == pytest.approx(1.1) and told["ratio_sustained"] == 1.0
    assert bench_cuda.against_known(known, 1.0, 0.95)["best_is"] == "FlashInfer 0.7.4"
    assert set(bench_grid.TAKEN_IN_BURSTS) <= set(bench_grid.KNOWN.values())


def test_peers_that_are_not_there_say_so(monkeypatch):
    monkeypatch.setattr(bench_beside.importlib.util, "find_spec", lambda name: None)
    peers = bench_beside.wanted(arguments("auto"))
    assert [p.name for p in peers] == ["flashinfer", "fla"]
    assert all(p.what == "not measured: not installed" and not p.alive for p in peers)
    peers[0].what = "FlashQLA 0.1.2 (/somewhere/flash_qla/__init__.py): not measured any further"
    assert peers[0].named == "FlashQLA 0.1.2: not measured any further"
    (original,) = bench_beside.wanted(arguments("flash_qla"))
    assert "--flash-qla-path" in original.what
    assert bench_beside.wanted(arguments("none")) == []
    with pytest.raises(ValueError, match="--peers"):
        bench_beside.wanted(arguments("flashinfer,nobody"))


def test_our_stand_in_is_not_taken_for_the_original(tmp_path):
    pytest.importorskip("torch")
    script = str(bench_beside.SCRIPT)
    table = str(bench_grid.find_table(None))
    done = subprocess.run(
        [sys.executable, script, "flash_qla", str(tmp_path), table, "0.1"], capture_output=True, text=True, input=""
    )
    assert done.returncode != 0 and done.stdout == ""
    assert f"expected the one in {tmp_path}" in done.stderr.splitlines()[-1]


def test_item_ranges():
    assert bench.item_range("64") == bench.item_range("64:") == (64, 10**9)
    assert bench.item_range(":63") == (0, 63) and bench.item_range("64:128") == (64, 128)
