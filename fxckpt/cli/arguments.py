"""The arguments of the command line: their parsers and their checks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from fxckpt import __version__
from fxckpt.budgets import AUTO_MARGIN, Budget, from_text, within
from fxckpt.cli.factory import FORM
from fxckpt.costs.devices import DEVICES
from fxckpt.errors import InvalidBudget, InvalidOption
from fxckpt.planner.planned_device import device_here, planned_device
from fxckpt.planner.tiles import check_tile
from fxckpt.reports.explanation import KEYS
from fxckpt.tiers import Host, Tier, tier_of

USAGE = 2
"""The exit code for unusable arguments."""

EPILOG = """\
examples:
  fxckpt plan train.py:make_step --budget 2GiB
  fxckpt plan train.py:make_step --budget 60GiB --device H100
  fxckpt plan train.py:make_step --budget 40GiB --device H100 --offload 128GiB
  fxckpt explain train.py:make_step --budget 0.6 --module 'layers.*.attn' --top 10
  fxckpt explain train.py:make_step --budget 0.6 --by module --format markdown
  fxckpt frontier train.py:make_step --points 8 --plot frontier.png
  fxckpt fit train.py:make_batch --memory 80GiB --over batch --device H100
  fxckpt html train.py:make_step --budget 0.6 --out plan.html
  fxckpt html train.py:make_step --max-slowdown 0.1
  fxckpt bench train.py:make_step --budget 0.8 --budget 0.5
  fxckpt verify train.py:make_step --reference train.py:make_plain_step
  fxckpt calibrate
  fxckpt doctor

train.py:make_step is a function without arguments that returns (model, inputs). Models on the
meta device can be planned, not run. train.py:make_batch is one that takes the size to find.

exit codes: 0 done, 1 the budget is infeasible, 2 unusable arguments, 3 the model cannot be
captured, planned or run (doctor and verify: something is wrong), 130 interrupted
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"fxckpt: {message}\n{self.format_usage()}")


class _Subparsers(Protocol):
    def add_parser(self, name: str, **kwargs: Any) -> argparse.ArgumentParser: ...


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="fxckpt",
        description="Plans which activations of a training step are saved and which are "
        "recomputed, and shows it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fxckpt {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_plan(commands)
    _add_explain(commands)
    _add_frontier(commands)
    _add_fit(commands)
    _add_html(commands)
    _add_bench(commands)
    _add_verify(commands)
    _add_calibrate(commands)
    _add_doctor(commands)
    return parser


def _add_command(
    commands: _Subparsers, name: str, about: str, example: str
) -> argparse.ArgumentParser:
    """Add a command with the options that all commands have."""
    parser = commands.add_parser(
        name,
        help=about,
        description=about,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of text")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    return parser


def _add_model_command(
    commands: _Subparsers, name: str, about: str, example: str
) -> argparse.ArgumentParser:
    """Add a command that plans the step of a model."""
    parser = _add_command(commands, name, about, example)
    parser.add_argument("target", metavar="MODULE:FACTORY", help=FORM)
    parser.add_argument(
        "--policy",
        metavar="MODULE:NAME",
        help="a policy: fxckpt.policies:save_matmuls, or one of your own",
    )
    parser.add_argument(
        "--cost",
        choices=("roofline", "flops", "measured"),
        default="roofline",
        help="the cost model of the ops (roofline)",
    )
    return parser


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        type=_device,
        metavar="NAME",
        help=f"the device to plan for, which need not be here: {', '.join(DEVICES)}, cuda, "
        "cuda:1 or cpu; by default where the model is",
    )


def _add_offload(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--offload",
        type=_offload,
        metavar="BYTES",
        help='send values to the memory of a host, of "64GiB", or "host" for one that holds all '
        "that is sent; by default they stay on the device",
    )


def _add_offload_or_tiles(parser: argparse.ArgumentParser) -> None:
    ways = parser.add_mutually_exclusive_group()
    _add_offload(ways)
    ways.add_argument(
        "--tile",
        type=_tile,
        metavar="N",
        help='run independent rows, such as those of a head with its loss, in N tiles, or "auto" '
        "for as many as are fastest; of a model in one graph",
    )


def _add_budget(parser: argparse.ArgumentParser) -> None:
    targets = parser.add_mutually_exclusive_group()
    targets.add_argument(
        "--budget",
        type=_budget,
        metavar="BYTES",
        help='peak bytes of a step: "2GiB", 0.6 (or 60%%) of the uncheckpointed peak, "min", '
        '"auto"; none by default',
    )
    targets.add_argument(
        "--max-slowdown",
        type=_slowdown,
        metavar="SHARE",
        help="the least memory for at most this much extra time: 0.1 of the step",
    )


