"""Buffers of a scheduled Inductor graph, kernel by kernel, as its code generation decides them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor import config, ir
from torch._inductor.codegen.wrapper import (
    EfficientPeakEstimate,
    buffer_reuse_key,
    can_match_buffer_size,
)
from torch._inductor.scheduler import NopKernelSchedulerNode, OutputNode, SchedulerNode
from torch._inductor.virtualized import V

from fxckpt.torch_private.capture.sizes import greatest
from fxckpt.torch_private.inductor.lowered import LoweredHalf
from fxckpt.torch_private.inductor.options import Layout
from fxckpt.torch_private.ops.storages import allocated_bytes

# Since torch 2.14 one class stands for cond and switch; its code differs only in names.
Conditional: Any = ir.Switch if hasattr(ir, "Switch") else ir.Conditional


def read_schedule(graph: Any) -> LoweredHalf:
    """Return the kernels and buffers of a lowered and scheduled graph.

    Expects the graph to be ``V.graph``; schedules the graphs inside its ops.
    """
    return _Schedule(graph).read()


class _Schedule:
    """Walks one scheduled graph, kernel by kernel."""

    def __init__(self, graph: Any) -> None:
        self.graph, self.scheduler = graph, graph.scheduler
        self.renamed = graph.scheduler.mutation_real_name
        self.made_by = {
            b.get_name(): i for i, n in enumerate(graph.scheduler.nodes) for b in n.get_outputs()
        }
        self.parts: dict[str, list[str]] = defaultdict(list)
        """Results, used or not, of extern kernels with several; they live as long as its name."""
        for buffer in graph.buffers:
            if isinstance(buffer, ir.MultiOutput):
                self.parts[buffer.inputs[0].get_name()].append(buffer.get_name())  # type: ignore[union-attr]
        self.in_place: dict[str, str] = {}
        """Buffers that reuse the memory of a dead one, by name."""
        self.unaligned = set(graph.unaligned_buffers)
        """Memory of extern kernels, or of callers with dynamic sizes, which is never pooled."""
        # Since torch 2.15 (an op with effects may hold its inputs): freed, and never reused.
        self.only_freed: Collection[str] = getattr(graph, "never_reuse_but_free_buffers", ())
        """Buffers that are freed after their last use, and whose memory no other buffer takes."""
        self.overwritten: list[tuple[int, int]] = []
        self.last: dict[str, int] = {}
        self.born: dict[str, tuple[int, int]] = {}
        self.ran: set[str] = set()
        self.outputs = tuple(_name(output) for output in graph.graph_outputs)

    def read(self) -> LoweredHalf:
        """Return the kernels and buffers of the graph."""
        nodes = self.scheduler.nodes
        returned = frozenset(filter(None, self.outputs))
        pool = _Pool()
        for group in _calls(nodes):
            for i in group:
                self._run(i, returned, pool)
            # Buffers of several loops in one call live until the call returns.
            for name in sorted({name for i in group for name in nodes[i].last_usage}):
                self._access(name, group[-1])
                self._free(name, group[-1], returned, pool)
        return self._lowered(returned)

    def _run(self, i: int, returned: Collection[str], pool: _Pool) -> None:
        """Account for the buffers that a kernel overwrites, reads and writes."""
        node, end = self.scheduler.nodes[i], len(self.scheduler.nodes)
        rows = frozenset(self._rows(node)).difference(returned)
        inside = rows | frozenset(self._removed(node)).difference(returned)
        taken = dict(self._overwrites(node, inside, rows))
        self.in_place.update(taken)
        self.unaligned.update(written for written, read in taken.items() if read in self.unaligned)
        self.overwritten.extend(
            (i, _bytes(self.scheduler.name_to_buf[name].node)) for name in taken
        )
        for dep in node.read_writes.reads:
            if not getattr(dep, "is_fake", False):
                # The code frees an operand that dies in a conditional in its first branch only.
                self._access(dep.name, end if isinstance(node.node, Conditional) else i)
        for buffer in node.get_outputs():
            if buffer.get_name() not in inside:
                self._write(i, buffer, pool)
        self.ran.update(n.get_name() for n in node.get_nodes())

    def _lowered(self, returned: Collection[str]) -> LoweredHalf:
        """Return all as plain data, once every kernel has run."""
        nodes, end = self.scheduler.nodes, len(self.scheduler.nodes)
        kept = frozenset(map(self._root, (*returned, *self._never_freed())))
        return LoweredHalf(
            tuple(_origins(node) for node in nodes),
            {
                i: self._inside(i, bodies)
                for i, node in enumerate(nodes)
                if (bodies := _bodies(node))
            },
            {i: _extern_call(node.node) for i, node in enumerate(nodes) if _is_extern_call(node)},
            (
                *(
                    (n, size, first, end if n in kept else max(self.last.get(n, first), first))
                    for n, (size, first) in self.born.items()
                ),
                *self._condition_results(),
            ),
            tuple(self.overwritten),
            {name: self.last.get(name, -1) for name in self.graph.graph_input_names},
            tuple(
                None if n is None else (self._root(n), _strides(o))
                for n, o in zip(self.outputs, self.graph.graph_outputs, strict=True)
            ),
        )

    def _inside(self, i: int, bodies: Sequence[Any]) -> int:
        """Return the most bytes that a kernel's bodies allocate beyond their results in use.

        Unused results count, as the bodies return them too.
        """
        taken = sum(
            size
            for name, (size, first) in self.born.items()
            if first == i and isinstance(V.graph.get_buffer(name), ir.MultiOutput)
        )
        # Each iteration of a loop allocates the results that the previous one returned.
        taken = 0 if isinstance(self.scheduler.nodes[i].node, ir.WhileLoop) else taken
        return max(most - min(taken, returned) for most, returned in map(_body_bytes, bodies))

    def _condition_results(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield the last results of loop conditions, which the code never frees."""
        for i, node in enumerate(self.scheduler.nodes):
            if isinstance(node.node, ir.WhileLoop):
                nbytes = allocated_bytes(torch.bool.itemsize, node.node.get_device_or_error().type)
                yield f"{node.node.get_name()}_cond_result", nbytes, i, len(self.scheduler.nodes)

    def _never_freed(self) -> Iterator[str]:
        """Yield buffers that live until the half returns, and their parts.

        A returned size was read from them, or they may belong to a caller.
        """
        for name, buffer in self.scheduler.name_to_buf.items():
            if name in V.graph.never_reuse_buffers or any(
                isinstance(user.node, OutputNode) for user in buffer.users
            ):
                yield from (name, *self.parts.get(name, ()))

    def _access(self, name: str, i: int) -> None:
        root = self._root(name)
        self.last[root] = max(self.last.get(root, -1), i)
        for part in self.parts.get(name, ()):
            self._access(part, i)

    def _free(self, name: str, i: int, returned: Collection[str], pool: _Pool) -> None:
        """Return a buffer to the pool for the next of its size, as the wrapper's planning does."""
        buffer = self.scheduler.name_to_buf.get(name)
        if (
            buffer is None
            or name in returned
            or name in self.in_place.values()
            or name in V.graph.never_reuse_buffers
        ):
            return
        is_own = (
            (name in self.born or name in self.in_place)
            and name not in self.unaligned
            and name not in self.only_freed
        )
        if is_own and buffer.can_free() and not buffer.node.get_inputs_that_alias_output():
            pool.give(buffer.node, i)

    def _root(self, name: str) -> str:
        """Return the buffer that owns the memory of a buffer."""
        while True:
            name = self.renamed.get(name, name)
            buffer = self.scheduler.name_to_buf.get(name)
            below = (
                []
                if buffer is None or name in self.renamed
                else buffer.node.get_inputs_that_alias_output()
            )
            if below:
                name = below[0]
            elif name in self.in_place:
                name = self.in_place[name]
            else:
                return name

    def _write(self, i: int, buffer: Any, pool: _Pool) -> None:
        """Account for a buffer that kernel ``i`` writes: new, of the pool, or part of another."""
        name, made = buffer.get_name(), buffer.node
        root = self._root(name)
        if (
            isinstance(made.layout, ir.NonOwningLayout)
            and root in self.scheduler.name_to_buf
            and root not in self.born
        ):
            # The first part of a concatenation allocates all of it.
            self._write(i, self.scheduler.name_to_buf[root], pool)
        if (
            root != name
            or name in self.born
            or isinstance(made.layout, (ir.NoneLayout, ir.MultiOutputLayout))
        ):
            for part in self.parts.get(name, ()):
                # Unused results live until the name is dropped.
                if (
                    part not in self.made_by
                    and not V.graph.get_buffer(part).get_inputs_that_alias_output()
                ):
                    self.born[part] = (_bytes(V.graph.get_buffer(part)), i)
            self._access(name, i)
            return
        if made.should_allocate() and (reused := pool.take(made, i)) is not None:
            self.in_place[name] = reused
            self._access(name, i)
            return
        first = i
        if isinstance(made, ir.MultiOutput):
            call: Any = made.inputs[0]
            first = self.made_by.get(str(call.get_name()), i)
        self.born[name] = (_bytes(made), first)

    def _removed(self, node: Any) -> Iterator[str]:
        """Yield the buffers that are local to one loop nest."""
        for loop in _loops(node):
            names = {n.get_name() for n in loop.get_nodes()}
            for buffer in loop.get_outputs():
                if self.scheduler.can_buffer_be_removed_through_fusion(buffer.get_name(), names):
                    yield buffer.get_name()

    def _rows(self, node: Any) -> Iterator[str]:
        """Yield the buffers of which a kernel stores a single row.

        Loop nests that share only their outer loops pass one row of a buffer, if it is written and
        read row by row.
        """
        loops = _loops(node)
        if len(loops) > 1 and all(
            len(_ranges(loop)) == node.outer_loop_fusion_depth + 1 for loop in loops
        ):
            users = node.get_nodes()
            for each in users:
                if not each.is_reduction() and len(each.get_outputs()) == 1:
                    (buffer,) = each.get_outputs()
                    if all(user.node in users for user in buffer.users) and _is_row_by_row(
                        each, buffer
                    ):
                        yield buffer.get_name()

    def _overwrites(
        self, node: Any, inside: Collection[str], rows: Collection[str]
    ) -> Iterator[tuple[str, str]]:
        """Yield ``(written, read)`` buffers where a kernel overwrites an input that dies in it.

        Follows ``SchedulerNode.decide_inplace_update``, which runs during code generation. Values
        local to the kernel are not known then: one of them may be overwritten, and is then
        allocated in place of the buffer that overwrites it.
        """
        taken = self._taken(node, rows)
        for name in taken:
            if name in inside:
                continue
            below = name
            while below in taken and (below == name or below in inside):
                below = taken[below]
            if below not in inside:
                yield name, below

    def _taken(self, node: Any, rows: Collection[str]) -> dict[str, str]:
        """Return the buffer that each buffer of a kernel overwrites, also local ones."""
        taken: dict[str, str] = {}
        kernel = {n.get_name() for n in node.get_nodes()}
        for each in node.get_nodes() if config.inplace_buffers else ():
            if not isinstance(each, SchedulerNode):
                continue
            for buffer in each.get_outputs():
                made = buffer.node
                if (
                    not made.should_allocate()
                    or made.get_inputs_that_alias_output()
                    or made.get_mutation_names()
                    or buffer.get_name() in rows
                ):
                    continue
                found = next(
                    (
                        n
                        for n in self._dying(each, buffer, kernel)
                        if n not in taken.values() and n not in rows
                    ),
                    None,
                )
                if found is not None:
                    taken[buffer.get_name()] = found
        return taken

    def _dying(self, node: Any, written: Any, kernel: Collection[str]) -> Iterator[str]:
        """Yield the buffers that die in a node, and that the buffer it writes fits into."""
        for dep in node.read_writes.reads:
            donated = self.scheduler.name_to_donated_buffer.get(dep.name)
            read = donated or self.scheduler.name_to_buf.get(dep.name)
            if (
                read is None
                or read.node is None
                or self._stays(dep.name)
                or _is_in_other_pool(self.scheduler, dep.name, node)
                or _is_made_elsewhere(read)
            ):
                continue
            done = node.ancestors | self.ran
            users = [user for user in read.users or () if user.node.get_name() not in done]
            layout = read.node.get_output_spec()
            if (
                len(users) == 1
                and users[0].node is node
                and users[0].can_inplace
                and not isinstance(
                    layout, (ir.NoneLayout, ir.MultiOutputLayout, ir.MutationLayoutSHOULDREMOVE)
                )
                and can_match_buffer_size(read.node, written.node)
                and self._is_read_alike(read, kernel)
            ):
                yield dep.name

    def _stays(self, name: str) -> bool:
        """Return whether a buffer is not to be overwritten, whoever reads it last."""
        return (
            name in self.outputs or name in V.graph.never_reuse_buffers or name in self.only_freed
        )

    def _is_read_alike(self, buffer: Any, kernel: Collection[str]) -> bool:
        """Return whether all accesses of a kernel to a buffer have one index expression."""
        readers = [u.node for u in buffer.users if u.node.get_name() in kernel]
        accesses = {
            dep
            for reader in readers
            for dep in reader.read_writes.reads_and_writes()
            if dep.name == buffer.get_name()
        }
        return len(accesses) <= 1


