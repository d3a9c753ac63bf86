"""The arguments of the command line, read and checked."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fxckpt import __version__
from fxckpt.budget import parse as parse_budget
from fxckpt.cli.factory import FORM
from fxckpt.errors import InvalidBudget
from fxckpt.reports.explanation import KEYS

USAGE = 2
"""The exit code for unusable arguments."""

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

    def command(
        name: str, about: str, example: str, *, is_of_model: bool = True
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.add_argument(
            "--json", action="store_true", help="print one JSON value instead of text"
        )
        made.add_argument("--traceback", action="store_true", help="show where an error comes from")
        if is_of_model:
            made.add_argument("target", metavar="MODULE:FACTORY", help=FORM)
            made.add_argument(
                "--policy",
                metavar="MODULE:NAME",
                help="a policy: fxckpt.policies:save_matmuls, or one of your own",
            )
            made.add_argument(
                "--cost",
                choices=("roofline", "flops", "measured"),
                default="roofline",
                help="what an op takes (roofline)",
            )
        return made

    one = {
        "type": _budget,
        "metavar": "BYTES",
        "help": 'peak bytes of a step: "2GiB", 0.6 of the uncheckpointed peak, "auto"; none by default',
    }
    made = command(
        "plan",
        "Plan a step and print its figures and memory profile.",
        "fxckpt plan train.py:make_step --budget 2GiB",
    )
    made.add_argument("--budget", **one)  # type: ignore[arg-type]  # one option, three commands

    made = command(
        "explain",
        "List what is saved and what is recomputed, and why.",
        "fxckpt explain train.py:make_step --budget 0.6 --by module",
    )
    made.add_argument("--budget", **one)  # type: ignore[arg-type]
    made.add_argument(
        "--top", type=_count, metavar="N", help="rows to print (20 as text, else all); 0 for all"
    )
    made.add_argument("--sort", choices=sorted(KEYS), help="order of the rows (bytes)")
    made.add_argument("--decision", choices=("saved", "recomputed"), help="only these")
    made.add_argument(
        "--module",
        metavar="PATTERN",
        help="only modules that match, and what is inside them: 'layers.*.attn'",
    )
    made.add_argument("--op", metavar="PATTERN", help="only ops that match: '*softmax*'")
    what = made.add_mutually_exclusive_group()
    what.add_argument("--by", choices=("module", "op", "reason"), help="sums instead of rows")
    what.add_argument(
        "--why", metavar="VALUE", help="the reason for one value in words, and who reads it"
    )
    what.add_argument(
        "--saved",
        action="store_true",
        help="what the backward gets from the forward, one line a value",
    )
    what.add_argument("--peak", action="store_true", help="what the memory holds at the peak")
    made.add_argument(
        "--depth", type=_count, metavar="N", help="with --by module: cut paths to N parts"
    )
    made.add_argument(
        "--format", choices=("text", "markdown", "csv"), help="how to print the rows (text)"
    )

    made = command(
        "frontier",
        "Print time against peak, from the floor up.",
        "fxckpt frontier train.py:make_step --points 8 --plot frontier.png",
    )
    made.add_argument(
        "--points", type=_count, default=16, metavar="N", help="how many budgets, 2 or more (16)"
    )
    made.add_argument(
        "--budget",
        action="append",
        type=_budget,
        metavar="BYTES",
        help="a budget of your own; repeat for more, instead of --points",
    )
    made.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw it too (PNG, SVG or PDF; needs matplotlib)"
    )

    made = command(
        "html",
        "Write a page to look at a plan in a browser.",
        "fxckpt html train.py:make_step --budget 0.6 --out plan.html",
    )
    made.add_argument("--budget", **one)  # type: ignore[arg-type]
    made.add_argument(
        "--points",
        type=_count,
        default=8,
        metavar="N",
        help="plans on the page's slider, 2 or more (8); 0 for this plan alone",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=Path("fxckpt.html"),
        metavar="FILE",
        help="where to write it (fxckpt.html)",
    )

    made = command(
        "bench",
        "Run the step, as it is and inside budgets.",
        "fxckpt bench train.py:make_step --budget 0.8 --budget 0.5",
    )
    made.add_argument(
        "--budget",
        action="append",
        type=_budget,
        metavar="BYTES",
        help="a budget to run at; repeat for more (0.5)",
    )
    made.add_argument(
        "--steps",
        type=_count,
        default=5,
        metavar="N",
        help="timed steps, after one that is not (5)",
    )
    made.add_argument(
        "--inner",
        choices=("aot_eager", "inductor"),
        default="aot_eager",
        help="who compiles the two halves (aot_eager)",
    )

    made = command(
        "doctor",
        "Say what this machine has and what will work on it.",
        "fxckpt doctor",
        is_of_model=False,
    )
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
        parse_budget(value)
    except InvalidBudget as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what a command is asked for. Exits as argparse does, with :data:`USAGE` for what cannot be meant."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.command == "explain" and (clash := _without_effect(options)):
        parser.error(clash)
    return options


WITHOUT_EFFECT = {
    "why": ("top", "sort", "decision", "module", "op", "format"),
    "by": ("sort",),
    "saved": ("sort",),
    "peak": ("sort",),
}
"""Options of ``explain`` that say nothing about the answer that another one asks for."""


def _without_effect(options: argparse.Namespace) -> str:
    """Say which options would be passed over; nothing if there are none."""
    for answer, others in WITHOUT_EFFECT.items():
        given = [f"--{name}" for name in others if getattr(options, name) is not None]
        if getattr(options, answer) and given:
            return f"{', '.join(given)} and --{answer}: {'one has' if len(given) == 1 else 'they have'} no effect on the other. Leave one out."
    if options.depth is not None and options.by != "module":
        return "--depth cuts the paths of modules: give it with --by module."
    if options.json and options.format is not None:
        return f"--json and --format {options.format}: choose one."
    return ""
