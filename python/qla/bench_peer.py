"""One peer in a process of its own: bench_peer.py PEER PATH TABLE BUDGET. Reads rows' labels from stdin, answers each with a JSON line.

Run by its file, never by module name: the original FlashQLA and our stand-in share the name flash_qla, and the peer's comes first.
Every form of the peer first has its results compared with ours for the same inputs, here, by a call of ours that is not timed; it is then
timed as we are: the same inputs and sets of them, graph replays (or eager calls, where its call cannot be captured), the same protocol.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qla.bench_grid import Row

Arguments = Callable[[dict[str, Any], Any], dict[str, Any]]
# Relative r.m.s. difference from ours above which a peer computes something else. Both round to bf16 once or more on the way:
# correct implementations differ by 0.002 to 0.01.
LARGEST_DIFFERENCE = 0.03


@dataclass
class Form:
    """One way to call a peer: its name in the tables, the call, what it is given and what it returns in our layout."""

    name: str
    call: Callable[..., Any]
    arguments: Callable[[Row], Arguments]
    results: Callable[[tuple[Any, Any]], tuple[Any, Any]] = lambda x: x
    serves: Callable[[Row, int], bool] = lambda row, multiprocessors: True


def flash_qla_forms(path: str) -> tuple[list[Form], str]:
    from qla.bench_grid import plain_arguments

    sys.path.insert(0, path)
    import flash_qla

    found = os.path.realpath(flash_qla.__file__ or "")
    if not found.startswith(os.path.realpath(path) + os.sep):
        raise ImportError(f"flash_qla: expected the one in {path}, got {found}")
    name = f"FlashQLA {getattr(flash_qla, '__version__', '')}".strip()  # a checkout says no version
    original = flash_qla.chunk_gated_delta_rule
    return [Form(name, lambda **x: original(**x, output_final_state=True), lambda row: plain_arguments)], f"{name} ({found})"


def fla_forms() -> tuple[list[Form], str]:
    from qla.bench_grid import plain_arguments

    os.environ["FLA_FLASH_QLA"] = "0"  # FLA would hand the call to a flash_qla that it finds
    import fla
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    name = f"FLA {getattr(fla, '__version__', '?')}"
    return [Form(name, lambda **x: chunk_gated_delta_rule(**x, output_final_state=True), lambda row: plain_arguments)], name


def flashinfer_forms() -> tuple[list[Form], str]:
    import flashinfer
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    known = inspect.signature(chunk_gated_delta_rule).parameters
    name = f"FlashInfer {getattr(flashinfer, '__version__', '?')}"

    def packed(row: Row) -> Arguments:
        def arguments(inputs: dict[str, Any], cu_seqlens: Any) -> dict[str, Any]:
            # 3-D tensors, the decay itself instead of its logarithm, 64-bit boundaries, states with V before K
            out = {key: x[0] for key, x in inputs.items() if key != "initial_state"}
            state = inputs["initial_state"].transpose(-1, -2).contiguous()
            hint = {"max_seqlen": max(row.lengths)} if "max_seqlen" in known else {}
            return {**out, "g": out["g"].exp(), "initial_state": state, "cu_seqlens": cu_seqlens.long(), **hint}

        return arguments

    def form(title: str, serves: Callable[[Row, int], bool], **options: Any) -> Form:
        def call(**x: Any) -> Any:
            return chunk_gated_delta_rule(**x, output_final_state=True, **options)

        def results(x: tuple[Any, Any]) -> tuple[Any, Any]:
            return x[0][None], x[1].transpose(-1, -2)

        return Form(title, call, packed, results, lambda row, sms: row.direction == "fwd" and serves(row, sms))

    if "use_cp" not in known:
        return [form(name, lambda row, sms: True)], name
    # Its own choice is context parallelism below half a card: there both are timed, above it paid in none of the known rows.
    forms = [
        form(name, lambda row, sms: True, use_cp=False),
        form(f"{name} CP", lambda row, sms: 2 * row.items <= sms, use_cp=True),
    ]
    return forms, name


def difference(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> float:
    """The largest of the relative r.m.s. differences of corresponding tensors."""
    return max(((b.float() - a.float()).norm() / a.float().norm().clamp_min(1e-30)).item() for a, b in zip(ours, theirs))


def results_of(row: Row, form: Form) -> tuple[Any, ...]:
    """o and the final state of the first input set, of backward rows the gradients; in our layout."""
    import torch

    from qla.bench_grid import boundaries, make_inputs

    backward = row.direction == "bwd"
    inputs = make_inputs(row, 0, backward)
    given = form.arguments(row)(inputs, boundaries(row))
    if not backward:
        with torch.no_grad():
            return form.results(form.call(**given))
    outputs = form.call(**given)
    generator = torch.Generator(device="cuda").manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator, device="cuda", dtype=x.dtype) / n for x, n in zip(outputs, (1, 8))]
    return torch.autograd.grad(outputs, list(inputs.values()), upstream)


class Prepared:
    """A form of the peer ready to be timed on one row: compared with ours, its graphs captured."""

    def __init__(self, row: Row, form: Form, ours: Form) -> None:
        import torch

        from qla import bench_grid

        self.row, self.form = row, form
        self.difference = difference(results_of(row, ours), results_of(row, form))
        if not self.difference <= LARGEST_DIFFERENCE:
            raise ValueError(f"computes something else: differs from ours by {self.difference:.3g} of the r.m.s.")
        self.captured = True
        arguments = form.arguments(row)
        try:
            self.graphs = bench_grid.prepare(row, form.call, arguments)
        except (RuntimeError, torch.cuda.CudaError) as error:  # whatever a host-side synchronisation under capture raises
            print(f"{row.label()}: {form.name}: not captured: {error}", file=sys.stderr)
            torch.cuda.synchronize()
            self.captured = False
            self.graphs = bench_grid.prepare_eager(row, form.call, arguments)
        self.peak_mib = bench_grid.peak_mib(row, form.call, arguments)
        self.burst_ms = bench_grid.burst_ms(self.graphs)

    def told(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("difference", "captured", "peak_mib", "burst_ms")}


class Timer:
    """Answers what the bench asks: {"prepare": label}, then {"time": names of forms} any number of times."""

    def __init__(self, forms: list[Form], ours: Form, rows: dict[str, Row], budget: float) -> None:
        self.forms, self.ours, self.rows, self.budget = forms, ours, rows, budget
        self.ready: dict[str, Prepared] = {}

    def prepare(self, label: str) -> dict[str, Any]:
        import torch

        self.ready.clear()
        torch.cuda.empty_cache()
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        answer: dict[str, Any] = {}
        for form in self.forms:
            if form.serves(self.rows[label], multiprocessors):
                try:
                    self.ready[form.name] = Prepared(self.rows[label], form, self.ours)
                    answer[form.name] = self.ready[form.name].told()
                except Exception as error:  # a form that refuses a row is no reason to lose the others
                    answer[form.name] = {"refused": f"{type(error).__name__}: {error}".splitlines()[0]}
        return answer

    def time(self, names: list[str]) -> dict[str, Any]:
        from qla.bench_grid import replay_ms

        return {name: replay_ms(self.ready[name].graphs, self.budget) for name in names}


def main(peer: str, path: str, table: str, budget: str) -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a peer prints is no answer
    import torch

    import qla
    from qla.bench_grid import plain_arguments, read_rows

    forms, what = {"flash_qla": lambda: flash_qla_forms(path), "fla": fla_forms, "flashinfer": flashinfer_forms}[peer]()
    ours = Form("qla", lambda **x: qla.chunk_gated_delta_rule(**x, output_final_state=True), lambda row: plain_arguments)
    timer = Timer(forms, ours, {row.label(): row for row in read_rows(Path(table), "both", None)}, float(budget))
    torch.cuda.init()
    print(json.dumps({"what": what}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = timer.prepare(asked["prepare"]) if "prepare" in asked else timer.time(asked["time"])
        print(json.dumps({"answer": answer}), file=answers)
    return 0


if __name__ == "__main__":
    # this file's folder is the package: replace it by the package's parent, behind everything else
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path = [p for p in sys.path if os.path.realpath(p or ".") != here] + [os.path.dirname(here)]
    sys.exit(main(*sys.argv[1:5]))
