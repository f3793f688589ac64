"""Operators: every small change of a source file that a test ought to notice."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Expressions whose value comes from elsewhere.
EXTERNAL_VALUES = (ast.Call, ast.Yield, ast.YieldFrom, ast.Await)
#: The boundary moves by one; whether the comparison is made at all is tested by the condition around it.
COMPARISON_SWAPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
ARITHMETIC_SWAPS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
CALL_SWAPS = {"min": "max", "max": "min", "any": "all", "all": "any"}
#: Calls that write messages; their text is not behaviour.
MESSAGE_CALLS = {"log", "logger", "logging", "warnings"}
TEXT_KEYWORDS = {"description", "title", "doc", "help"}


@dataclass(eq=False)
class Mutant:
    """One change: the place in the tree, the replacement, and the lines whose tests are run."""

    path: Path
    function: str
    change: str
    line: int
    lines: range
    location: tuple[ast.AST, str, int | None]
    new: ast.AST
    tree: ast.Module
    #: Inside a function's body, so that replacing the code of live functions is sufficient.
    inside: bool
    #: Listed as equivalent.
    is_equivalent: bool = False

    def code(self) -> CodeType:
        """Return the changed module. The tree stays changed: the calling process has no other use for it."""
        node, field, index = self.location
        if index is None:
            setattr(node, field, self.new)
        else:
            getattr(node, field)[index] = self.new
        return compile(ast.fix_missing_locations(self.tree), str(self.path), "exec", dont_inherit=True)


def mutants_of(path: Path) -> list[Mutant]:
    """Return every mutant of one file; mutants with the same text are numbered."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    mutants = list(_MutantWalker(path, tree).walk_module())
    seen: Counter[tuple[str, str]] = Counter()
    for mutant in mutants:
        seen[mutant.function, mutant.change] += 1
        if (count := seen[mutant.function, mutant.change]) > 1:
            mutant.change += f" #{count}"
    return mutants


