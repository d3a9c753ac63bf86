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
from typing import Any, NoReturn

from tqdm import tqdm

from fxckpt import __version__
from fxckpt.budget import parse
from fxckpt.capture import plan as make_plan
from fxckpt.errors import BudgetInfeasible, FxckptError, InvalidBudget, InvalidOption
from fxckpt.frontier import frontier as make_frontier
from fxckpt.plan import Plan
from fxckpt.report import KEYS, memory_bar
from fxckpt.target import FORM, Target, TargetError, attribute, load

DONE, INFEASIBLE, USAGE, FAILED, INTERRUPTED = 0, 1, 2, 3, 130

EPILOG = """\
examples:
  fxckpt plan train.py:make_step --budget 2GiB
  fxckpt explain train.py:make_step --budget 0.6 --module 'layers.*.attn' --top 10
  fxckpt explain train.py:make_step --budget 0.6 --by module --format markdown
  fxckpt frontier train.py:make_step --points 8 --plot frontier.png
  fxckpt html train.py:make_step --budget 0.6 --out plan.html
  fxckpt bench train.py:make_step --budget 0.8 --budget 0.5
  fxckpt doctor

train.py:make_step is a function without arguments that returns (model, inputs). Models on the meta device can be planned, not run.

exit codes: 0 done, 1 the budget is infeasible, 2 unusable arguments, 3 the model cannot be captured, planned or run (doctor: something
is wrong), 130 interrupted
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"fxckpt: {message}\n{self.format_usage()}")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="fxckpt",
        description="Plans which activations of a training step are saved and which are recomputed, and shows it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fxckpt {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, about: str, example: str, *, is_of_model: bool = True) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=about, description=about, epilog=f"example:\n  {example}", formatter_class=argparse.RawDescriptionHelpFormatter
        )
        made.add_argument("--json", action="store_true", help="print one JSON value instead of text")
        made.add_argument("--traceback", action="store_true", help="show where an error comes from")
        if is_of_model:
            made.add_argument("target", metavar="MODULE:FACTORY", help=FORM)
            made.add_argument("--policy", metavar="MODULE:NAME", help="a policy: fxckpt.policies:save_matmuls, or one of your own")
            made.add_argument("--cost", choices=("roofline", "flops", "measured"), default="roofline", help="what an op takes (roofline)")
        return made

    one = {
        "type": _budget,
        "metavar": "BYTES",
        "help": 'peak bytes of a step: "2GiB", 0.6 of the uncheckpointed peak, "auto"; none by default',
    }
    made = command("plan", "Plan a step and print its figures and memory profile.", "fxckpt plan train.py:make_step --budget 2GiB")
    made.add_argument("--budget", **one)  # type: ignore[arg-type]  # one option, three commands

    made = command(
        "explain", "List what is saved and what is recomputed, and why.", "fxckpt explain train.py:make_step --budget 0.6 --by module"
    )
    made.add_argument("--budget", **one)  # type: ignore[arg-type]
    made.add_argument("--top", type=_count, default=20, metavar="N", help="rows to print (20); 0 for all")
    made.add_argument("--sort", choices=sorted(KEYS), default="bytes", help="order of the rows (bytes)")
    made.add_argument("--decision", choices=("saved", "recomputed"), help="only these")
    made.add_argument("--module", metavar="PATTERN", help="only modules that match, and what is inside them: 'layers.*.attn'")
    made.add_argument("--op", metavar="PATTERN", help="only ops that match: '*softmax*'")
    what = made.add_mutually_exclusive_group()
    what.add_argument("--by", choices=("module", "op", "reason"), help="sums instead of rows")
    what.add_argument("--why", metavar="VALUE", help="the reason for one value in words, and who reads it")
    what.add_argument("--saved", action="store_true", help="what the backward gets from the forward, one line a value")
    what.add_argument("--peak", action="store_true", help="what the memory holds at the peak")
    made.add_argument("--depth", type=_count, default=None, metavar="N", help="with --by module: cut paths to N parts")
    made.add_argument("--format", choices=("text", "markdown", "csv"), default="text", help="how to print the rows (text)")

    made = command(
        "frontier", "Print time against peak, from the floor up.", "fxckpt frontier train.py:make_step --points 8 --plot frontier.png"
    )
    made.add_argument("--points", type=_count, default=16, metavar="N", help="how many budgets (16)")
    made.add_argument(
        "--budget", action="append", type=_budget, metavar="BYTES", help="a budget of your own; repeat for more, instead of --points"
    )
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw it too (PNG, SVG or PDF; needs matplotlib)")

    made = command("html", "Write a page to look at a plan in a browser.", "fxckpt html train.py:make_step --budget 0.6 --out plan.html")
    made.add_argument("--budget", **one)  # type: ignore[arg-type]
    made.add_argument("--points", type=_count, default=8, metavar="N", help="plans on the page's slider (8)")
    made.add_argument("--out", type=Path, default=Path("fxckpt.html"), metavar="FILE", help="where to write it (fxckpt.html)")

    made = command("bench", "Run the step, as it is and inside budgets.", "fxckpt bench train.py:make_step --budget 0.8 --budget 0.5")
    made.add_argument("--budget", action="append", type=_budget, metavar="BYTES", help="a budget to run at; repeat for more (0.5)")
    made.add_argument("--steps", type=_count, default=5, metavar="N", help="timed steps, after one that is not (5)")
    made.add_argument("--inner", choices=("aot_eager", "inductor"), default="aot_eager", help="who compiles the two halves (aot_eager)")

    made = command("doctor", "Say what this machine has and what will work on it.", "fxckpt doctor", is_of_model=False)
    made.add_argument("--quick", action="store_true", help="leave out the self-test")
    return parser


def _budget(text: str) -> int | float | str | None:
    """Read a budget as Python code would have it: 0.6 is a fraction, 4096 are bytes."""
    if text.lower() == "none":
        return None
    value: int | float | str = text
    for kind in (int, float):
        try:
            value = kind(text)
            break
        except ValueError:
            continue
    try:
        parse(value)
    except InvalidBudget as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        options = build_parser().parse_args(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else USAGE
    try:
        with _quiet():
            return COMMANDS[options.command](options)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, a pager) has seen enough; nothing more is written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except BudgetInfeasible as error:
        return _failed(options, error, INFEASIBLE)
    except (TargetError, InvalidBudget, InvalidOption) as error:
        return _failed(options, error, USAGE)
    except FxckptError as error:
        return _failed(options, error, FAILED)
    except OSError as error:
        return _failed(options, FxckptError(f"cannot write {error.filename!r}: {error.strerror}"), USAGE)
    except Exception as error:
        # The user's own model raised, inside Dynamo or while it ran.
        first = str(error).strip().split("\n\n")[0] or "no message"
        return _failed(options, FxckptError(f"the step raised {type(error).__name__}: {first}\n(--traceback shows where)"), FAILED, error)


def _failed(options: argparse.Namespace, error: Exception, code: int, cause: Exception | None = None) -> int:
    if options.traceback:
        import traceback

        traceback.print_exception(cause or error)
    if options.json:
        body: dict[str, Any] = {"error": str(error), "kind": type(error).__name__, "exit_code": code}
        if isinstance(error, BudgetInfeasible):
            body |= {"floor_bytes": error.floor_bytes, "budget_bytes": error.budget_bytes}
        print(json.dumps(body))
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


def _loaded(options: argparse.Namespace) -> tuple[Target, Any]:
    with _aside():
        return load(options.target), attribute(options.policy) if options.policy else None


def _planned(options: argparse.Namespace) -> Plan:
    target, policy = _loaded(options)
    with _aside():
        return make_plan(target.model, *target.args, budget=options.budget, policy=policy, cost=options.cost, **target.kwargs)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def figures(plan: Plan) -> dict[str, Any]:
    """Return a plan's figures as plain data; bytes, seconds and FLOPs."""
    names = (
        "peak_bytes budget_bytes baseline_peak_bytes floor_bytes floor_bound_bytes saved_bytes recompute_seconds recompute_flops "
        "lower_bound_seconds price next_seconds step_seconds step_flops cost"
    )
    counts = {"saved_values": len(plan.saved), "recomputed_ops": len(plan.recomputed), "runs": len(plan.schedule)}
    return {name: getattr(plan, name) for name in names.split()} | counts


