"""All small changes of a Python module that are likely to be faults.

It changes nothing that decides nothing: docstrings, types, imports, `__slots__`, assertions
(including `strict=` of zip), the sentences of errors, and arguments that only say how (`copy`,
`use_threads`). Constants (in capitals) become sixteen times as large, since one more is no fault.
mutation.py shows those that no test found, some of which are no faults.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_SAME_VALUES = frozenset({"strict", "copy", "use_threads"})
_LEFT_OUT = (ast.Expr, ast.AugAssign, ast.Delete, ast.Continue, ast.Break)


@dataclass(frozen=True, slots=True)
class Change:
    """One change: `before` and `after` are the lines that differ, `text` is the whole module. Only
    tests that run one of `lines` can see it; without lines, these tests are unknown.
    """

    line: int
    how: str
    before: str
    after: str
    text: str
    lines: frozenset[int]


def mutants_of(text: str) -> Iterator[Change]:
    """Each of them."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    source, module = text.encode(), ast.parse(text)
    for path, (node, how, new) in _changes(module, (module,)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        changed = source[:begin] + new.encode() + source[end:]
        try:
            compile(changed, "mutant", "exec")
        except SyntaxError:  # inside of an f-string, for instance
            continue
        first, last = starts[node.lineno - 1], starts[node.end_lineno]
        before, after = source[first:last], changed[first : last + len(changed) - len(source)]
        yield Change(
            node.lineno, how, _in_one_line(before), _in_one_line(after), changed.decode(),
            _lines_of(module, path, node),
        )  # fmt: skip


def _in_one_line(text: bytes) -> str:
    return " ".join(text.decode().split())


def _lines_of(module: ast.Module, path: tuple[ast.AST, ...], node: ast.AST) -> frozenset[int]:
    """Lines that are run if this node is, which these nodes lead to."""
    inner = [each for each in path if isinstance(each, ast.stmt)][-1]
    if any(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in path):
        return frozenset({inner.lineno, *range(node.lineno, node.end_lineno + 1)})
    if inner not in module.body or not isinstance(inner, ast.Assign):
        return frozenset()
    names = {each.id for each in inner.targets if isinstance(each, ast.Name)}
    used = (each for each in ast.walk(module) if isinstance(each, ast.Name))
    return frozenset(u.lineno for u in used if u.id in names and isinstance(u.ctx, ast.Load))


def _changes(
    node: ast.AST, path: tuple[ast.AST, ...]
) -> Iterator[tuple[tuple[ast.AST, ...], tuple[ast.AST, str, str]]]:
    for child in _children(node):
        yield from (((*path, child), each) for each in _of(child))
        if not _is_chosen(child):
            yield from _changes(child, (*path, child))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Without errors, types, docstrings and texts."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "bases", "type_comment"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_left(child):
                continue
            yield child


def _is_left(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.Assign):
        named = [target.id for target in node.targets if isinstance(target, ast.Name)]
        is_table = any(map(str.isupper, named)) and not _is_chosen(node)
        return is_table or "__slots__" in named
    if isinstance(node, ast.keyword) and node.arg in _SAME_VALUES:
        return True
    return isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom)


def _is_chosen(node: ast.AST) -> bool:
    """Whether it gives a number a name in capitals."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.isupper():
            numbers = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
            return all(isinstance(part, numbers) for part in ast.walk(value)) and all(
                type(part.value) in {int, float}
                for part in ast.walk(value)
                if isinstance(part, ast.Constant)
            )
    return False


def _written(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _of(node: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    match node:
        case ast.Assign() if _is_chosen(node):
            yield node.value, "constant", f"16 * {_written(node.value)}"
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            changed = copy.deepcopy(node)
            changed.ops = [_COMPARISONS[type(op)]()]
            yield node, "comparison", _written(changed)
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            changed = copy.deepcopy(node)
            changed.op = _OPERATORS[type(op)]()
            yield node, "operator", _written(changed)
        case ast.BoolOp():
            changed = copy.deepcopy(node)
            changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield node, "and/or", _written(changed)
        case ast.UnaryOp(op=ast.Not()):
            yield node, "not", _written(node.operand)
        case ast.Constant(value=bool(value)):
            yield node, "constant", str(not value)
        case ast.Constant(value=int(value)):
            yield node, "constant", str(value + 1)
        case ast.If() | ast.IfExp():
            yield node.test, "condition", f"(not {_written(node.test)})"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "left out", "pass"
        case ast.Return(value=None):
            yield node, "left out", "pass"
        case _ if isinstance(node, _LEFT_OUT):
            yield node, "left out", "pass"
