"""FLOPs, bytes and random numbers of single ops."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fxckpt.costs import op_counts
from fxckpt.costs.op_counts import formula_call, node_bytes, node_draws, node_flops
from tests.costs.nodes import node_of


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda a, b: a @ b, [(3, 5), (5, 7)]),
        (lambda a, b, c: torch.baddbmm(a, b, c), [(2, 3, 7), (2, 3, 5), (2, 5, 7)]),
        (lambda a, b: F.conv2d(a, b), [(2, 3, 8, 8), (4, 3, 3, 3)]),
        (lambda a: a.sin(), [(3, 5)]),
    ],
    ids=["mm", "baddbmm", "convolution", "pointwise"],
)
def test_flops_are_those_of_torch(function: object, shapes: list[tuple[int, ...]]) -> None:
    """torch's own counter, which runs the op, counts the same."""
    inputs = [torch.ones(shape) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        function(*inputs)  # type: ignore[operator]
    assert node_flops(node_of(function, *inputs)) == counter.get_total_flops()


def test_cpu_attention_counts_both_products() -> None:
    """CPU flash attention, which torch's counter lacks, counts its two products."""
    inputs = [torch.ones(2, 4, 8, 16) for _ in range(3)]
    graph = node_of(F.scaled_dot_product_attention, *inputs).graph
    flash = [n for n in graph.nodes if "flash_attention_for_cpu" in str(n.target)]
    assert [node_flops(n) for n in flash] == [2 * 2 * (2 * 4 * 8 * 8 * 16)]


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_grouped_heads_count_as_repeated(kernel: str) -> None:
    """An attention kernel of a GPU reads each key head for several query heads."""
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    query, key = torch.ones(2, 8, 6, 16, device="meta"), torch.ones(2, 2, 6, 16, device="meta")
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in "qkv"]
    for operand, value in zip(operands, (query, key, key), strict=True):
        operand.meta["val"] = value
    forward = graph.call_function(op.default, tuple(operands))
    assert node_flops(forward) == 2 * 2 * (2 * 8 * 6 * 6 * 16)
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward")
    gradient = graph.call_function(backward.default, (operands[0], *operands))
    assert node_flops(gradient) == 5 * 2 * (2 * 8 * 6 * 6 * 16)


def test_formula_that_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A formula of torch that fails for an op does not end the compile."""

    def refuses(*_: object, **__: object) -> int:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(op_counts.flop_registry, torch.ops.aten.mm, refuses)
    node = node_of(torch.mm, torch.ones(4, 8), torch.ones(8, 4))
    with pytest.warns(UserWarning, match=r"aten.mm.default refuses.*shapes are incompatible"):
        assert node_flops(node) == 0


def test_broadcast_storages_count_once() -> None:
    """An expanded operand counts the bytes it holds, and one read twice counts once."""
    x, row = torch.ones(8, 4), torch.ones(1, 4)
    assert node_bytes(node_of(lambda x, r: x + r.expand(8, 4), x, row)) == 4 * (32 + 4 + 32)
    assert node_bytes(node_of(lambda x: x * x, x)) == 4 * (32 + 32)


def test_a_gather_counts_what_is_gathered() -> None:
    """Of a table as many elements count as are looked up, and none of a loss's whole input."""
    table, rows = torch.ones(100, 4), torch.zeros(3, dtype=torch.int64)
    assert node_bytes(node_of(lambda r, t: F.embedding(r, t), rows, table)) == 4 * (12 + 12) + 8 * 3
    scores = torch.ones(8, 50)
    graph = node_of(lambda s, t: F.nll_loss(s, t), scores, torch.zeros(8, dtype=torch.int64)).graph
    (loss,) = (n for n in graph.nodes if "nll_loss_forward" in str(n.target))
    assert node_bytes(loss) == 4 * 8 + 8 * 8 + 4 + 4


def test_a_slice_counts_what_is_read() -> None:
    """A view of a part counts the part, not its storage."""
    assert node_bytes(node_of(lambda x: x[:2].sin(), torch.ones(8, 4))) == 4 * (8 + 8)


def test_random_numbers_of_an_op() -> None:
    """An op that draws has one number per element; dropout without probability draws none."""
    x = torch.ones(8, 4)
    assert node_draws(node_of(lambda x: torch.rand_like(x), x)) == 32
    assert node_draws(node_of(lambda x: x + 1, x)) == 0


def test_symbolic_sizes_count_by_their_hints() -> None:
    """A product of symbolic sizes has the FLOPs and bytes of the sizes at hand."""
    node = node_of(lambda a, b: a @ b, torch.ones(3, 5), torch.ones(5, 7), mode="symbolic")
    assert (node_flops(node), node_bytes(node)) == (2 * 3 * 5 * 7, 4 * (15 + 35 + 21))
    assert formula_call(node) is None, "its sizes are not fixed"


def test_equal_calls_have_equal_keys() -> None:
    """The key of a formula's call tells shapes apart, and is none where there is no formula."""

    def key(n: int) -> object:
        return formula_call(node_of(lambda a: a @ a, torch.ones(n, n)))

    assert key(3) == key(3) != key(4)
    assert formula_call(node_of(lambda a: a.sin(), torch.ones(2))) is None