class _Pool:
    """Dead buffers, kept for the next of equal size if the peak allows (``memory_plan_reuse``)."""

    def __init__(self) -> None:
        self.free: dict[Any, list[SimpleNamespace]] = defaultdict(list)
        self.estimate = EfficientPeakEstimate() if config.allow_buffer_reuse else None

    def give(self, buffer: Any, i: int) -> None:
        """Add a buffer last used by kernel ``i``."""
        self.free[buffer_reuse_key(buffer)].append(
            SimpleNamespace(node=buffer, scheduler_node_index=i)
        )

    def take(self, buffer: Any, i: int) -> str | None:
        """Return the dead buffer that a buffer of kernel ``i`` reuses; None for new memory."""
        waiting = self.free.get(buffer_reuse_key(buffer))
        if self.estimate is None or not waiting:
            return None
        old: Any = waiting[-1]
        new: Any = SimpleNamespace(node=buffer, scheduler_node_index=i)
        size = (
            V.graph.sizevars.optimization_hint(
                V.graph.get_allocation_storage_size(buffer), fallback=0
            )
            * buffer.get_dtype().itemsize
        )
        is_next = old.scheduler_node_index + 1 == i
        if (
            not is_next
            and size + self.estimate.peak_between(old, new) > self.estimate.overall_peak_memory
        ):
            return None
        waiting.pop()
        self.estimate.update_peak_between(old, new)
        return str(old.node.get_name())