class _MutantWalker:
    """Walks through one file and tracks its position."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path = path
        self.tree = tree
        self.names: list[str] = []
        self.inside = 0
        self.statement: ast.stmt = ast.Pass(lineno=1, end_lineno=1)

    def walk_module(self) -> Iterator[Mutant]:
        yield from self.walk_block(self.tree, "body")

    def walk_block(self, owner: ast.AST, field: str) -> Iterator[Mutant]:
        for index, node in enumerate(getattr(owner, field)):
            if not _is_skipped(node):
                outer, self.statement = self.statement, node
                yield from self.walk_statement(node, (owner, field, index))
                self.statement = outer

    def walk_statement(self, node: ast.stmt, location: tuple[ast.AST, str, int | None]) -> Iterator[Mutant]:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from self.walk_definition(node)
            return
        for new in _replace_statement(node, inside=bool(self.inside), initial="__init__" in self.names):
            yield self.create_mutant(location, node, new)
        for field in ("test", "value", "iter", "msg", "exc", "items", "subject", "targets", "target"):
            if getattr(node, field, None) is not None and not (isinstance(node, ast.Expr) and _is_message(node.value)):
                yield from self.walk_expressions(node, field)
        for field in ("body", "orelse", "finalbody"):
            yield from self.walk_block(node, field) if hasattr(node, field) else ()
        for handler in getattr(node, "handlers", ()):
            if handler.type is not None:
                nothing = ast.Tuple(elts=[], ctx=ast.Load())
                yield self.create_mutant(
                    (handler, "type", None), handler.type, nothing, label=f"except {_to_text(handler.type)}"
                )
            yield from self.walk_block(handler, "body")
        for case in getattr(node, "cases", ()):
            yield from self.walk_block(case, "body")

    def walk_definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[Mutant]:
        self.names.append(node.name)
        if isinstance(node, FUNCTIONS):
            for field in ("defaults", "kw_defaults"):
                yield from self.walk_expressions(node.args, field)
            self.names.append("<locals>")
            self.inside += 1
        yield from self.walk_block(node, "body")
        if isinstance(node, FUNCTIONS):
            self.inside -= 1
            self.names.pop()
        self.names.pop()

    def walk_expressions(self, owner: ast.AST, field: str, *, quiet: bool = False) -> Iterator[Mutant]:
        """Create the mutants of every expression in *field*; in *quiet* places text has no meaning."""
        value = getattr(owner, field)
        entries = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for index, node in entries:
            if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr):
                continue
            for new in _replace_expression(node, owner, field, inside=bool(self.inside), quiet=quiet):
                yield self.create_mutant((owner, field, index), node, new)
            in_message = quiet or _is_message(node) or isinstance(self.statement, ast.Raise)
            in_message = in_message or (isinstance(node, ast.keyword) and node.arg in TEXT_KEYWORDS) or _is_error(node)
            for name, inner in ast.iter_fields(node):
                if name not in ("annotation", "returns", "ctx", "func") and isinstance(inner, ast.AST | list):
                    yield from self.walk_expressions(node, name, quiet=in_message)
                elif name == "func" and isinstance(inner, ast.Attribute):
                    yield from self.walk_expressions(inner, "value", quiet=in_message)

    def create_mutant(
        self, location: tuple[ast.AST, str, int | None], old: ast.AST, new: ast.AST, *, label: str | None = None
    ) -> Mutant:
        first = self.statement
        ast.fix_missing_locations(ast.copy_location(new, old))
        body = getattr(first, "body", None)
        last = body[0].lineno - 1 if isinstance(body, list) and body else first.end_lineno
        lines = (
            range(old.lineno, old.end_lineno + 1) if label else range(first.lineno, max(first.lineno, last or 0) + 1)
        )
        before = label or _to_text(first)
        change = (
            f"{before}: {_to_text(old)} -> {_to_text(new)}"
            if before != _to_text(old)
            else f"{before} -> {_to_text(new)}"
        )
        name = ".".join(self.names).removesuffix(".<locals>") or "<module>"
        return Mutant(self.path, name, change, old.lineno, lines, location, new, self.tree, inside=bool(self.inside))


def _is_skipped(node: ast.stmt) -> bool:
    """Return whether a statement has no behaviour: types, texts, representations, names for readers."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Global() | ast.Nonlocal():
            skipped = True
        case ast.Expr(value=ast.Constant()) | ast.AnnAssign(value=None):
            skipped = True
        case ast.If(test=test):
            skipped = _to_text(test).endswith("TYPE_CHECKING")
        case ast.ClassDef(bases=bases):
            skipped = any(_to_text(base).startswith("Protocol") for base in bases)
        case ast.FunctionDef(name=name, decorator_list=marks) | ast.AsyncFunctionDef(name=name, decorator_list=marks):
            skipped = name == "__repr__" or any("abstractmethod" in _to_text(mark) for mark in marks)
        case ast.Assign(targets=targets):
            skipped = any(_to_text(target) in {"__slots__", "__all__", "__match_args__"} for target in targets)
        case _:
            skipped = False
    return skipped


def _replace_statement(node: ast.stmt, *, inside: bool, initial: bool) -> Iterator[ast.AST]:
    """Yield the replacements of a whole statement."""
    if not inside:
        return
    if isinstance(node, ast.Expr) and not _is_message(node.value) and not isinstance(node.value, ast.Yield):
        yield _remove_statement(node)
    elif isinstance(node, ast.Raise | ast.AugAssign | ast.Delete):
        yield ast.Pass()
    elif isinstance(node, ast.Break):
        yield ast.Continue()
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, ast.Return) and node.value is None:
        yield ast.Pass()
    elif isinstance(node, ast.Return) and not _is_constant(node.value, None):
        yield ast.Return(value=_drop_value(node.value))
    if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC_SWAPS:
        yield ast.AugAssign(target=node.target, op=ARITHMETIC_SWAPS[type(node.op)](), value=node.value)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        yield from _replace_assignment(node, initial=initial)


