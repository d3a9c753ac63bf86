"""Policies: values each saves of two blocks, at every entry point; composition; errors."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import fxckpt
from fxckpt.planner.capture import Joint, capture_joint
from fxckpt.planner.planner import planner_of
from fxckpt.policies import (
    Policy,
    Value,
    as_policy,
    block_boundaries,
    decide_all,
    every,
    first_match,
    recompute,
    recompute_all,
    recompute_pointwise,
    save,
    save_all,
    save_any_except,
    save_attention,
    save_matmuls,
    save_only,
    save_ops,
    sqrt_n,
)
from tests.joints import normalize
from tests.steps import FLOOR, same_at_every_budget

WIDTH = 16
MUST_SAVE, PREFER_SAVE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE
MUST_RECOMPUTE, PREFER_RECOMPUTE = (
    CheckpointPolicy.MUST_RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE,
)
aten = torch.ops.aten


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x).view(2, 8, 2, WIDTH // 2).transpose(1, 2)
        out = fxckpt.name(F.scaled_dot_product_attention(y, y, y), "attn_out")
        return out.transpose(1, 2).reshape(2, 8, WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.down(self.up(x).tanh().sin())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)).sum()


def net() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Net(), (torch.randn(2, 8, WIDTH),)


def torch_style(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return MUST_SAVE if op is aten.tanh.default else PREFER_RECOMPUTE


# One block: addmm (qkv), attention (getitem: its result, getitem_1: its logsumexp), add,
# addmm_1 (up), tanh, sin, addmm_2 (down), add_1.
# The backward reads neither products that are only added to, nor the arguments of tanh.
READ = (
    "addmm getitem getitem_1 add tanh sin add_1 "
    "addmm_3 getitem_2 getitem_3 add_2 tanh_1 sin_1 add_3"
)
PRODUCTS = "addmm addmm_1 addmm_2 addmm_3 addmm_4 addmm_5"
ATTENTION = "getitem getitem_1 getitem_2 getitem_3"
EXPECTED: dict[str, tuple[Any, str]] = {
    "none": (None, READ),
    "save_all": (save_all, READ),
    "recompute_all": (recompute_all, ""),
    "save_matmuls": (save_matmuls, PRODUCTS),
    "save_attention": (save_attention, ATTENTION),
    "recompute_pointwise": (recompute_pointwise, f"{PRODUCTS} {ATTENTION}"),
    "sqrt_n": (sqrt_n, "add add_1 add_2 addmm_5"),
    "every": (every(3), "add sin addmm_3 addmm_4 addmm_5"),
    "every second product": (every(2, of=save_matmuls), "addmm_1 addmm_3 addmm_5"),
    "block_boundaries": (block_boundaries("layers.*"), "add_1 add_3"),
    "ops": (save_ops(aten.addmm), PRODUCTS),
    "one overload": (save_ops(aten.add.Tensor), "add add_1 add_2 add_3"),
    "save": (first_match(save("layers.*.attn"), recompute_all), f"addmm addmm_3 {ATTENTION}"),
    "recompute": (recompute("layers.1.**"), "addmm getitem getitem_1 add tanh sin add_1"),
    "save_only": (save_only("attn_out"), ATTENTION),
    "save_any_except": (
        save_any_except("attn_*"),
        "addmm add tanh sin add_1 addmm_3 add_2 tanh_1 sin_1 add_3",
    ),
    "either": (save_matmuls | save_attention, f"{PRODUCTS} {ATTENTION}"),
    "both": (
        save("layers.0") & save_matmuls,
        "addmm addmm_1 addmm_2 addmm_3 getitem_2 getitem_3 add_2 tanh_1 sin_1 add_3",
    ),
    "opposite": (~recompute_pointwise, "add tanh sin add_1 add_2 tanh_1 sin_1 add_3"),
    "function": (torch_style, "tanh tanh_1"),
    "list of ops": ([aten.tanh.default, aten.mm.default], "tanh tanh_1"),
    "context_fn": (
        functools.partial(create_selective_checkpoint_contexts, [aten.tanh.default]),
        "tanh tanh_1",
    ),
    "list of policies": ([save_attention, save("**.down")], f"addmm_2 addmm_5 {ATTENTION}"),
}


@pytest.fixture(scope="module")
def joint() -> Joint:
    model, inputs = net()
    found = capture_joint(model, inputs, {})
    normalize(found.module)
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_policy_saves_expected_values(name: str, joint: Joint) -> None:
    """Each policy saves exactly the values that its name promises."""
    policy, expected = EXPECTED[name]
    _, plan = planner_of(None, policy, "roofline").plan(joint)
    assert set(plan.saved) == set(expected.split())


@pytest.mark.parametrize("name", ["save_matmuls", "every", "save", "recompute", "function"])
def test_policy_agrees_across_entry_points(name: str) -> None:
    """A policy saves the same values by rewriting and in an eager region."""
    policy, expected = EXPECTED[name]
    model, inputs = net()
    assert set(
        fxckpt.rewrite(fx.symbolic_trace(model), policy, example_inputs=inputs).plan.saved
    ) == set(expected.split())
    assert set(plan_of_eager_region(policy).saved) == set(expected.split())


def plan_of_eager_region(policy: Any) -> fxckpt.Plan:
    model, inputs = net()
    with fxckpt.record_regions() as found:
        fxckpt.checkpoint(model, *inputs, policy=policy)
    (region,) = found
    assert region.plan is not None
    return region.plan


@pytest.mark.parametrize("name", ["sqrt_n", "block_boundaries", "save_only"])
def test_entry_points_explain_alike(name: str) -> None:
    """A policy changes no number, and plans of all entry points explain alike."""
    policy, _ = EXPECTED[name]
    (compiled,) = same_at_every_budget(net, (None,), policy=policy)
    model, inputs = net()
    assert str(fxckpt.rewrite(model, policy, example_inputs=inputs).plan.explain()) == str(
        compiled.explain()
    )
    assert str(plan_of_eager_region(policy).explain()) == str(compiled.explain())
    for source in (fx.symbolic_trace(model), torch.export.export(model, inputs).module()):
        made = fxckpt.rewrite(source, policy, example_inputs=inputs)
        made(*inputs).backward()
        assert made.plan.saved == compiled.saved
        assert [(row.name, row.module) for row in made.plan.rows] == [
            (row.name, row.module) for row in compiled.rows
        ]


def test_traced_graphs_obey_module_paths() -> None:
    """Every graph that records modules obeys paths; one that does not says so."""
    model, inputs = net()
    assert set(fxckpt.rewrite(make_fx(model)(*inputs), save_only("attn_out")).plan.saved) == set(
        ATTENTION.split()
    )
    with pytest.raises(
        fxckpt.PolicyMatchesNothing, match="The graph says of no op which module made it"
    ):
        fxckpt.rewrite(
            make_fx(lambda x, w: (x @ w).sin().sum())(
                torch.randn(2, 2), w := torch.ones(2, 2, requires_grad=True)
            ),
            save("a"),
        )(torch.randn(2, 2), w)


# Composition.


def fixed(answer: CheckpointPolicy | None) -> Policy:
    return as_policy(lambda *_: answer) if answer is not None else save("elsewhere")


def decided(policy: Policy) -> CheckpointPolicy | None:
    return policy.decide(Value(aten.sin.default, module="here"))


ANSWERS = (MUST_SAVE, PREFER_SAVE, PREFER_RECOMPUTE, MUST_RECOMPUTE, None)
EITHER = {
    MUST_SAVE: (MUST_SAVE, MUST_SAVE, MUST_SAVE, "clash", MUST_SAVE),
    PREFER_SAVE: (MUST_SAVE, PREFER_SAVE, PREFER_SAVE, MUST_RECOMPUTE, PREFER_SAVE),
    PREFER_RECOMPUTE: (MUST_SAVE, PREFER_SAVE, PREFER_RECOMPUTE, MUST_RECOMPUTE, PREFER_RECOMPUTE),
    MUST_RECOMPUTE: ("clash", MUST_RECOMPUTE, MUST_RECOMPUTE, MUST_RECOMPUTE, MUST_RECOMPUTE),
    None: ANSWERS,
}
BOTH = {
    MUST_SAVE: (MUST_SAVE, PREFER_SAVE, PREFER_RECOMPUTE, "clash", None),
    PREFER_SAVE: (PREFER_SAVE, PREFER_SAVE, PREFER_RECOMPUTE, MUST_RECOMPUTE, None),
    PREFER_RECOMPUTE: (PREFER_RECOMPUTE, PREFER_RECOMPUTE, PREFER_RECOMPUTE, MUST_RECOMPUTE, None),
    MUST_RECOMPUTE: ("clash", MUST_RECOMPUTE, MUST_RECOMPUTE, MUST_RECOMPUTE, None),
    None: (None,) * 5,
}


@pytest.mark.parametrize(
    ("combine", "table"), [(Policy.__or__, EITHER), (Policy.__and__, BOTH)], ids=["either", "both"]
)
def test_combine_two_answers(
    combine: Callable[[Policy, Policy], Policy], table: dict[Any, tuple[Any, ...]]
) -> None:
    """``|`` and ``&`` combine two answers by their truth tables."""
    for a in ANSWERS:
        for b, expected in zip(ANSWERS, table[a], strict=True):
            made = combine(fixed(a), fixed(b))
            if expected == "clash":
                with pytest.raises(fxckpt.PolicyConflict):
                    decided(made)
            else:
                assert decided(made) is expected, (a, b)


def test_first_match_and_negation() -> None:
    """The first answer decides in first_match, and ``~`` inverts each answer."""
    assert [
        decided(first_match(fixed(None), fixed(a), fixed(MUST_SAVE))) for a in ANSWERS[:4]
    ] == list(ANSWERS[:4])
    assert [decided(~fixed(a)) for a in ANSWERS] == [
        MUST_RECOMPUTE,
        PREFER_RECOMPUTE,
        PREFER_SAVE,
        MUST_SAVE,
        None,
    ]


def tanh_alone(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy | None:
    return MUST_SAVE if op is aten.tanh.default else None


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (save_attention | tanh_alone, f"tanh tanh_1 {ATTENTION}"),
        (tanh_alone | save_attention, f"tanh tanh_1 {ATTENTION}"),
        (save_attention | [aten.tanh], f"tanh tanh_1 {ATTENTION}"),
        (save_any_except("attn_out") & torch_style, "tanh tanh_1"),
        (first_match(tanh_alone, recompute_all), "tanh tanh_1"),
        ([tanh_alone, recompute_all], "tanh tanh_1"),
    ],
    ids=["or", "or, the other way", "or ops", "and", "first", "a list"],
)
def test_torch_forms_compose(policy: Any, expected: str, joint: Joint) -> None:
    """Functions and lists of ops compose with policies; None leaves a value open."""
    _, plan = planner_of(None, policy, "roofline").plan(joint)
    assert set(plan.saved) == set(expected.split())


def test_policies_are_values() -> None:
    """Policies compare, hash, print and pickle by value."""
    for policy, _ in EXPECTED.values():
        if isinstance(policy, Policy):
            assert pickle.loads(pickle.dumps(policy)) == policy
            assert hash(policy) == hash(pickle.loads(pickle.dumps(policy)))
            assert "object at" not in repr(policy)
    assert save("a") == save("a") != recompute("a")
    assert (
        repr(first_match(save("a") | save_matmuls, ~sqrt_n))
        == "first_match((save('a') | save_matmuls), ~sqrt_n)"
    )


def test_sqrt_n_of_a_chain() -> None:
    """Sixteen equal values in a chain make four segments, saved at three boundaries."""
    chain = [
        Value(aten.sin.default, bytes=4, position=i, reads=(i - 1,) if i else ()) for i in range(16)
    ]
    assert [i for i, answer in enumerate(decide_all(sqrt_n, chain)) if answer is MUST_SAVE] == [
        3,
        7,
        11,
    ]
    assert decide_all(sqrt_n, []) == []
    assert decide_all(sqrt_n, chain[:1]) == [PREFER_RECOMPUTE]


def test_policy_sees_each_forward_value_once() -> None:
    """A policy is asked once per forward value, in order, with all its facts."""
    asked: list[Value] = []

    class Listening(Policy):
        def decide(self, value: Value) -> None:
            asked.append(value)

    model, inputs = net()
    fxckpt.plan(model, *inputs, policy=Listening())
    assert [value.position for value in asked] == list(range(len(asked)))
    assert [str(value.op) for value in asked].count("aten.sin.default") == 2
    assert not any("cos" in str(value.op) for value in asked)
    tanh = [value for value in asked if value.op is aten.tanh.default]
    assert [(v.occurrence, v.module, v.shape, v.dtype, v.bytes) for v in tanh] == [
        (i, f"layers.{i}", (2, 8, 2 * WIDTH), torch.float32, 2 * 8 * 2 * WIDTH * 4)
        for i in range(2)
    ]
    assert all(
        v.source.startswith("test_policies.py:")
        and v.args[0].shape == v.shape
        and v.output.shape == v.shape
        for v in tanh
    )
    attention = [value for value in asked if "attn_out" in value.names]
    assert [v.module for v in attention] == ["layers.0.attn", "layers.1.attn"]
    products = [value for value in asked if value.op is aten.addmm.default]
    assert products[0].flops == 2 * 16 * WIDTH * WIDTH
    assert [asked[i].node for i in tanh[0].reads] == ["addmm_1"]


# Budgets.


def test_budget_respects_must() -> None:
    """A budget decides the rest and leaves each MUST alone."""
    for plan in same_at_every_budget(net, (0.9, FLOOR), policy=save("layers.0.attn")):
        assert {"addmm", "getitem"} <= set(plan.saved)
    for plan in same_at_every_budget(net, (None, 1.0, FLOOR), policy=recompute("layers.*.up")):
        assert not {"addmm_1", "addmm_4"} & set(plan.saved)


@dataclasses.dataclass(frozen=True)
class Where(Policy):
    """A user-defined policy: one answer in one module."""

    module: str
    answer: CheckpointPolicy

    def decide(self, value: Value) -> CheckpointPolicy | None:
        return self.answer if value.module.startswith(self.module) else None


def test_preference_breaks_ties_under_budget() -> None:
    """Between equally good plans, a budget takes the preferred one."""
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Sigmoid())
            for _ in range(6)
        )
    )
    x = torch.randn(64, 32)
    budget = int(0.95 * fxckpt.plan(model, x).peak_bytes)
    for layer in ("0", "1"):
        plan = fxckpt.plan(model, x, policy=Where(layer, PREFER_RECOMPUTE), budget=budget)
        assert {row.module[0] for row in plan.rows if row.runs} == {layer}


# Errors.


def test_conflict_names_policies_value_and_module() -> None:
    """A conflict names both policies, the value and its module."""
    model, inputs = net()
    policy = save("layers.*.attn") | recompute("layers.0")
    with pytest.raises(fxckpt.PolicyConflict) as info:
        fxckpt.plan(model, *inputs, policy=policy)
    text = str(info.value)
    for part in (
        "save('layers.*.attn')",
        "recompute('layers.0')",
        "addmm (aten.addmm.default, float32[16, 16])",
        "'layers.0.attn.qkv'",
    ):
        assert part in text
    first = fxckpt.plan(
        model, *inputs, policy=first_match(save("layers.*.attn"), recompute("layers.0"))
    )
    assert "addmm" in first.saved


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (
            save("layer.*.attn"),
            r"no module that computes fits 'layer.\*.attn'. Did you mean 'layers.\*.attn'",
        ),
        (recompute("attn"), r"did you mean '\*\*.attn'"),
        (block_boundaries("blocks.*"), "no module that computes fits"),
        (save_only("attnout"), "no value is named 'attnout'. Did you mean 'attn_out'"),
        (
            save_ops(aten.mm),
            "save_ops.aten.mm. matches no op of the graph. Did you mean 'aten.addmm'",
        ),
        (save("nowhere") | save_matmuls, "no module that computes fits 'nowhere'"),
    ],
)
def test_unmatched_pattern_suggests_the_nearest(policy: Policy, says: str) -> None:
    """A pattern that matches nothing raises and suggests the nearest names."""
    model, inputs = net()
    with pytest.raises(fxckpt.PolicyMatchesNothing, match=says):
        fxckpt.rewrite(model, policy, example_inputs=inputs)


def test_pattern_may_match_one_of_several_graphs() -> None:
    """With a graph break, a pattern need match in only one of the graphs."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).sin()
            torch._dynamo.graph_break()
            return self.second(y).sin()

    backend = fxckpt.Backend(
        policy=block_boundaries("second") | recompute("first"), inner="aot_eager"
    )
    torch.compile(Broken(), backend=backend)(torch.randn(2, 8)).sum().backward()
    assert len(backend.plans) == 2


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: as_policy(3), "policy=3 is not a policy"),
        (lambda: as_policy("layers.*"), r"save\('layers.\*'\)"),
        (lambda: as_policy(aten.mm.default), r"save_ops\(torch.ops.aten.mm.default\)"),
        (lambda: as_policy([]), "is not a policy"),
        (lambda: as_policy(every), r"call it, as in policy=every\(2\)"),
        (lambda: save_all | save, r"call it, as in policy=save\('layers.\*.attn'\)"),
        (lambda: save_all | 3, "policy=3 is not a policy"),
        (lambda: save_all & None, "policy=None is not a policy"),
        (
            lambda: as_policy([aten.mm.default, 3]),
            "policy=3 is not a policy|To save what this op gives",
        ),
        (lambda: every(0), "a whole number from 1 up"),
        (lambda: save(), r"Example: save\('layers.\*.attn'\)"),
        (lambda: save_only(3), "give one or more texts"),
        (lambda: save_ops("mm"), "'mm' is not an op"),
        (lambda: save_ops(), "at least one op"),
        (lambda: first_match(), "at least one policy"),
        (lambda: sqrt_n.decide(Value(aten.mm.default)), r"call bind\(values\) first"),
        (
            lambda: fxckpt.rewrite(Net(), lambda *_: 3, example_inputs=(torch.randn(2, 8, WIDTH),)),
            "the policy returned 3",
        ),
        (
            lambda: fxckpt.rewrite(Net(), tanh_alone, example_inputs=(torch.randn(2, 8, WIDTH),)),
            "no other policy to decide",
        ),
    ],
)
def test_invalid_policies_are_refused(make: Callable[[], object], says: str) -> None:
    """An invalid policy or argument raises InvalidOption and names the mistake."""
    with pytest.raises(fxckpt.InvalidOption, match=says):
        make()


