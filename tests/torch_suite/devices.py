"""Test files of another device, rewritten for the CPU."""

from __future__ import annotations

import ast
import re


def on_cpu(source: str, device: str) -> str:
    """Return the source of a test file with ``device`` replaced by the CPU.

    Strings such as ``"cuda"`` and ``"cuda:0"`` become ``"cpu"``, ``x.cuda()`` becomes ``x.cpu()``,
    and decorators that skip a test without that device are left out.
    """
    return ast.unparse(ast.fix_missing_locations(_OnCpu(device).visit(ast.parse(source))))


class _OnCpu(ast.NodeTransformer):
    def __init__(self, device: str) -> None:
        self._device = device
        self._name = re.compile(rf"{device}(:\d+)?")
        self._requires = re.compile(rf"(requires|only|has)_?\w*({device}|gpu|triton)", re.I)
        self._skips = re.compile(rf"skip(If|Unless)\(.*({device}|gpu|triton)", re.I | re.S)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and self._name.fullmatch(node.value):
            return ast.copy_location(ast.Constant("cpu"), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == self._device:
            return ast.copy_location(
                ast.Call(ast.Attribute(node.func.value, "cpu", ast.Load()), [], []), node
            )
        return node

    def _without_twins(self, node: ast.List | ast.Tuple) -> ast.AST:
        self.generic_visit(node)
        # Cases for ["cpu", "cuda"] are the same twice, under one name.
        seen: set[str] = set()
        for element in list(node.elts):
            if isinstance(element, ast.Constant) and element.value == "cpu":
                if "cpu" in seen and isinstance(node.ctx, ast.Load):
                    node.elts.remove(element)
                seen.add("cpu")
        return node

    visit_List = visit_Tuple = _without_twins

    def _without_skips(self, node: ast.FunctionDef | ast.ClassDef) -> ast.AST:
        node.decorator_list = [
            decorator
            for decorator in node.decorator_list
            if not self._requires.search(text := ast.unparse(decorator))
            and not self._skips.search(text)
        ]
        return self.generic_visit(node)

    visit_FunctionDef = visit_ClassDef = _without_skips
