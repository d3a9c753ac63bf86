"""In-place forms: the same bits as the op, and no memory beside."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fxckpt
from fxckpt.ops.in_place import ROW_WISE, WRITING, InPlaceForm, in_place_form
from fxckpt.ops.kernels import OWN

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import OpInfo

aten = torch.ops.aten
EVERY = 24
"""The fast tests take every 24th op of the database."""
SAMPLES = 6
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit."""
    one, other = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (one, other))
    return one.shape == other.shape and bool(
        torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )


def in_place(form: InPlaceForm, position: int, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    """Run the form on copies of the arguments, and return what it wrote."""
    given = list(args)
    written = given[position] = args[position].detach().clone()
    given = [written if a is args[position] else a for a in given]
    extra = {} if form.out is None else {form.out: written}
    found = form.target(*given, **kwargs, **extra)
    assert found.data_ptr() == written.data_ptr()
    return written


class Compare(TorchDispatchMode):
    """Runs every op in place too, wherever an operand has the geometry of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.compared: dict[str, int] = {}
        self.differing: list[str] = []
        self.aliasing: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        form = in_place_form(func)
        if all(r.alias_info is None for r in func._schema.returns) and "unsafe" not in str(func):
            read, made = (
                [t.untyped_storage()._cdata for t in pytree.tree_leaves(v) if isinstance(t, Tensor)]
                for v in ((args, kwargs), result)
            )
            if len(set(made)) < len(made) or not set(made).isdisjoint(read):
                self.aliasing.append(str(func))
        for position in () if form is None else form.operands:
            operand = args[position] if position < len(args) else None
            if not isinstance(operand, Tensor) or not _fits(operand, result):
                continue
            if any(
                isinstance(t, Tensor) and t is not operand and _shares(t, operand)
                for t in pytree.tree_leaves((args, kwargs))
            ):
                continue
            self.compared[str(func)] = self.compared.get(str(func), 0) + 1
            if not same_bits(in_place(form, position, args, kwargs), result):
                self.differing.append(f"{func} into argument {position}")
        return result


def _fits(operand: Tensor, result: Tensor) -> bool:
    return (
        operand.layout is torch.strided
        and operand.dtype == result.dtype
        and operand.shape == result.shape
        and operand.stride() == result.stride()
        and operand.numel() * operand.element_size() == operand.untyped_storage().nbytes()
        and not (operand.is_conj() or operand.is_neg())
    )


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def compare(op: OpInfo) -> Compare:
    """Return the comparison of the ops that an op of the database, and its gradient, call."""
    mode = Compare()
    for dtype in DTYPES:
        if not op.supports_dtype(dtype, "cpu"):
            continue
        trains = op.supports_autograd and dtype.is_floating_point
        try:
            samples = list(op.sample_inputs("cpu", dtype, requires_grad=trains))[:SAMPLES]
        except Exception:  # torch has no samples of this type
            continue
        for sample in samples:
            torch.manual_seed(0)
            with mode:
                try:
                    outputs = [
                        t
                        for t in pytree.tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
                        if isinstance(t, Tensor) and t.requires_grad
                    ]
                    if outputs and trains:
                        sum(t.abs().sum() for t in outputs).backward()
                except (AssertionError, RuntimeError, NotImplementedError, ValueError):
                    continue  # torch refuses the sample
    return mode


def check(op: OpInfo) -> None:
    found = compare(op)
    assert not found.differing
    assert not found.aliasing


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("op", op_db[::EVERY], ids=lambda op: op.formatted_name)
def test_sampled_ops(op: OpInfo) -> None:
    """What a sample of torch's ops calls gives the same bits in place."""
    check(op)


@pytest.mark.sweep
@pytest.mark.parametrize("op", op_db, ids=lambda op: op.formatted_name)
def test_every_op(op: OpInfo) -> None:
    """What any of torch's ops calls gives the same bits in place."""
    check(op)


def elementwise() -> list[Any]:
    """Return the ops with a form whose arguments are tensors of one shape, and numbers."""
    names = {s.name.removeprefix("aten::") for s in torch._C._jit_get_all_schemas()}
    overloads = (
        getattr(getattr(aten, name), overload)
        for name in sorted(names)
        if hasattr(aten, name) and name not in WRITING
        for overload in getattr(aten, name).overloads()
    )
    return [op for op in overloads if in_place_form(op) is not None]


def arguments(op: Any, make: Callable[[], Tensor]) -> tuple[Any, ...]:
    """Return arguments for an op, each tensor of them made anew."""
    given: list[Any] = []
    for declared in op._schema.arguments:
        kind = str(declared.type)
        if kind == "Tensor":
            given.append(make())
        elif declared.has_default_value() or declared.kwarg_only:
            break
        else:
            given.append(
                make().dtype
                if declared.name == "input_dtype"
                else {"bool": False, "int": 1, "number": 2, "float": 0.5, "str": "floor"}.get(kind)
            )
    return tuple(given)


def keywords(op: Any) -> dict[str, Any]:
    """Return the keyword arguments that an op has no default for."""
    return {
        a.name: "floor" for a in op._schema.arguments if a.kwarg_only and not a.has_default_value()
    }


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda t: t,
    "columns": lambda t: t.t().contiguous().t(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 5), (67, 1031)], ids=["short", "long"])