# Names.


def test_name_is_identity_in_eager_mode() -> None:
    """In eager mode, fxckpt.name returns its tensor."""
    x = torch.randn(3, requires_grad=True)
    assert fxckpt.name(x, "x") is x


def test_name_survives_traces_and_leaves_no_op() -> None:
    """A name survives every trace and leaves no op in the planned graphs."""

    def f(x: Tensor) -> Tensor:
        y = fxckpt.name(x.sin().view(-1), "y")
        y = y.mul_(2)
        return fxckpt.name(y, "z").cos().sum()

    x = torch.randn(4, 2, requires_grad=True)
    named = torch.ops.fxckpt.named.default
    for traced in (make_fx(f)(x), fx.symbolic_trace(f), make_fx(torch.func.vmap(f))(x)):
        assert [node.args[1] for node in traced.graph.nodes if node.target is named] == ["y", "z"]
        traced.graph.eliminate_dead_code()
        assert len(traced.graph.find_nodes(op="call_function", target=named)) == 2
    for backend in ("eager", "aot_eager"):
        assert torch.equal(torch.compile(f, backend=backend, fullgraph=True)(x), f(x))
    made = fxckpt.rewrite(f, save_only("z"), example_inputs=(x,))
    made(x).backward()
    assert made.plan.saved == ("mul",)
    assert not any(
        node.target is named
        for half in (made.forward_graph, made.backward_graph)
        for node in half.graph.nodes
    )
    expected = torch.autograd.grad((x.sin() * 2).cos().sum(), x)
    assert torch.equal(x.grad, *expected)


