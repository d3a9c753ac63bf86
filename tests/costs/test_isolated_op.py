"""Ops of a graph, run outside it on synthetic inputs."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxckpt.costs.isolated_op import IsolatedOp, devices, synthetic_input
from tests.costs.nodes import node_of


def test_private_layouts_get_no_synthetic_inputs() -> None:
    """Kernels with buffers in a private layout are not run on synthetic inputs."""
    graph = fx.Graph()
    assert IsolatedOp.of(graph.call_function(torch.ops.aten.mkldnn_rnn_layer.default)) is None
    assert IsolatedOp.of(graph.call_function(torch.ops.aten._cudnn_rnn.default)) is None


def isolated(function: object, *inputs: torch.Tensor) -> IsolatedOp:
    found = IsolatedOp.of(node_of(function, *inputs))
    assert found is not None
    return found


def test_a_call_has_the_shapes_and_layout() -> None:
    """The result of the synthetic call has the shape and strides of the graph's."""
    x = torch.ones(4, 6).t()
    with isolated(lambda x: x.exp(), x).call() as call:
        out = call()
    assert (out.shape, out.stride()) == (x.exp().shape, x.exp().stride())


def test_a_call_restores_the_generator() -> None:
    """A random op draws, and the generator is as before."""
    before = torch.get_rng_state()
    with isolated(lambda x: torch.rand_like(x), torch.ones(8)).call() as call:
        call()
        assert not torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), before)


def test_keys_tell_calls_apart() -> None:
    """Equal calls have one key; other shapes, strides, dtypes and arguments have others."""
    x = torch.ones(4, 4)
    keys = [
        isolated(lambda x: x.sum(0), x).key,
        isolated(lambda x: x.sum(1), x).key,
        isolated(lambda x: x.sum(0), x[:2]).key,
        isolated(lambda x: x.sum(0), x.double()).key,
        isolated(lambda x: x.t().sum(0), x).key,
    ]
    assert len(set(keys)) == 5
    assert isolated(lambda x: x.sum(0), torch.zeros(4, 4)).key == keys[0]


def test_functions_and_collectives_are_unsafe() -> None:
    """Only torch's own ops run on synthetic inputs, and none that waits for other ranks."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert IsolatedOp.of(graph.call_function(torch.sin, (x,))) is None
    reduce = torch.ops._c10d_functional.all_reduce.default
    assert IsolatedOp.of(graph.call_function(reduce, (x, "sum", "0"))) is None


@pytest.mark.parametrize(
    "given",
    [
        torch.ones(3, 4).t(),
        torch.ones(6)[2:],
        torch.ones(1, 4).expand(3, 4),
        torch.ones(0, 4),
        torch.ones(2, dtype=torch.complex64).conj(),
    ],
    ids=["transposed", "offset", "expanded", "empty", "conjugate"],
)
def test_synthetic_inputs_have_the_layout(given: torch.Tensor) -> None:
    """A synthetic input has the geometry of the tensor it stands for."""
    made = synthetic_input(given)
    assert made.shape == given.shape and made.dtype == given.dtype
    assert made.stride() == given.stride() and made.is_conj() == given.is_conj()
    assert made.storage_offset() == given.storage_offset()


def test_synthetic_values_are_legal() -> None:
    """Floats are probabilities, indices 0, masks true; plain values stay."""
    floats = synthetic_input(torch.full((100,), 7.0))
    assert floats.min() >= 0 and floats.max() < 1
    assert synthetic_input(torch.full((3,), 7)).tolist() == [0, 0, 0]
    assert synthetic_input(torch.tensor([False])).all()
    assert synthetic_input("mean") == "mean"


def test_devices_of_a_node() -> None:
    """The devices of inputs and results are found."""
    assert devices(node_of(lambda x: x.sin(), torch.ones(2))) == {"cpu"}
    assert devices(node_of(lambda x: x.sin(), torch.ones(2, device="meta"))) == {"meta"}


@pytest.mark.parametrize("kernel", ["efficient", "flash", "cudnn"])
def test_backward_of_attention_reads_no_seed(kernel: str) -> None:
    """Without dropout no kernel reads the seed, which may be on the host or on the GPU."""
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    graph = fx.Graph()
    operand = graph.placeholder("x")
    operand.meta["val"] = torch.ones(2, 2, 4, 8)
    given = {"dropout_p": 0.1, "is_causal": False, "max_q": 4, "max_k": 4}
    found = IsolatedOp.of(graph.call_function(op, tuple(given.get(n, operand) for n in names)))
    assert found is not None
    assert found.leaves[names.index("dropout_p")] == 0.0
