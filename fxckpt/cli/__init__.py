"""The command line: plan, explain, draw and run a model's step without writing a script.

Exit codes: 0, done; 1, the budget is infeasible; 2, the arguments are not usable; 3, the model
cannot be captured, planned or run, or the doctor or verify found something wrong; 130, interrupted.
With ``--json`` the standard output is one JSON value and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fxckpt import _interrupts, repro
from fxckpt._interrupts import INTERRUPTED
from fxckpt.backend import Backend
from fxckpt.budgets import Budget
from fxckpt.cli.arguments import USAGE, parse
from fxckpt.cli.factory import (
    POLICY_FORM,
    ModelCall,
    TargetError,
    load_attribute,
    load_factory,
    load_target,
)
from fxckpt.cli.output import OutputError, write
from fxckpt.costs.calibration import calibrate
from fxckpt.costs.measured import Records, calibrate_cpu
from fxckpt.errors import (
    BudgetInfeasible,
    FxckptError,
    InvalidBudget,
    InvalidOption,
    NotOneGraph,
    SlowdownInfeasible,
)
from fxckpt.planner.capacity import fit
from fxckpt.planner.capture import plan as make_plan
from fxckpt.planner.sweep import frontier as make_frontier
from fxckpt.plans.types import Plan
from fxckpt.rehearsal.api import plan_step
from fxckpt.rehearsal.rehearse import is_of_parts
from fxckpt.reports.explanation import Explanation
from fxckpt.reports.memory_bar import memory_bar
from fxckpt.reports.plots import require_matplotlib
from fxckpt.reports.step_plan import StepFrontier, StepPlan
from fxckpt.reports.tradeoff import Frontier
from fxckpt.utils.globs import fits, is_inside
from fxckpt.utils.progress import progress
from fxckpt.utils.tables import Column, Table
from fxckpt.verification.api import verify

DONE, INFEASIBLE, FAILED = 0, 1, 3
DEFAULT_ROWS = 20
"""Number of rows printed as text without ``--top``."""
FIGURES = (
    "peak_bytes",
    "budget_bytes",
    "baseline_peak_bytes",
    "floor_bytes",
    "floor_bound_bytes",
    "saved_bytes",
    "recompute_seconds",
    "recompute_flops",
    "away_bytes",
    "stall_seconds",
    "lower_bound_seconds",
    "price",
    "next_seconds",
    "step_seconds",
    "step_flops",
    "cost",
)
"""Fields of a plan that ``--json`` prints."""


class Answer(NamedTuple):
    """The result of a command."""

    text: str
    """The text for the standard output."""
    code: int = DONE
    """The exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of ``arguments``, by default ``sys.argv[1:]``, and return its exit code."""
    try:
        options = parse(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else USAGE
    with _interrupts.raised():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    """Run a command, print its answer or error, and return its exit code."""
    try:
        with _ignore_torch_warnings():
            answer = COMMANDS[options.command](options)
        write(answer.text)
        return answer.code
    except KeyboardInterrupt:
        return _print_error("interrupted", INTERRUPTED)
    except OutputError as error:
        return _print_error(str(error), USAGE)
    except (BudgetInfeasible, SlowdownInfeasible) as error:
        return _report(options, error, INFEASIBLE)
    except (TargetError, InvalidBudget, InvalidOption) as error:
        return _report(options, error, USAGE)
    except FxckptError as error:
        return _report(options, error, FAILED)
    except Exception as error:
        # The user's own model raised, inside Dynamo or while it ran.
        first = str(error).strip().split("\n\n")[0] or "no message"
        text = f"the step raised {type(error).__name__}: {first}\n(--traceback shows where)"
        return _report(options, FxckptError(text), FAILED, error)


def _report(
    options: argparse.Namespace, error: Exception, code: int, cause: Exception | None = None
) -> int:
    """Print an error, with ``--json`` as JSON too, and return the exit code."""
    if options.traceback:
        import traceback

        traceback.print_exception(cause or error)
    if options.json:
        body: dict[str, Any] = {
            "error": str(error),
            "kind": type(error).__name__,
            "exit_code": code,
        }
        if isinstance(error, BudgetInfeasible):
            body |= {"floor_bytes": error.floor_bytes, "budget_bytes": error.budget_bytes}
        with contextlib.suppress(OutputError):
            write(json.dumps(body))
    return _print_error(str(error), code)


def _print_error(text: str, code: int) -> int:
    print(f"fxckpt: {text}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _ignore_torch_warnings() -> Iterator[None]:
    """Ignore the warnings of torch about its own internals."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered.*")
        warnings.filterwarnings("ignore", message=".*Profiler clears events.*")
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send the prints of the user's code to the standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise :class:`InvalidOption` for a file that cannot be written."""
    try:
        yield
    except OSError as error:
        raise InvalidOption(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def _load(options: argparse.Namespace) -> tuple[ModelCall, Any]:
    """Return the target and the policy of a command."""
    with _stdout_to_stderr():
        target = load_target(options.target)
        policy = load_attribute(options.policy, POLICY_FORM) if options.policy else None
    return target, policy


def _make_plan(options: argparse.Namespace) -> Plan | StepPlan:
    """Return the plan of a target's graph, or of its step if that is several graphs."""
    return _planned(options, *_load(options))


def _planned(options: argparse.Namespace, target: ModelCall, policy: Any) -> Plan | StepPlan:
    """Return the plan of a command's target and policy."""
    if not is_of_parts(target.model):
        with contextlib.suppress(NotOneGraph), _stdout_to_stderr():
            return make_plan(
                target.model,
                *target.args,
                budget=options.budget,
                max_slowdown=options.max_slowdown,
                tile=options.tile,
                **_pricing(options, policy),
                **target.kwargs,
            )
    if options.max_slowdown is not None:
        raise InvalidOption(
            f"--max-slowdown {options.max_slowdown} is of a model of one graph, and this step has "
            "several. Give --budget."
        )
    if options.tile is not None:
        raise InvalidOption(
            f"--tile {options.tile} is of a model of one graph, and this step has several. Leave "
            "it out."
        )
    return _step_of(options, target, policy, options.budget)


def _pricing(options: argparse.Namespace, policy: Any) -> dict[str, Any]:
    """Return what plans, steps and frontiers are all asked with."""
    return {
        "policy": policy,
        "cost": options.cost,
        "device": options.device,
        "offload": options.offload,
    }


def _step_of(
    options: argparse.Namespace, target: ModelCall, policy: Any, budget: Budget
) -> StepPlan:
    """Return the plan of a target's step."""
    with _stdout_to_stderr():
        return plan_step(
            target.model,
            *target.args,
            budget=budget,
            **_pricing(options, policy),
            **target.kwargs,
        )


def _graph_of(options: argparse.Namespace) -> Plan:
    """Return the plan of the only graph, or that by which most calls of ``--graph`` run."""
    plan = _make_plan(options)
    if isinstance(plan, Plan):
        if options.graph not in (None, 1):
            raise InvalidOption(f"--graph {options.graph}: the model is one graph. Leave it out.")
        return plan
    if options.graph is None or not 1 <= options.graph <= len(plan.graphs):
        known = ", ".join(f"{graph.number} ({graph.source})" for graph in plan.graphs)
        raise InvalidOption(f"the step has several graphs: name one by --graph. They are {known}.")
    return plan.plan_of(options.graph)


def _json_answer(value: Any) -> Answer:
    return Answer(json.dumps(value, indent=1, ensure_ascii=False))


def figures(plan: Plan) -> dict[str, Any]:
    """Return a plan's figures for JSON, in bytes, seconds and FLOPs."""
    counts = {
        "saved_values": len(plan.saved),
        "recomputed_ops": len(plan.recomputed),
        "runs": len(plan.schedule),
    }
    return {name: getattr(plan, name) for name in FIGURES} | counts


def _plan(options: argparse.Namespace) -> Answer:
    plan = _make_plan(options)
    if isinstance(plan, StepPlan):
        rows = plan.table().records()
        return _json_answer({**plan.figures(), "rows": rows}) if options.json else Answer(str(plan))
    if options.json:
        return _json_answer(figures(plan))
    return Answer(f"{plan}\n\n{memory_bar(plan)}")


def _explain(options: argparse.Namespace) -> Answer:
    plan = _graph_of(options)
    everything = plan.explain()
    shown = everything.filter(decision=options.decision, module=options.module, op=options.op).sort(
        options.sort or "bytes"
    )
    if options.why is not None:
        return _why(options, shown)
    if options.saved:
        return _table_answer(options, shown.saved_values().table())
    if options.peak:
        timeline = plan.timeline()
        live = timeline.table().where(lambda held: _matches(options, held))
        return _table_answer(options, live, f"{timeline.headline()}\n\n")
    groups = {
        "module": lambda: shown.by_module(options.depth),
        "op": shown.by_op,
        "reason": shown.by_reason,
    }
    table = groups[options.by]() if options.by else shown.table()
    if options.json:
        rows = _limit(options, table).records()
        return _json_answer({"figures": figures(plan), "rows": rows})
    if not len(table) and options.module is not None:
        modules = sorted({row.module for row in everything.rows if row.module})
        listed = ", ".join(modules[:12]) or "none"
        return _table_answer(options, table, none=f"no value matches; modules: {listed}")
    return _table_answer(options, table)


def _why(options: argparse.Namespace, shown: Explanation) -> Answer:
    why, readers = shown.why(options.why), shown.readers(options.why)
    if options.json:
        names = {f"{phase}_readers": list(names) for phase, names in readers._asdict().items()}
        return _json_answer({"value": options.why, "why": why, **names})
    phases = ("the forward", "the backward, recomputed,", "the backward")
    read = (
        f"read in {phase} by: {', '.join(ops) or 'none'}"
        for phase, ops in zip(phases, readers, strict=True)
    )
    return Answer("\n".join((why, *read)))


def _matches(options: argparse.Namespace, held: dict[str, Any]) -> bool:
    """Return whether a row of the timeline passes the filters."""
    return (
        options.decision in (None, held["held_as"])
        and (options.module is None or is_inside(held["module"], options.module))
        and (options.op is None or fits(held["op"], options.op))
    )


def _limit(options: argparse.Namespace, table: Table, rows: int = 0) -> Table:
    """Return the first ``--top`` rows, by default ``rows``; 0 means all."""
    count = rows if options.top is None else options.top
    return table.top(count) if count else table


def _table_answer(
    options: argparse.Namespace, table: Table, heading: str = "", none: str = "no value matches"
) -> Answer:
    """Return the table as JSON, CSV or Markdown, or as text under its heading."""
    if options.json:
        return _json_answer(_limit(options, table).records())
    if options.format == "csv":
        return Answer(_limit(options, table).to_csv())
    if options.format == "markdown":
        return Answer(_limit(options, table).to_markdown())
    shown = _limit(options, table, DEFAULT_ROWS)
    note = ""
    if hidden := len(table) - len(shown):
        note = f"\n... and {hidden} more rows (--top 0 prints all)"
    elif not len(table):
        note = f"\n{none}"
    return Answer(f"{heading}{shown}{note}")


def _frontier(options: argparse.Namespace) -> Answer:
    if options.plot:
        require_matplotlib()
    target, policy = _load(options)
    points: Any = options.budget or options.points
    curve: Frontier | StepFrontier | None = None
    if not is_of_parts(target.model):
        with contextlib.suppress(NotOneGraph):
            curve = _frontier_of(options, target, policy, points)
    if curve is None:
        curve = _step_of(options, target, policy, None).frontier(points)
    if options.plot:
        _savefig(curve.plot(), options.plot)
    return _json_answer(curve.table().records()) if options.json else Answer(str(curve))


def _frontier_of(
    options: argparse.Namespace, target: ModelCall, policy: Any, points: Any
) -> Frontier:
    """Return the frontier of a target that is one graph."""
    with _stdout_to_stderr():
        return make_frontier(
            target.model,
            *target.args,
            points=points,
            **_pricing(options, policy),
            **target.kwargs,
        )


def _fit(options: argparse.Namespace) -> Answer:
    with _stdout_to_stderr():
        make_step = load_factory(options.target, options.over)
        policy = load_attribute(options.policy, POLICY_FORM) if options.policy else None
        found = fit(
            make_step,
            memory=options.memory,
            over=options.over,
            optimizer=_optimizer(options.optimizer),
            start=options.start,
            multiple=options.multiple,
            accumulates=options.accumulates,
            reserve=options.reserve,
            policy=policy,
            cost=options.cost,
            device=options.device,
        )
    if not options.json:
        return Answer(str(found))
    sizes = {"size": found.size, "fastest": found.fastest.size}
    return _json_answer({**sizes, "trials": found.table().records()})


def _optimizer(text: str) -> Any:
    """Return the optimizer that a user named: its name in torch.optim, a class, or None."""
    if text.lower() == "none":
        return None
    if ":" in text:
        return load_attribute(text, "Give a class of torch.optim, or MODULE:NAME of another.")
    return text


def _savefig(axes: Any, path: Path) -> None:
    formats = axes.figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in formats:
        raise InvalidOption(
            f"--plot {path}: pictures are {', '.join(sorted(formats))}. "
            "Example: --plot frontier.png."
        )
    with _writing(path):
        axes.figure.savefig(path, dpi=120)


def _html(options: argparse.Namespace) -> Answer:
    target, policy = _load(options)
    plan = _planned(options, target, policy)
    if isinstance(plan, Plan) and options.offload is not None and options.points:
        # A plan does not tell which values may be sent away, for the others on the slider.
        curve = _frontier_of(options, target, policy, options.points)
        with _writing(options.out):
            path = curve.to_html(options.out, chosen=plan)
    else:
        points = {} if isinstance(plan, StepPlan) else {"points": options.points}
        with _writing(options.out):
            path = plan.to_html(options.out, **points)
    size = path.stat().st_size
    if options.json:
        return _json_answer({"path": str(path), "bytes": size})
    return Answer(f"wrote {path} ({size / 2**20:.1f} MiB): open it in a browser")


def _bench(options: argparse.Namespace) -> Answer:
    from fxckpt.cli.benchmark import compare, table

    # Kineto, the profiler that measures peaks, logs each start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    target, policy = _load(options)
    budgets = options.budget or [0.5]
    ticks = (len(budgets) + 1) * (options.steps + 2)
    with _stdout_to_stderr(), progress("bench", "steps", ticks) as shown:
        runs = compare(
            target,
            budgets,
            steps=options.steps,
            inner=options.inner,
            policy=policy,
            cost=options.cost,
            tick=shown.tick,
        )
    text = json.dumps(table(runs).records(), indent=1) if options.json else str(table(runs))
    refused = [run.infeasible for run in runs if run.infeasible is not None]
    for error in refused:
        _print_error(str(error), INFEASIBLE)
    return Answer(text, INFEASIBLE if refused else DONE)


def _verify(options: argparse.Namespace) -> Answer:
    with _stdout_to_stderr():
        target = load_target(options.target)
        step, reference = target.model, None
        if options.reference is not None:
            reference = load_target(options.reference).model
        elif options.budget is not None:
            backend = Backend(budget=options.budget, inner="aot_eager")
            step, reference = torch.compile(copy.deepcopy(step), backend=backend), step
        verdict = verify(
            step,
            reference,
            *target.args,
            tolerance=options.tolerance,
            steps=options.steps,
            **target.kwargs,
        )
    code = DONE if verdict.ok else FAILED
    if not options.json:
        return Answer(str(verdict), code)
    return Answer(_json_answer(asdict(verdict)).text, code)


def _calibrate(options: argparse.Namespace) -> Answer:
    records = Records.of_machine()
    device = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
    if device.type == "cpu":
        rates = ("FLOP/s", "bytes/s", "launch, s", "random numbers/s")
        found = zip(rates, calibrate_cpu(records), strict=True)
        figures: dict[str, Any] = {"device": "cpu", **dict(found)}
    else:
        figures = asdict(calibrate(device, records))
    if options.json:
        return _json_answer(figures)
    columns = (Column("figure", "figure"), Column("value", "value"))
    rows = tuple((k, v if isinstance(v, str) else f"{v:.4g}") for k, v in figures.items())
    return Answer(f"{Table(columns, rows)}\nkept in {records.path}")


def _doctor(options: argparse.Namespace) -> Answer:
    from fxckpt.cli.doctor import examine, replan

    if options.repro is not None:
        found = repro.load(options.repro)
        with _stdout_to_stderr():
            verdict, is_mended = replan(found)
        code = DONE if is_mended else FAILED
        if options.json:
            return Answer(_json_answer({**asdict(found), "replanned": verdict}).text, code)
        return Answer(f"{found}\n\n{verdict}", code)
    with _stdout_to_stderr():
        diagnosis = examine(self_test=not options.quick)
    text = _json_answer(diagnosis.table().records()).text if options.json else str(diagnosis)
    return Answer(text, DONE if diagnosis.is_healthy else FAILED)


COMMANDS = {
    "plan": _plan,
    "explain": _explain,
    "frontier": _frontier,
    "fit": _fit,
    "html": _html,
    "bench": _bench,
    "verify": _verify,
    "calibrate": _calibrate,
    "doctor": _doctor,
}
