"""The command line: plan, explain, draw and run a model's step without writing a script.

Exit codes: 0, done; 1, the budget is infeasible; 2, the arguments are not usable; 3, the model cannot be captured, planned or run, or the doctor
found something wrong; 130, interrupted. With ``--json`` the standard output is one JSON value and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from fxckpt import _interrupts
from fxckpt._interrupts import INTERRUPTED
from fxckpt.cli.arguments import USAGE, parse
from fxckpt.cli.factory import POLICY_FORM, Target, TargetError, attribute, load
from fxckpt.cli.output import OutputError, write
from fxckpt.errors import BudgetInfeasible, FxckptError, InvalidBudget, InvalidOption
from fxckpt.planner.capture import plan as make_plan
from fxckpt.planner.sweep import frontier as make_frontier
from fxckpt.plans.types import Plan
from fxckpt.reports.explanation import Explanation
from fxckpt.reports.memory_bar import memory_bar
from fxckpt.utils.globs import fits, is_inside
from fxckpt.utils.tables import Table

DONE, INFEASIBLE, FAILED = 0, 1, 3
ROWS = 20
"""How many rows are printed as text, unless ``--top`` says otherwise."""


class Answer(NamedTuple):
    """What a command prints, and its exit code."""

    text: str
    code: int = DONE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        options = parse(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else USAGE
    with _interrupts.raised():
        return _answered(options)


def _answered(options: argparse.Namespace) -> int:
    try:
        with _quiet():
            answer = COMMANDS[options.command](options)
        write(answer.text)
        return answer.code
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except OutputError as error:
        return _say(str(error), USAGE)
    except BudgetInfeasible as error:
        return _failed(options, error, INFEASIBLE)
    except (TargetError, InvalidBudget, InvalidOption) as error:
        return _failed(options, error, USAGE)
    except FxckptError as error:
        return _failed(options, error, FAILED)
    except Exception as error:
        # The user's own model raised, inside Dynamo or while it ran.
        first = str(error).strip().split("\n\n")[0] or "no message"
        return _failed(
            options,
            FxckptError(
                f"the step raised {type(error).__name__}: {first}\n(--traceback shows where)"
            ),
            FAILED,
            error,
        )


def _failed(
    options: argparse.Namespace, error: Exception, code: int, cause: Exception | None = None
) -> int:
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
    return _say(str(error), code)


def _say(text: str, code: int) -> int:
    print(f"fxckpt: {text}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's own warnings about itself to itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered.*")
        warnings.filterwarnings("ignore", message=".*Profiler clears events.*")
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Send what the user's code prints to the standard error, so that the standard output is ours."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _saving(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidOption(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def _loaded(options: argparse.Namespace) -> tuple[Target, Any]:
    with _aside():
        return load(options.target), attribute(
            options.policy, POLICY_FORM
        ) if options.policy else None


def _planned(options: argparse.Namespace) -> Plan:
    target, policy = _loaded(options)
    with _aside():
        return make_plan(
            target.model,
            *target.args,
            budget=options.budget,
            policy=policy,
            cost=options.cost,
            **target.kwargs,
        )


def _json(value: Any) -> Answer:
    return Answer(json.dumps(value, indent=1, ensure_ascii=False))


def figures(plan: Plan) -> dict[str, Any]:
    """Return a plan's figures as plain data; bytes, seconds and FLOPs."""
    names = (
        "peak_bytes budget_bytes baseline_peak_bytes floor_bytes floor_bound_bytes saved_bytes recompute_seconds recompute_flops "
        "lower_bound_seconds price next_seconds step_seconds step_flops cost"
    )
    counts = {
        "saved_values": len(plan.saved),
        "recomputed_ops": len(plan.recomputed),
        "runs": len(plan.schedule),
    }
    return {name: getattr(plan, name) for name in names.split()} | counts


def _plan(options: argparse.Namespace) -> Answer:
    plan = _planned(options)
    if options.json:
        return _json(figures(plan))
    summary = plan.explain().summary()
    width = max(len(name) for name, _ in summary)
    lines = (f"{name:<{width}}  {text}" for name, text in summary)
    return Answer("\n".join((*lines, "", memory_bar(plan))))


def _explain(options: argparse.Namespace) -> Answer:
    plan = _planned(options)
    shown = (
        plan.explain()
        .filter(decision=options.decision, module=options.module, op=options.op)
        .sort(options.sort or "bytes")
    )
    if options.why is not None:
        return _why(options, shown)
    if options.saved:
        return _rows(options, shown.saved_values().table())
    if options.peak:
        timeline = plan.timeline()
        return _rows(
            options,
            timeline.table().where(lambda held: _is_wanted(options, held)),
            f"{timeline.headline()}\n\n",
        )
    sums = {
        "module": lambda: shown.by_module(options.depth),
        "op": shown.by_op,
        "reason": shown.by_reason,
    }
    table = sums[options.by]() if options.by else shown.table()
    if options.json:
        return _json({"figures": figures(plan), "rows": _cut(options, table).records()})
    return _rows(options, table)


