"""``fxckpt.X`` in place of ``torch.utils.checkpoint.X``.

Names, options, selective policies, segments, compiled callers, transformers and DDP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torchs
import transformers as hf
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxckpt
from fxckpt import CheckpointPolicy as Policy
from fxckpt import create_selective_checkpoint_contexts as selective
from tests.eager.regions import ops_of_the_backward, plain, step
from tests.steps import differing, outcome

aten = torch.ops.aten


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Policy:
    return Policy.MUST_SAVE if op is aten.mm.default else Policy.PREFER_RECOMPUTE


def two_products(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout((x @ w).sin() @ w, 0.3).exp()


@pytest.mark.parametrize("name", torchs.__all__)
def test_every_name_of_torchs_module_is_here(name: str) -> None:
    from fxckpt import checkpoint as _  # noqa: F401  the function, not the module

    assert callable(getattr(fxckpt, name)) or name == "SAC_IGNORED_OPS"
    ours = __import__("sys").modules["fxckpt.checkpoint"]
    assert getattr(ours, name) is getattr(fxckpt, name)


def test_every_option_of_torchs_checkpoint_is_taken() -> None:
    x = torch.randn(4, requires_grad=True)
    options = {
        "use_reentrant": True,
        "preserve_rng_state": True,
        "determinism_check": "none",
        "debug": True,
        "early_stop": False,
        "respect_saved_tensors_hooks": True,
    }
    assert torch.equal(
        fxckpt.checkpoint(torch.sin, x, context_fn=torchs.noop_context_fn, **options), x.sin()
    )


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda x: fxckpt.checkpoint(3, x), "int is neither"),
        (
            lambda x: fxckpt.checkpoint(torch.sin, x, determinism_check="strict"),
            "'default', 'none'",
        ),
        (lambda x: fxckpt.checkpoint(torch.sin, x, engine="tape"), "'replay', 'rerun'"),
        (lambda x: fxckpt.checkpoint(lambda x: x.sin(), x, budegt=0.5), "did you mean budget"),
        (lambda x: fxckpt.checkpoint(None, x), "give a function"),
        (lambda x: fxckpt.checkpoint(budegt=0.5), "does not know budegt"),
        (lambda x: fxckpt.checkpoint(budget=0.5)(3), "int is neither"),
        (lambda x: fxckpt.checkpoint(torch.sin, x, budget=-1), "budget"),
        (lambda x: fxckpt.checkpoint(torch.sin, x, budget=0.5, engine="rerun"), "engine='replay'"),
        (lambda x: fxckpt.checkpoint(torch.sin, x, policy=3), "not a policy"),
        (
            lambda x: fxckpt.checkpoint(torch.sin, x, policy=lambda *a, **k: "save"),
            "returned 'save'",
        ),
        (
            lambda x: fxckpt.checkpoint(
                torch.sin, x, context_fn=lambda: selective(lambda *a, **k: 7)
            ),
            "returned 7",
        ),
        (
            lambda x: fxckpt.checkpoint(
                torch.sin, x, context_fn=lambda: selective([aten.mm.default]), budget=0.5
            ),
            "both say",
        ),
        (lambda x: fxckpt.checkpoint_sequential([torch.sin], 2, x), "from 1 to 1"),
        (lambda x: fxckpt.checkpoint_sequential([torch.sin], True, x), "from 1 to 1"),
        (lambda x: fxckpt.checkpoint_sequential([], 1, x), "not empty"),
        (lambda x: fxckpt.checkpoint_sequential([torch.sin], 1, x, budegt=1), "budegt"),
        (
            lambda x: fxckpt.checkpoint_sequential([torch.sin] * 4, 2, x, budget=0.5),
            "segments='auto'",
        ),
    ],
)
def test_senseless_calls_are_refused_with_an_explanation(
    call: Callable[[Tensor], Any], told: str
) -> None:
    """A call that makes no sense raises a ValueError that explains the mistake."""
    with pytest.raises(ValueError, match=told):
        call(torch.randn(4, requires_grad=True))


def test_an_error_of_the_function_is_its_own() -> None:
    def region(x: Tensor) -> Tensor:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        fxckpt.checkpoint(region, torch.randn(4))


def test_an_unbound_variable_raises_its_own_error() -> None:
    """An UnboundLocalError in the function reaches the caller as it is."""

    def region(x: Tensor) -> Tensor:
        if x.numel() < 0:
            late = x
        return late

    with pytest.raises(UnboundLocalError):
        fxckpt.checkpoint(region, torch.randn(4))


def test_a_functions_own_keywords_reach_it() -> None:
    assert fxckpt.checkpoint(lambda x, *, cost: cost, torch.zeros(1), cost=3.0) == 3.0


def test_without_a_function_it_is_a_decorator() -> None:
    """``checkpoint(**options)`` decorates a function, every call of which is a region."""

    @fxckpt.checkpoint(use_reentrant=False, policy=[aten.mm.default])
    def region(x: Tensor, w: Tensor, *, scale: float = 1.0) -> Tensor:
        """Multiply twice."""
        return two_products(x, w) * scale

    assert region.__name__ == "region" and region.__doc__ == "Multiply twice."
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with fxckpt.record_regions() as regions:
        torch.manual_seed(0)
        region(x, w, scale=2.0).sum().backward()
    assert len(regions) == 1 and x.grad is not None
    found, x.grad = x.grad, None
    torch.manual_seed(0)
    (two_products(x, w) * 2.0).sum().backward()
    assert torch.equal(found, x.grad)


def test_a_decorated_function_compiles_as_a_region() -> None:
    """Dynamo captures a decorated function's call as one graph with the region's tags."""
    region = fxckpt.checkpoint(use_reentrant=False)(lambda x, w: (x @ w).sin() @ w)
    backend = fxckpt.Backend(inner="aot_eager")
    torch._dynamo.reset()
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    torch.compile(region, backend=backend, fullgraph=True)(x, w).sum().backward()
    assert "mm" in backend.plans[0].recomputed


@pytest.mark.parametrize("respects, count", [(None, 1), (True, 1), (False, 0)])
def test_hooks_around_see_chosen_results_if_asked(respects: bool | None, count: int) -> None:
    """The hooks around a region get its chosen result, unless told not to."""
    x = torch.randn(4, 4, requires_grad=True)
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = fxckpt.checkpoint(
            lambda x: x.exp().sin(),
            x,
            context_fn=functools.partial(selective, [aten.exp.default]),
            respect_saved_tensors_hooks=respects,
        )
    assert len(seen) == count
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, x.exp().cos() * x.exp())


class SavesInput(torch.autograd.Function):
    """Function that shows the input that its backward gets."""

    seen: tuple[Tensor, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(x, mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        SavesInput.seen = ctx.saved_tensors
        return gradient * ctx.saved_tensors[1], None


@pytest.mark.parametrize("depth", [1, 2])
def test_saved_input_comes_back_as_the_same_object(depth: int) -> None:
    """An input without a gradient that an autograd.Function saves is that object again."""
    x, mask = torch.randn(4, requires_grad=True), torch.ones(4)
    function: Callable[..., Tensor] = SavesInput.apply
    for _ in range(depth):
        function = functools.partial(fxckpt.checkpoint, function)
    function(x, mask).sum().backward()
    assert SavesInput.seen[1] is mask


def test_saved_input_with_new_data_keeps_the_old() -> None:
    """An input that was given other data since comes back with the data it had."""
    x, mask = torch.randn(4, requires_grad=True), torch.ones(4)
    out = fxckpt.checkpoint(SavesInput.apply, x, mask)
    mask.data = torch.zeros(4)
    out.sum().backward()
    assert torch.equal(SavesInput.seen[1], torch.ones(4))


# --- selective policies of torch's form ---


def with_policy(policy: Any, **options: Any) -> Callable[..., Any]:
    return functools.partial(
        fxckpt.checkpoint, context_fn=functools.partial(selective, policy, **options)
    )


SELECTIVE = {
    "function": save_products,
    "ops": [aten.mm.default],
    "bool": lambda ctx, op, *args, **kwargs: op is aten.mm.default,
    "offloaded": lambda ctx, op, *args, **kwargs: (
        Policy.MUST_CPU_OFFLOAD if op is aten.mm.default else Policy.MUST_RECOMPUTE
    ),
    "composed": fxckpt.policies.save_ops(aten.mm) | fxckpt.policies.recompute_all,
}


@pytest.mark.parametrize("policy", SELECTIVE.values(), ids=SELECTIVE)
def test_ops_saved_by_a_policy_run_once(policy: Any) -> None:
    """An op whose result a selective policy saves or offloads is not recomputed."""
    checkpoint = with_policy(policy)
    assert (
        differing(step(two_products, plain, twice=True), step(two_products, checkpoint, twice=True))
        == []
    )
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    ran = ops_of_the_backward(checkpoint(two_products, x, w))
    # Each product has a gradient product of its own; neither is recomputed.
    assert (ran["mm"], ran["sin"], ran["exp"]) == (2, 0, 1)


def test_a_selective_region_takes_a_second_backward() -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    out = with_policy(save_products)(two_products, x, w).sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_region_may_write_a_kept_value() -> None:
    """A region may write in place to a kept value, and the write is not repeated."""
    region = lambda x, w: F.relu(x @ w, inplace=True).mul(x)  # noqa: E731
    checkpoint = with_policy(save_products)
    assert differing(step(region, plain), step(region, checkpoint)) == []
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    assert ops_of_the_backward(checkpoint(region, x, w))["relu_"] == 0


@pytest.mark.parametrize("allowed", [False, True])
def test_a_kept_value_written_after_the_region(allowed: bool) -> None:
    leaked: list[Tensor] = []

    def region(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        leaked.append(product.detach())
        return product.sin()

    x, w = torch.randn(4, 4, requires_grad=True), torch.eye(4)
    out = with_policy(save_products, allow_cache_entry_mutation=allowed)(region, x, w)
    leaked[0].add_(1)
    if not allowed:
        with pytest.raises(fxckpt.CheckpointError, match="written in place"):
            out.sum().backward()
        return
    out.sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, (x.detach() + 1).cos())


def test_policies_over_whole_graphs_are_pointed_elsewhere() -> None:
    """A policy that needs the whole graph is refused with a pointer to `policy=`."""
    with pytest.raises(fxckpt.InvalidOption, match=r"checkpoint\(..., policy=...\)"):
        selective(fxckpt.policies.sqrt_n)


def test_other_contexts_surround_the_region_and_its_replay() -> None:
    entered: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *_: Any) -> None: ...

    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    fxckpt.checkpoint(
        two_products, x, w, context_fn=lambda: (Named("region"), Named("replay"))
    ).sum().backward()
    assert entered == ["region", "replay"]


def test_a_context_may_not_swallow_an_exception() -> None:
    """A context that suppresses an exception of the region raises a CheckpointError."""
    import contextlib

    def region(x: Tensor) -> Tensor:
        raise KeyError

    with pytest.raises(fxckpt.CheckpointError, match="suppressed"):
        fxckpt.checkpoint(
            region,
            torch.zeros(1),
            context_fn=lambda: (contextlib.suppress(KeyError), contextlib.nullcontext()),
        )


# --- segments ---


@pytest.mark.parametrize("segments, regions", [(1, 0), (3, 2), (9, 8), ("auto", 2)])
def test_all_segments_but_the_last_are_regions(segments: int | str, regions: int) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(9)))
    x = torch.randn(2, 4, requires_grad=True)
    expected = torch.autograd.grad(layers(x).sum(), x)[0]
    with fxckpt.record_regions() as found:
        out = fxckpt.checkpoint_sequential(layers, segments, x)
    assert len(found) == regions
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


def test_a_budget_plans_the_whole_sequence() -> None:
    layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)]
    x = torch.randn(64, 16, requires_grad=True)
    with fxckpt.record_regions() as found:
        fxckpt.checkpoint_sequential(layers, "auto", x, budget=0.5).sum().backward()
    (region,) = found
    assert region.plan is not None and region.plan.peak_bytes <= region.plan.budget_bytes  # type: ignore


# --- inside torch.compile ---


def tags_of(function: Callable[[Tensor], Tensor]) -> dict[str, str]:
    """Compile a function without graph breaks; return the partitioner's checkpoint tags."""
    from functorch.compile import default_partition, make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found: dict[str, str] = {}

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        found.update(
            (n.name, n.meta["recompute"].name)
            for n in joint.graph.nodes
            if n.meta.get("recompute") is not None
        )
        return default_partition(joint, inputs, **options)

    backend = aot_autograd(
        fw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=partition
    )
    torch.compile(function, backend=backend, fullgraph=True)(
        torch.randn(4, 4, requires_grad=True)
    ).sum().backward()
    return found