def _plan(options: argparse.Namespace) -> int:
    plan = _planned(options)
    if options.json:
        _print_json(figures(plan))
        return DONE
    width = max(len(name) for name, _ in plan.explain().summary())
    print("\n".join(f"{name:<{width}}  {text}" for name, text in plan.explain().summary()))
    print(f"\n{memory_bar(plan)}")
    return DONE


def _explain(options: argparse.Namespace) -> int:
    plan = _planned(options)
    shown = plan.explain().filter(decision=options.decision, module=options.module, op=options.op).sort(options.sort)
    if options.why:
        readers = shown.readers(options.why)
        answer = {"value": options.why, "why": shown.why(options.why), **{f"{k}_readers": list(v) for k, v in readers._asdict().items()}}
        if options.json:
            _print_json(answer)
            return DONE
        print(answer["why"])
        for when, names in zip(("the forward", "the backward, running again,", "the backward"), readers, strict=True):
            print(f"read in {when} by: {', '.join(names) or 'none'}")
        return DONE
    if options.saved:
        listed = shown.saved_values()
        if options.json:
            _print_json([vars(value) for value in listed.values])
        else:
            print(listed)
        return DONE
    if options.peak:
        timeline = plan.timeline()
        if options.json:
            _print_json(timeline.table().records())
        else:
            print(timeline)
        return DONE
    table = shown.table()
    if options.by:
        table = {"module": lambda: shown.by_module(options.depth), "op": shown.by_op, "reason": shown.by_reason}[options.by]()
    if options.json:
        _print_json({"figures": figures(plan), "rows": table.records()})
        return DONE
    count = len(table)
    table = table.top(options.top) if options.top else table
    print({"text": table.__str__, "markdown": table.to_markdown, "csv": table.to_csv}[options.format]())
    if len(table) < count and options.format == "text":
        print(f"... and {count - len(table)} more rows (--top 0 prints all)")
    if not count and options.format == "text":
        print("no value matches")
    return DONE