def _bodies(node: Any) -> list[Any]:
    """Return the lowered graphs that a kernel runs: branches and loop bodies."""
    if not node.is_extern():
        return []
    op = node.node
    if hasattr(op, "get_subgraphs"):
        subgraphs = op.get_subgraphs()
    else:
        # torch 2.11 has no name for them that all ops share.
        subgraphs = [getattr(op, name, None) for name in _SUBGRAPHS.get(type(op).__name__, ())]
    return [each.graph for each in subgraphs if each is not None and each.graph is not None]


_SUBGRAPHS = {
    "InvokeSubgraph": ("subgraph",),
    "Conditional": ("true_subgraph", "false_subgraph"),
    "WhileLoop": ("cond_subgraph", "body_subgraph"),
}
"""Attributes of an op that hold the graphs it runs, in torch 2.11."""


def _body_bytes(body: Any) -> tuple[int, int]:
    """Return the peak bytes of a body, and the bytes that it returns."""
    with V.set_graph_handler(body), config.patch(graph_partition=False):
        body.init_wrapper_code()
        body._update_scheduler()
        found = read_schedule(body)
    during = found.live_bytes()
    return int((during + [found.inside.get(i, 0) for i in range(len(during))]).max()), int(
        during[-1]
    )


def _calls(nodes: Sequence[Any]) -> Iterator[list[int]]:
    """Yield groups of kernels run by one call: on the CPU, consecutive loops are one function."""
    group: list[int] = []
    for i, node in enumerate(nodes):
        device = node.get_device()
        is_loop = (
            device is not None
            and device.type == "cpu"
            and not node.is_extern()
            and not node.is_template()
        )
        if group and not is_loop:
            yield group
            group = []
        group.append(i)
        if not is_loop:
            yield group
            group = []
    if group:
        yield group