def test_every_form_gives_the_same_bits(shape: tuple[int, int], layout: str) -> None:
    """Every elementwise and row-wise form gives the same bits into each operand, NaN included."""
    compared, differing = set(), []
    for op in elementwise():
        for dtype in DTYPES:
            # Of a number that is none, torch's polynomials return uninitialized memory.
            has_nan = dtype.is_floating_point and "polynomial" not in op._opname

            def make(dtype: torch.dtype = dtype, has_nan: bool = has_nan) -> Tensor:
                made = torch.randn(shape, dtype=torch.float64) * 2
                if has_nan:
                    made[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
                return LAYOUTS[layout](made.to(dtype))

            args, kwargs = arguments(op, make), keywords(op)
            try:
                expected = op(*args, **kwargs)
            except (RuntimeError, NotImplementedError, TypeError):
                continue  # the op has no kernel for this type
            form = in_place_form(op)
            assert form is not None
            for position in form.operands:
                if position < len(args) and _fits(args[position], expected):
                    compared.add(op)
                    if not same_bits(in_place(form, position, args, kwargs), expected):
                        differing.append(f"{op} into {position}, {dtype}")
    assert not differing
    assert len(compared) > 150


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", sorted(ROW_WISE - {op._opname for op in OWN}))
def test_rows_give_the_same_bits(name: str, dim: int) -> None:
    """A softmax or its gradient in place has the same bits along either dimension."""
    op = getattr(aten, name).default
    form = in_place_form(op)
    assert form is not None
    for shape in ((1, 1), (7, 33), (5, 1024), (3, 50257), (2049, 6)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            last = (dtype,) if name.endswith("data") else (False,)
            tensors = tuple(torch.randn(shape).to(dtype) for _ in form.operands)
            args = (*tensors, dim, *last)
            for position in form.operands:
                assert same_bits(in_place(form, position, args, {}), op(*args))


@pytest.mark.parametrize(
    "op",
    [
        aten.add.Tensor,
        aten.where.self,
        aten.gelu_backward.default,
        aten.masked_fill.Scalar,
        aten._softmax.default,
        aten._log_softmax_backward_data.default,
    ],
    ids=str,
)
def test_forms_take_no_memory(op: Any) -> None:
    """A form allocates less than a row, where the op allocates its result."""
    form, (rows, columns) = in_place_form(op), (64, 4096)
    assert form is not None
    make = partial(torch.randn, rows, columns)
    args = {
        aten.where.self: lambda: (make() > 0, make(), make()),
        aten.masked_fill.Scalar: lambda: (make(), make() > 0, 0.0),
        aten._softmax.default: lambda: (make(), 1, False),
        aten._log_softmax_backward_data.default: lambda: (make(), make(), 1, torch.float32),
    }.get(op, lambda: (make(), make()))()
    written = args[form.operands[-1]]
    if written.dtype is torch.bool:
        written = args[1]
    extra = {} if form.out is None else {form.out: written}
    peak = fxckpt.measure_peak(lambda: form.target(*args, **extra))
    assert peak < columns * 4


def test_generated_variants_are_no_forms() -> None:
    """A variant that computes apart and copies is not taken for a form."""
    assert torch.Tag.generated in aten.native_dropout_backward.out.tags
    assert in_place_form(aten.native_dropout_backward.default) is None
    assert in_place_form(aten.clone.default) is None
    assert in_place_form(aten.bernoulli.default) is None