def _add_budgets(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument("--budget", action="append", type=_budget, metavar="BYTES", help=about)


def _add_plan(commands: _Subparsers) -> None:
    parser = _add_model_command(
        commands,
        "plan",
        "Plan a step and print its figures and memory profile.",
        "fxckpt plan train.py:make_step --budget 2GiB",
    )
    _add_device(parser)
    _add_budget(parser)
    _add_offload_or_tiles(parser)


def _add_explain(commands: _Subparsers) -> None:
    parser = _add_model_command(
        commands,
        "explain",
        "List the saved and the recomputed values, with reasons.",
        "fxckpt explain train.py:make_step --budget 0.6 --by module",
    )
    _add_device(parser)
    _add_budget(parser)
    _add_offload_or_tiles(parser)
    parser.add_argument(
        "--top", type=_count, metavar="N", help="rows to print (20 as text, else all); 0 for all"
    )
    parser.add_argument("--graph", type=_count, metavar="N", help="the graph, in a step of several")
    parser.add_argument("--sort", choices=sorted(KEYS), help="order of the rows (bytes)")
    parser.add_argument(
        "--decision", choices=("saved", "recomputed", "offloaded"), help="only these"
    )
    parser.add_argument(
        "--module",
        metavar="PATTERN",
        help="only modules that match, and their submodules: 'layers.*.attn'",
    )
    parser.add_argument("--op", metavar="PATTERN", help="only ops that match: '*softmax*'")
    answers = parser.add_mutually_exclusive_group()
    answers.add_argument("--by", choices=("module", "op", "reason"), help="sums instead of rows")
    answers.add_argument(
        "--why", metavar="VALUE", help="the reason for one value in words, and its readers"
    )
    answers.add_argument(
        "--saved", action="store_true", help="the values saved for the backward, one line a value"
    )
    answers.add_argument("--peak", action="store_true", help="the values live at the peak")
    parser.add_argument(
        "--depth", type=_count, metavar="N", help="with --by module: cut paths to N parts"
    )
    parser.add_argument(
        "--format", choices=("text", "markdown", "csv"), help="how to print the rows (text)"
    )


def _add_frontier(commands: _Subparsers) -> None:
    parser = _add_model_command(
        commands,
        "frontier",
        "Print time against peak, from the floor up.",
        "fxckpt frontier train.py:make_step --points 8 --plot frontier.png",
    )
    _add_device(parser)
    _add_offload(parser)
    parser.add_argument(
        "--points", type=_count, default=16, metavar="N", help="how many budgets, 2 or more (16)"
    )
    _add_budgets(parser, "a budget of your own; repeat for more, instead of --points")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw it too (PNG, SVG or PDF; needs matplotlib)"
    )


def _add_fit(commands: _Subparsers) -> None:
    parser = _add_model_command(
        commands,
        "fit",
        "Find the largest batch, or other size, that fits a memory.",
        "fxckpt fit train.py:make_batch --memory 80GiB --over batch --device H100",
    )
    _add_device(parser)
    parser.add_argument(
        "--memory",
        type=_memory,
        metavar="BYTES",
        help='"80GiB", or "auto" for what is free here; by default that of --device, as "auto" is '
        "for one elsewhere",
    )
    parser.add_argument(
        "--over", default="batch", metavar="NAME", help="the parameter of FACTORY (batch)"
    )
    parser.add_argument(
        "--start", type=_count, default=1, metavar="N", help="the least size to try (1)"
    )
    parser.add_argument(
        "--multiple", type=_count, default=1, metavar="N", help="sizes are multiples of it (1)"
    )
    parser.add_argument(
        "--optimizer",
        default="AdamW",
        metavar="CLASS",
        help="a class of torch.optim, MODULE:NAME, or none (AdamW)",
    )
    parser.add_argument(
        "--accumulates",
        action="store_true",
        help="gradients of earlier micro-batches are held during the step",
    )
    parser.add_argument(
        "--reserve",
        type=float,
        default=AUTO_MARGIN,
        metavar="SHARE",
        help=f"share of the memory for fragmentation and temporaries ({AUTO_MARGIN})",
    )


def _add_html(commands: _Subparsers) -> None:
    parser = _add_model_command(
        commands,
        "html",
        "Write a page to look at a plan in a browser.",
        "fxckpt html train.py:make_step --budget 0.6 --out plan.html",
    )
    _add_device(parser)
    _add_budget(parser)
    _add_offload_or_tiles(parser)
    parser.add_argument(
        "--points",
        type=_count,
        default=8,
        metavar="N",
        help="plans on the page's slider, 2 or more (8); 0 for this plan alone",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("fxckpt.html"),
        metavar="FILE",
        help="where to write it (fxckpt.html)",
    )


def _add_bench(commands: _Subparsers) -> None:
    parser = _add_model_command(
        commands,
        "bench",
        "Run the step, as it is and inside budgets.",
        "fxckpt bench train.py:make_step --budget 0.8 --budget 0.5",
    )
    _add_budgets(parser, "a budget to run at; repeat for more (0.5)")
    parser.add_argument(
        "--steps",
        type=_count,
        default=5,
        metavar="N",
        help="timed steps, after one that is not (5)",
    )
    parser.add_argument(
        "--inner",
        choices=("aot_eager", "inductor"),
        default="aot_eager",
        help="the compiler of the two halves (aot_eager)",
    )