W = torch.randn(4, 4)


def region_of_one(x: Tensor) -> Tensor:
    return (x @ W).sin()


def test_a_region_is_tagged_in_a_compiled_caller() -> None:
    assert tags_of(lambda x: fxckpt.checkpoint(region_of_one, x))["mm"] == "PREFER_RECOMPUTE"


def closing_over(x: Tensor) -> Tensor:
    saved = [aten.mm.default]
    return fxckpt.checkpoint(region_of_one, x, policy=lambda ctx, op, *a, **k: op in saved)  # type: ignore[no-any-return]


POLICIES_IN_COMPILED_CODE: dict[str, Callable[[Tensor], Tensor]] = {
    "partial": lambda x: fxckpt.checkpoint(
        region_of_one, x, context_fn=functools.partial(selective, save_products)
    ),
    "lambda": lambda x: fxckpt.checkpoint(
        region_of_one, x, context_fn=lambda: selective(save_products)
    ),
    "closure": closing_over,
    "policy": lambda x: fxckpt.checkpoint(region_of_one, x, policy=fxckpt.policies.save_matmuls),
    "ops": lambda x: fxckpt.checkpoint(region_of_one, x, policy=[aten.mm.default]),
}


@pytest.mark.filterwarnings("ignore:.*context_fn is passed:UserWarning")
@pytest.mark.parametrize(
    "function", POLICIES_IN_COMPILED_CODE.values(), ids=POLICIES_IN_COMPILED_CODE
)
def test_a_policy_arrives_in_a_compiled_caller(function: Callable[[Tensor], Tensor]) -> None:
    tags = tags_of(function)
    assert (tags["mm"], tags["sin"]) == ("MUST_SAVE", "PREFER_RECOMPUTE")