def _is_in_other_pool(scheduler: Any, name: str, node: Any) -> bool:
    """Return whether a buffer lies in another CUDA memory pool than what a kernel allocates."""
    # Before torch 2.14 Inductor knows no pools (``torch.cuda.use_mem_pool``).
    if not hasattr(scheduler, "get_buf_mempool"):
        return False
    return bool(scheduler.get_buf_mempool(name) != scheduler.node_to_mempool.get(node))


def _is_made_elsewhere(buffer: Any) -> bool:
    """Return whether a buffer is a concatenation, or aliases an input of an extern kernel."""
    made_by = buffer.defining_op
    if isinstance(made_by, NopKernelSchedulerNode):
        return True
    is_result = made_by is not None and isinstance(
        made_by.node, (ir.FallbackKernel, ir.MultiOutput)
    )
    return is_result and len(buffer.node.get_inputs_that_alias_output()) > 0


def _loops(node: Any) -> list[Any]:
    return list(node.get_outer_nodes()) if hasattr(node, "get_outer_nodes") else [node]


def _ranges(loop: Any) -> tuple[Any, ...]:
    """Return the loop's ranges, the reduced ones last."""
    _, (group, reduced) = max(loop.get_nodes(), key=lambda n: int(n.is_reduction())).group
    return (*group, *reduced)


