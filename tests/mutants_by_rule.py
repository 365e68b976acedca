"""All small changes of a Python module that are likely to be faults. Errors and types are left."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_LEFT_OUT = (ast.Expr, ast.AugAssign, ast.Delete, ast.Continue, ast.Break)


def mutants_of(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, what was done, the changed source) of each."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    source = text.encode()
    for node, how, new in _changes(ast.parse(text)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        changed = (source[:begin] + new.encode() + source[end:]).decode()
        try:
            compile(changed, "mutant", "exec")
        except SyntaxError:  # inside of an f-string, for instance
            continue
        yield node.lineno, how, changed


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    for child in _children(node):
        yield from _of(child)
        yield from _changes(child)


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
    if isinstance(node, ast.Assign) and any(_is_all_caps(target) for target in node.targets):
        return not isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom)


def _is_all_caps(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id.isupper()


def _written(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _of(node: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    match node:
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