def test_compiled_code_in_a_region_runs_compiled() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    inner = torch.compile(lambda x, w: (x @ w).sin(), backend=backend)
    region = lambda x, w: inner(x.cos(), w).exp()  # noqa: E731
    expected = step(region, plain)
    assert differing(expected, step(region, fxckpt.checkpoint)) == []
    assert len(graphs) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_region_of_a_compiled_block(backend: str) -> None:
    inner = torch.compile(lambda x, w: (x @ w).sin().exp(), backend=backend)
    region = lambda x, w: inner(x.cos(), w).exp()  # noqa: E731
    expected, got = step(region, plain), step(region, fxckpt.checkpoint)
    assert differing(expected, got) == []


# --- transformers and DDP ---


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    config = hf.GPT2Config(
        n_layer=3,
        n_embd=32,
        n_head=4,
        vocab_size=61,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(0, 61, (2, 16))
    return hf.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    config = hf.T5Config(
        d_model=32,
        d_ff=64,
        d_kv=8,
        num_layers=2,
        num_heads=4,
        vocab_size=61,
        decoder_start_token_id=0,
        dropout_rate=0.1,
    )
    tokens = torch.randint(1, 61, (2, 16))
    return hf.T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}


def trained(
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], prepare: Callable[[nn.Module], Any]
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, inputs = make()
    model.train()
    prepare(model)
    return outcome(model, lambda *_: model(**inputs, use_cache=False).loss, ())