def _is_row_by_row(node: Any, buffer: Any) -> bool:
    """Return whether a buffer is written and read in the order of its memory."""
    name, expected, stride = buffer.get_name(), sympy.Integer(0), sympy.Integer(1)
    for variable, size in reversed(node._body.var_ranges.items()):
        expected, stride = expected + stride * variable, stride * size
    reads = [
        u.node._body.get_read_expr(name) for u in buffer.users if isinstance(u.node, SchedulerNode)
    ]
    return bool(buffer.node.get_layout().is_contiguous()) and all(
        x == expected for x in (node._body.get_write_expr(name), *reads)
    )


def _bytes(buffer: Any) -> int:
    """Return the bytes of a buffer's allocation; the most for a bounded dynamic size."""
    return allocated_bytes(
        _most(V.graph.get_allocation_storage_size(buffer)) * buffer.get_dtype().itemsize,
        buffer.get_device_or_error().type,
    )


def _most(size: Any) -> int:
    """Return a size; of a dynamic one the upper bound, or the hint if it has none."""
    expression = sympy.sympify(size)
    bound = (
        greatest(expression, V.graph.sizevars.shape_env)
        if expression.free_symbols
        else int(expression)
    )
    return (
        int(V.graph.sizevars.optimization_hint(expression, fallback=0)) if bound is None else bound
    )


def _is_extern_call(node: Any) -> bool:
    """Return whether a kernel calls a library and is not one of the results of such a call."""
    return node.is_extern() and not isinstance(node.node, ir.MultiOutput)


def _extern_call(made: Any) -> tuple[str, tuple[Layout, ...]]:
    """Return the node of an extern kernel, empty if unknown, and the layouts of its operands."""
    operands = [
        operand
        for operand in made.inputs
        if isinstance(operand, ir.IRNode) and operand.has_tensor_output()
    ]
    layouts = tuple(
        (tuple(map(_most, operand.get_size())), _strides(operand)) for operand in operands
    )
    return (made.fx_node.name if made.fx_node is not None else ""), layouts


def _name(output: Any) -> str | None:
    """Return the buffer or input that an output is or aliases; None if it is no tensor."""
    is_tensor = isinstance(output, ir.IRNode) and output.has_tensor_output()
    return str(output.get_name()) if is_tensor else None


def _strides(output: Any) -> tuple[int, ...]:
    return tuple(map(_most, output.get_stride()))


def _origins(node: Any) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(
            o.name for n in node.get_nodes() if n.node is not None for o in n.node.get_origins()
        )
    )