def _why(options: argparse.Namespace, shown: Explanation) -> Answer:
    why, readers = shown.why(options.why), shown.readers(options.why)
    if options.json:
        return _json(
            {
                "value": options.why,
                "why": why,
                **{f"{k}_readers": list(v) for k, v in readers._asdict().items()},
            }
        )
    phases = ("the forward", "the backward, running again,", "the backward")
    read = (
        f"read in {when} by: {', '.join(names) or 'none'}"
        for when, names in zip(phases, readers, strict=True)
    )
    return Answer("\n".join((why, *read)))


def _is_wanted(options: argparse.Namespace, held: dict[str, Any]) -> bool:
    """Return whether what holds memory passes the filters."""
    return (
        options.decision in (None, held["held_as"])
        and (options.module is None or is_inside(held["module"], options.module))
        and (options.op is None or fits(held["op"], options.op))
    )


def _cut(options: argparse.Namespace, table: Table, rows: int = 0) -> Table:
    """Return as many rows as are asked for, else ``rows``; 0 for all."""
    count = rows if options.top is None else options.top
    return table.top(count) if count else table


def _rows(options: argparse.Namespace, table: Table, heading: str = "") -> Answer:
    """Answer with a table in the form that is asked for; the heading is for people."""
    if options.json:
        return _json(_cut(options, table).records())
    if options.format == "csv":
        return Answer(_cut(options, table).to_csv())
    if options.format == "markdown":
        return Answer(_cut(options, table).to_markdown())
    shown = _cut(options, table, ROWS)
    hidden = len(table) - len(shown)
    rest = (
        f"\n... and {hidden} more rows (--top 0 prints all)"
        if hidden
        else ""
        if len(table)
        else "\nno value matches"
    )
    return Answer(f"{heading}{shown}{rest}")


def _frontier(options: argparse.Namespace) -> Answer:
    target, policy = _loaded(options)
    points: Any = options.budget or options.points
    with _aside():
        curve = make_frontier(
            target.model,
            *target.args,
            points=points,
            policy=policy,
            cost=options.cost,
            **target.kwargs,
        )
    if options.plot:
        _savefig(curve.plot(), options.plot)
    return _json(curve.table().records()) if options.json else Answer(str(curve))


def _savefig(axes: Any, path: Path) -> None:
    formats = axes.figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in formats:
        raise InvalidOption(
            f"--plot {path}: pictures are {', '.join(sorted(formats))}. Example: --plot frontier.png."
        )
    with _saving(path):
        axes.figure.savefig(path, dpi=120)


def _html(options: argparse.Namespace) -> Answer:
    plan = _planned(options)
    with _saving(options.out):
        path = plan.to_html(options.out, points=options.points)
    size = path.stat().st_size
    if options.json:
        return _json({"path": str(path), "bytes": size})
    return Answer(f"wrote {path} ({size / 2**20:.1f} MiB): open it in a browser")


def _bench(options: argparse.Namespace) -> Answer:
    from fxckpt.cli.benchmark import compare, table

    # The profiler that measures peaks writes a line whenever it starts or stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    target, policy = _loaded(options)
    budgets = options.budget or [0.5]
    with (
        _aside(),
        tqdm(
            total=(len(budgets) + 1) * (options.steps + 2),
            desc="bench",
            file=sys.stderr,
            disable=None,
        ) as bar,
    ):

        def tick(name: str) -> None:
            bar.set_description(name)
            bar.update()

        runs = compare(
            target,
            budgets,
            steps=options.steps,
            inner=options.inner,
            policy=policy,
            cost=options.cost,
            tick=tick,
        )
    return _json(table(runs).records()) if options.json else Answer(str(table(runs)))


def _doctor(options: argparse.Namespace) -> Answer:
    from fxckpt.cli.doctor import examine

    with _aside():
        diagnosis = examine(self_test=not options.quick)
    text = _json(diagnosis.table().records()).text if options.json else str(diagnosis)
    return Answer(text, DONE if diagnosis.is_well else FAILED)


COMMANDS = {
    "plan": _plan,
    "explain": _explain,
    "frontier": _frontier,
    "html": _html,
    "bench": _bench,
    "doctor": _doctor,
}