@pytest.mark.filterwarnings(
    "ignore:.*use_cache:UserWarning", "error:.*gradient_checkpointing_enable:FutureWarning"
)
@pytest.mark.parametrize("make", [gpt2, t5])
@pytest.mark.parametrize(
    "options", [{}, {"policy": fxckpt.policies.save_matmuls}], ids=["plain", "policy"]
)
def test_transformers_train_the_same(
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], options: dict[str, Any]
) -> None:
    with fxckpt.record_regions() as found:
        got = trained(make, lambda model: fxckpt.patch_transformers(model, **options))
    assert len(found) >= 3 and any(row.what == "recomputed" for row in found[0].rows)
    assert differing(trained(make, lambda model: None), got) == []


def test_transformers_own_hook_takes_checkpoint() -> None:
    def prepare(model: Any) -> None:
        model._set_gradient_checkpointing(
            enable=True, gradient_checkpointing_func=fxckpt.checkpoint
        )

    assert differing(trained(gpt2, lambda model: None), trained(gpt2, prepare)) == []


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_a_region_in_a_module_that_ddp_wraps(one_rank: None) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU()) for _ in range(3)
            )
            self.checkpoint: Callable[..., Any] = plain

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = self.checkpoint(block, x)
            return x

    def run(checkpoint: Callable[..., Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net, x = Net(), torch.randn(8, 4)
        net.checkpoint = checkpoint
        return outcome(net, nn.parallel.DistributedDataParallel(net, static_graph=False), (x,))

    assert differing(run(plain), run(fxckpt.checkpoint)) == []