def _replace_assignment(node: ast.Assign | ast.AnnAssign, *, initial: bool) -> Iterator[ast.AST]:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    if node.value is None:
        return
    if isinstance(target, ast.Attribute | ast.Subscript) and not initial:
        yield ast.Pass()
    elif (
        not _is_constant(node.value, None)
        and not isinstance(target, ast.Tuple)
        and (initial or isinstance(node.value, EXTERNAL_VALUES))
    ):
        yield ast.Assign(targets=[target], value=_drop_value(node.value))


def _replace_expression(node: ast.AST, owner: ast.AST, field: str, *, inside: bool, quiet: bool) -> Iterator[ast.AST]:
    """Yield the replacements of one expression."""
    condition = field == "test" or (field == "ifs" and isinstance(owner, ast.comprehension))
    if condition and isinstance(node, ast.Constant):
        return  # `while True` is a form, not a condition
    # An endless loop is found only by the time limit, which is slow.
    values = (False,) if isinstance(owner, ast.While) else (True, False)
    yield from (ast.Constant(value=value) for value in values if condition)
    match node:
        case ast.Compare(ops=[op, *others]) if not condition or isinstance(op, ORDER):
            yield ast.Compare(left=node.left, ops=[COMPARISON_SWAPS[type(op)](), *others], comparators=node.comparators)
        case ast.BoolOp(op=op):
            yield ast.BoolOp(op=ast.Or() if isinstance(op, ast.And) else ast.And(), values=node.values)
        case ast.UnaryOp(op=op) if isinstance(op, ast.USub) or not condition:
            yield node.operand
        case ast.BinOp(op=op) if type(op) in ARITHMETIC_SWAPS:
            yield ast.BinOp(left=node.left, op=ARITHMETIC_SWAPS[type(op)](), right=node.right)
        case ast.BinOp(op=ast.BitOr()) if inside:
            yield node.left
            yield node.right
        case ast.Call(func=ast.Name(id=name)) if name in CALL_SWAPS:
            swapped = ast.Name(id=CALL_SWAPS[name], ctx=ast.Load())
            yield ast.Call(func=swapped, args=node.args, keywords=node.keywords)
        case ast.Constant(value=value):
            yield from _replace_constant(value, quiet=quiet)


def _replace_constant(value: object, *, quiet: bool) -> Iterator[ast.AST]:
    if isinstance(value, bool):
        yield ast.Constant(value=not value)
    elif isinstance(value, int | float):
        yield ast.Constant(value=value + 1)
    elif isinstance(value, str) and not quiet:
        yield ast.Constant(value="XX" + value)


def _drop_value(value: ast.expr) -> ast.expr:
    """Return None instead of *value*, which is still computed: any test would notice a script that stops being one."""
    if not any(isinstance(node, EXTERNAL_VALUES) for node in ast.walk(value)):
        return ast.Constant(value=None)
    pair = ast.Tuple(elts=[value, ast.Constant(value=None)], ctx=ast.Load())
    dropped = ast.Subscript(value=pair, slice=ast.Constant(value=1), ctx=ast.Load())
    dropped.reads = "None"  # for the listing
    return dropped


def _remove_statement(node: ast.Expr) -> ast.stmt:
    """Return nothing instead of *node*, in a function that stays a generator if it was one."""
    if not isinstance(node.value, ast.YieldFrom):
        return ast.Pass()
    unreachable = ast.Expr(value=copy.deepcopy(node.value))
    return ast.If(test=ast.Constant(value=False), body=[ast.Pass(), unreachable], orelse=[])


def _is_message(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    root = node.func
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(root, ast.Name) and root.id.strip("_").lower() in MESSAGE_CALLS


def _is_error(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _to_text(node.func).endswith(("Error", "Exception"))


def _is_constant(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _to_text(node: ast.AST) -> str:
    """Return one line of source: the head of a compound statement, the name of a definition."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return f"def {node.name}"
    if isinstance(node, ast.Pass):
        return "nothing"
    if isinstance(node, ast.If) and _is_constant(node.test, False):  # noqa: FBT003 - the constant that is looked for
        return "nothing"
    if hasattr(getattr(node, "value", None), "reads"):
        return "its value is None"
    return ast.unparse(node).partition("\n")[0].rstrip(":")