def _add_verify(commands: _Subparsers) -> None:
    parser = _add_command(
        commands,
        "verify",
        "Compare a checkpointed step with the plain one: gradients, random numbers, memory.",
        "fxckpt verify train.py:make_step --reference train.py:make_plain_step",
    )
    parser.add_argument("target", metavar="MODULE:FACTORY", help=FORM)
    against = parser.add_mutually_exclusive_group()
    against.add_argument(
        "--reference",
        metavar="MODULE:FACTORY",
        help="the same model without checkpointing, whose inputs are not used; by default a copy "
        "of the model after its own gradient_checkpointing_disable()",
    )
    against.add_argument(
        "--budget",
        type=_budget,
        metavar="BYTES",
        help="compare fxckpt's own plan within this budget with the model as it is",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help="relative difference that is rounding, 0 for bitwise equality; by default by type",
    )
    parser.add_argument(
        "--steps", type=_count, default=4, metavar="N", help="steps for the memory, 3 or more (4)"
    )


def _add_calibrate(commands: _Subparsers) -> None:
    parser = _add_command(
        commands,
        "calibrate",
        "Measure this machine's device, and keep its rates for its plans.",
        "fxckpt calibrate",
    )
    parser.add_argument(
        "--device",
        type=_own_device,
        metavar="NAME",
        help="which device: cuda, cuda:1, cpu (cuda where there is one)",
    )


def _add_doctor(commands: _Subparsers) -> None:
    parser = _add_command(
        commands, "doctor", "Say what this machine has and what will work on it.", "fxckpt doctor"
    )
    parser.add_argument("--quick", action="store_true", help="leave out the self-test")
    parser.add_argument(
        "repro",
        nargs="?",
        type=Path,
        help="print this repro file, which a warning named, and plan its graph again",
    )


def _offload(text: str) -> Tier:
    """Return the host that values are sent to."""
    try:
        limit = text if text.strip().lower() == "host" else from_text(text)
        if isinstance(limit, int):
            return Host(limit)
        if isinstance(limit, str) and (tier := tier_of(limit)) is not None:
            return tier
    except (InvalidBudget, InvalidOption):
        pass
    raise argparse.ArgumentTypeError(
        f"{text!r} is no memory to send values to. Examples: 64GiB; host, for one that holds all "
        "that is sent"
    )


def _tile(text: str) -> int | str:
    """Return a number of tiles, or ``"auto"``."""
    tile: int | str = int(text) if text.strip().isdecimal() else text.strip().lower()
    try:
        check_tile(tile)
    except InvalidOption as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return tile


def _budget(text: str) -> Budget:
    try:
        return from_text(text)
    except InvalidBudget as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _memory(text: str) -> int | str:
    found = _budget(text)
    if not isinstance(found, (int, str)):
        raise argparse.ArgumentTypeError(f"{text!r} is no memory. Examples: 80GiB, auto")
    return found


def _slowdown(text: str) -> float:
    try:
        value = float(text)
        within(None, value)
    except (ValueError, InvalidBudget):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no share of the step's time. Example: 0.1 for at most 10 % more"
        ) from None
    return value


def _device(text: str) -> str:
    """Return the name of a device to plan for."""
    try:
        planned_device(text, is_on_meta=False)
    except InvalidOption as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _own_device(text: str) -> torch.device:
    """Return a device of this machine."""
    try:
        found = device_here(text)
    except InvalidOption as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no device of this machine, which alone can be measured. Examples: cuda, "
            "cuda:1, cpu"
        )
    return found


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed options of a command.

    Raises :class:`SystemExit` as argparse does, with code :data:`USAGE` for unusable arguments.
    """
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        named = vars(options).keys() - {"command", "target"}
        known = [f"--{name.replace('_', '-')}" for name in named]
        near = [m for word in unknown for m in get_close_matches(word, known, 1)]
        hint = f". Did you mean {near[0]}?" if near else "."
        parser.error(
            f"{options.command} has no {' '.join(unknown)}{hint} fxckpt {options.command} --help "
            "lists its options."
        )
    if options.command == "explain" and (conflict := _conflict(options)):
        parser.error(conflict)
    return options


WITHOUT_EFFECT = {
    "why": ("top", "sort", "decision", "module", "op", "format"),
    "by": ("sort",),
    "saved": ("sort",),
    "peak": ("sort",),
}
"""For each answer of ``explain``, the options that have no effect on it."""


def _conflict(options: argparse.Namespace) -> str:
    """Return an error that names the options of ``explain`` without effect; empty if none."""
    for answer, others in WITHOUT_EFFECT.items():
        given = [f"--{name}" for name in others if getattr(options, name) is not None]
        if getattr(options, answer) and given:
            have = "one has" if len(given) == 1 else "they have"
            return (
                f"{', '.join(given)} and --{answer}: {have} no effect on the other. Leave one out."
            )
    if options.depth is not None and options.by != "module":
        return "--depth cuts the paths of modules: give it with --by module."
    if options.json and options.format is not None:
        return f"--json and --format {options.format}: choose one."
    return ""
