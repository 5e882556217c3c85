"""Times the grid's rows with one peer, in a process of its own: bench_peer.py PEER PATH TABLE DIRECTION ROWS BUDGET -> JSON lines.

Run by its file, never by module name: the original FlashQLA and our stand-in share the name flash_qla, and the peer's comes first.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peer_call(peer: str, path: str) -> tuple[Callable[..., Any], Callable[..., Any], str]:
    """-> (call, how it takes its arguments, version and file of what was imported)."""
    from qla.bench_grid import plain_arguments

    if peer == "flash_qla":
        sys.path.insert(0, path)
        import flash_qla

        found = os.path.realpath(flash_qla.__file__ or "")
        if not found.startswith(os.path.realpath(path) + os.sep):
            raise ImportError(f"flash_qla: expected the one in {path}, got {found}")
        original = flash_qla.chunk_gated_delta_rule
        what = f"FlashQLA {getattr(flash_qla, '__version__', '?')} ({found})"
        return (lambda **x: original(**x, output_final_state=True)), plain_arguments, what
    if peer == "fla":
        os.environ["FLA_FLASH_QLA"] = "0"  # FLA would hand the call to a flash_qla that it finds
        import fla
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla_call

        return (lambda **x: fla_call(**x, output_final_state=True)), plain_arguments, f"FLA {getattr(fla, '__version__', '?')}"
    import flashinfer
    from flashinfer.gdn_prefill import chunk_gated_delta_rule as fi_call

    def packed(inputs: dict[str, Any], cu_seqlens: Any) -> dict[str, Any]:
        # 3-D tensors, decay in linear space, 64-bit boundaries (the state is V-first there: its values do not matter here)
        out = {name: x[0] for name, x in inputs.items() if name != "initial_state"}
        return {**out, "g": out["g"].exp(), "initial_state": inputs["initial_state"], "cu_seqlens": cu_seqlens.long()}

    return (lambda **x: fi_call(**x, output_final_state=True)), packed, f"FlashInfer {getattr(flashinfer, '__version__', '?')}"


def peer_main(peer: str, path: str, table: str, direction: str, words: str, budget: str) -> int:
    import torch

    from qla.bench_grid import peak_mib, prepare, read_rows, replay_ms

    call, arguments, what = peer_call(peer, path)
    print(json.dumps({"what": what}), flush=True)
    for row in read_rows(Path(table), direction, words or None):
        try:
            ms, *_ = replay_ms(prepare(row, call, arguments), float(budget))
            torch.cuda.empty_cache()
            print(json.dumps({"label": row.label(), "ms": ms, "peak_mib": peak_mib(row, call, arguments)}), flush=True)
        except Exception as error:  # a peer that refuses a row is no reason to lose the others
            print(f"{row.label()}: {error}", file=sys.stderr)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    # this file's folder is the package: replace it by the package's parent, behind everything else
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path = [p for p in sys.path if os.path.realpath(p or ".") != here] + [os.path.dirname(here)]
    sys.exit(peer_main(*sys.argv[1:7]))