def _frontier(options: argparse.Namespace) -> int:
    target, policy = _loaded(options)
    points: Any = options.budget or options.points
    with _aside():
        curve = make_frontier(target.model, *target.args, points=points, policy=policy, cost=options.cost, **target.kwargs)
    if options.plot:
        _savefig(curve.plot(), options.plot)
    if options.json:
        _print_json(curve.table().records())
        return DONE
    print(curve)
    return DONE


def _savefig(axes: Any, path: Path) -> None:
    formats = axes.figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in formats:
        raise InvalidOption(f"--plot {path}: pictures are {', '.join(sorted(formats))}. Example: --plot frontier.png.")
    axes.figure.savefig(path, dpi=120)


def _html(options: argparse.Namespace) -> int:
    plan = _planned(options)
    path = plan.to_html(options.out, points=options.points)
    size = path.stat().st_size
    if options.json:
        _print_json({"path": str(path), "bytes": size})
    else:
        print(f"wrote {path} ({size / 2**20:.1f} MiB): open it in a browser")
    return DONE


def _bench(options: argparse.Namespace) -> int:
    from fxckpt.comparison import compare, table

    # The profiler that measures peaks writes a line whenever it starts or stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    target, policy = _loaded(options)
    budgets = options.budget or [0.5]
    with _aside(), tqdm(total=(len(budgets) + 1) * (options.steps + 2), desc="bench", file=sys.stderr, disable=None) as bar:

        def tick(name: str) -> None:
            bar.set_description(name)
            bar.update()

        runs = compare(target, budgets, steps=options.steps, inner=options.inner, policy=policy, cost=options.cost, tick=tick)
    if options.json:
        _print_json(table(runs).records())
    else:
        print(table(runs))
    return DONE


def _doctor(options: argparse.Namespace) -> int:
    from fxckpt.doctor import examine

    with _aside():
        diagnosis = examine(self_test=not options.quick)
    if options.json:
        _print_json(diagnosis.table().records())
    else:
        print(diagnosis)
    return DONE if diagnosis.is_well else FAILED


COMMANDS = {"plan": _plan, "explain": _explain, "frontier": _frontier, "html": _html, "bench": _bench, "doctor": _doctor}