def test_names_prevent_common_subexpression_elimination() -> None:
    """Equal values of two names stay two values."""

    def f(x: Tensor) -> Tensor:
        return (fxckpt.name(x.sin(), "a") * fxckpt.name(x.sin(), "b")).sum()

    x = torch.randn(3, requires_grad=True)
    assert fxckpt.plan(f, x, policy=save_only("a")).saved == ("sin",)
    assert fxckpt.plan(f, x, policy=save_only("b")).saved == ("sin_1",)


def test_value_with_several_names() -> None:
    """Each name of a value selects it, one given to its view included."""

    def f(x: Tensor) -> Tensor:
        y = fxckpt.name(fxckpt.name(x.sin(), "a"), "b")
        return fxckpt.name(y.view(-1), "c").cos().sum()

    x = torch.randn(3, requires_grad=True)
    for label in "abc":
        assert fxckpt.plan(f, x, policy=save_only(label)).saved == ("sin",)
        assert "sin" in fxckpt.plan(f, x, policy=save_any_except(label)).recomputed


def test_name_of_an_input_is_refused() -> None:
    """Naming a graph input in a policy raises; a glob may match one in passing."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        fxckpt.name(x, "x"), fxckpt.name(w.t(), "w")
        return fxckpt.name(x @ w.t(), "product").sin().sum()

    x, w = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    for label in "xw":
        for source in (f, fx.symbolic_trace(f)):
            with pytest.raises(
                fxckpt.PolicyMatchesNothing, match=f"'{label}' names an input of the graph"
            ):
                fxckpt.rewrite(source, save_only(label), example_inputs=(x, w))
    assert fxckpt.rewrite(f, save_only("*"), example_inputs=(x, w)).plan.saved == ("mm",)


def test_empty_name_is_refused_while_tracing() -> None:
    """An empty name raises while tracing."""
    with pytest.raises(fxckpt.InvalidOption, match="give a tensor and a text"):
        make_fx(lambda x: fxckpt.name(x, ""))(torch.ones(2))
