"""Operators: every small change of a source file that some test ought to notice."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Expressions whose value somebody else supplies.
ASKED = (ast.Call, ast.Yield, ast.YieldFrom, ast.Await)
#: The boundary moves by one; whether the comparison is made at all is asked of the condition around it.
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
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
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
#: Calls that speak to people; what they say is not behaviour.
SPOKEN = {"log", "logger", "logging", "warnings"}
TEXTS = {"description", "title", "doc", "help"}


@dataclass(eq=False)
class Mutant:
    """One change: the place in the tree, what comes there, and the lines whose tests are asked."""

    path: Path
    function: str
    change: str
    line: int
    lines: range
    place: tuple[ast.AST, str, int | None]
    new: ast.AST
    tree: ast.Module
    #: Inside a function's body, so that giving live functions other code is all it takes.
    inside: bool
    #: Listed as equivalent.
    known: bool = False

    def code(self) -> CodeType:
        """The changed module. The tree stays changed: this is called in a process that has no other use for it."""
        node, field, index = self.place
        if index is None:
            setattr(node, field, self.new)
        else:
            getattr(node, field)[index] = self.new
        return compile(ast.fix_missing_locations(self.tree), str(self.path), "exec", dont_inherit=True)


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of one file; mutants that read the same are told apart by a number."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = list(_Walk(path, tree).module())
    seen: Counter[tuple[str, str]] = Counter()
    for mutant in found:
        seen[mutant.function, mutant.change] += 1
        if (times := seen[mutant.function, mutant.change]) > 1:
            mutant.change += f" #{times}"
    return found


class _Walk:
    """Goes through one file and remembers where it is."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path = path
        self.tree = tree
        self.names: list[str] = []
        self.inside = 0
        self.statement: ast.stmt = ast.Pass(lineno=1, end_lineno=1)

    def module(self) -> Iterator[Mutant]:
        yield from self.block(self.tree, "body")

    def block(self, owner: ast.AST, field: str) -> Iterator[Mutant]:
        for index, node in enumerate(getattr(owner, field)):
            if not _skipped(node):
                outer, self.statement = self.statement, node
                yield from self.one_statement(node, (owner, field, index))
                self.statement = outer

    def one_statement(self, node: ast.stmt, place: tuple[ast.AST, str, int | None]) -> Iterator[Mutant]:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from self.definition(node)
            return
        for new in _instead_of_statement(node, inside=bool(self.inside), initial="__init__" in self.names):
            yield self.mutant(place, node, new)
        for field in ("test", "value", "iter", "msg", "exc", "items", "subject", "targets", "target"):
            if getattr(node, field, None) is not None and not (isinstance(node, ast.Expr) and _spoken(node.value)):
                yield from self.expressions(node, field)
        for field in ("body", "orelse", "finalbody"):
            yield from self.block(node, field) if hasattr(node, field) else ()
        for handler in getattr(node, "handlers", ()):
            if handler.type is not None:
                nothing = ast.Tuple(elts=[], ctx=ast.Load())
                yield self.mutant((handler, "type", None), handler.type, nothing, near=f"except {_text(handler.type)}")
            yield from self.block(handler, "body")
        for case in getattr(node, "cases", ()):
            yield from self.block(case, "body")

    def definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[Mutant]:
        self.names.append(node.name)
        if isinstance(node, FUNCTIONS):
            for field in ("defaults", "kw_defaults"):
                yield from self.expressions(node.args, field)
            self.names.append("<locals>")
            self.inside += 1
        yield from self.block(node, "body")
        if isinstance(node, FUNCTIONS):
            self.inside -= 1
            self.names.pop()
        self.names.pop()

    def expressions(self, owner: ast.AST, field: str, *, quiet: bool = False) -> Iterator[Mutant]:
        """The mutants of every expression in *field*; in *quiet* places text means nothing."""
        value = getattr(owner, field)
        entries = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for index, node in entries:
            if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr):
                continue
            for new in _instead_of(node, owner, field, inside=bool(self.inside), quiet=quiet):
                yield self.mutant((owner, field, index), node, new)
            told = quiet or _spoken(node) or isinstance(self.statement, ast.Raise)
            told = told or (isinstance(node, ast.keyword) and node.arg in TEXTS) or _error(node)
            for name, inner in ast.iter_fields(node):
                if name not in ("annotation", "returns", "ctx", "func") and isinstance(inner, ast.AST | list):
                    yield from self.expressions(node, name, quiet=told)
                elif name == "func" and isinstance(inner, ast.Attribute):
                    yield from self.expressions(inner, "value", quiet=told)

    def mutant(
        self, place: tuple[ast.AST, str, int | None], old: ast.AST, new: ast.AST, *, near: str | None = None
    ) -> Mutant:
        first = self.statement
        ast.fix_missing_locations(ast.copy_location(new, old))
        body = getattr(first, "body", None)
        last = body[0].lineno - 1 if isinstance(body, list) and body else first.end_lineno
        lines = range(old.lineno, old.end_lineno + 1) if near else range(first.lineno, max(first.lineno, last or 0) + 1)
        before = near or _text(first)
        change = f"{before}: {_text(old)} -> {_text(new)}" if before != _text(old) else f"{before} -> {_text(new)}"
        name = ".".join(self.names).removesuffix(".<locals>") or "<module>"
        return Mutant(self.path, name, change, old.lineno, lines, place, new, self.tree, inside=bool(self.inside))


def _skipped(node: ast.stmt) -> bool:
    """Whether nothing in a statement is behaviour: types, texts, representations, names for readers."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Global() | ast.Nonlocal():
            skipped = True
        case ast.Expr(value=ast.Constant()) | ast.AnnAssign(value=None):
            skipped = True
        case ast.If(test=test):
            skipped = _text(test).endswith("TYPE_CHECKING")
        case ast.ClassDef(bases=bases):
            skipped = any(_text(base).startswith("Protocol") for base in bases)
        case ast.FunctionDef(name=name, decorator_list=marks) | ast.AsyncFunctionDef(name=name, decorator_list=marks):
            skipped = name == "__repr__" or any("abstractmethod" in _text(mark) for mark in marks)
        case ast.Assign(targets=targets):
            skipped = any(_text(target) in {"__slots__", "__all__", "__match_args__"} for target in targets)
        case _:
            skipped = False
    return skipped


def _instead_of_statement(node: ast.stmt, *, inside: bool, initial: bool) -> Iterator[ast.AST]:
    """What may stand where the whole statement stands."""
    if not inside:
        return
    if isinstance(node, ast.Expr) and not _spoken(node.value) and not isinstance(node.value, ast.Yield):
        yield _gone(node)
    elif isinstance(node, ast.Raise | ast.AugAssign | ast.Delete):
        yield ast.Pass()
    elif isinstance(node, ast.Break):
        yield ast.Continue()
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, ast.Return) and node.value is None:
        yield ast.Pass()
    elif isinstance(node, ast.Return) and not _is(node.value, None):
        yield ast.Return(value=_dropped(node.value))
    if isinstance(node, ast.AugAssign) and type(node.op) in COMPUTED:
        yield ast.AugAssign(target=node.target, op=COMPUTED[type(node.op)](), value=node.value)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        yield from _instead_of_assignment(node, initial=initial)


def _instead_of_assignment(node: ast.Assign | ast.AnnAssign, *, initial: bool) -> Iterator[ast.AST]:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    if node.value is None:
        return
    if isinstance(target, ast.Attribute | ast.Subscript) and not initial:
        yield ast.Pass()
    elif not _is(node.value, None) and not isinstance(target, ast.Tuple) and (initial or isinstance(node.value, ASKED)):
        yield ast.Assign(targets=[target], value=_dropped(node.value))


def _instead_of(node: ast.AST, owner: ast.AST, field: str, *, inside: bool, quiet: bool) -> Iterator[ast.AST]:
    """What may stand where one expression stands."""
    condition = field == "test" or (field == "ifs" and isinstance(owner, ast.comprehension))
    if condition and isinstance(node, ast.Constant):
        return  # `while True` is a form, not a condition
    # A loop that goes on for ever is what a time limit finds, and it finds it slowly.
    answers = (False,) if isinstance(owner, ast.While) else (True, False)
    yield from (ast.Constant(value=answer) for answer in answers if condition)
    match node:
        case ast.Compare(ops=[op, *others]) if not condition or isinstance(op, ORDER):
            yield ast.Compare(left=node.left, ops=[COMPARED[type(op)](), *others], comparators=node.comparators)
        case ast.BoolOp(op=op):
            yield ast.BoolOp(op=ast.Or() if isinstance(op, ast.And) else ast.And(), values=node.values)
        case ast.UnaryOp(op=op) if isinstance(op, ast.USub) or not condition:
            yield node.operand
        case ast.BinOp(op=op) if type(op) in COMPUTED:
            yield ast.BinOp(left=node.left, op=COMPUTED[type(op)](), right=node.right)
        case ast.BinOp(op=ast.BitOr()) if inside:
            yield node.left
            yield node.right
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED:
            swapped = ast.Name(id=SWAPPED[name], ctx=ast.Load())
            yield ast.Call(func=swapped, args=node.args, keywords=node.keywords)
        case ast.Constant(value=value):
            yield from _instead_of_constant(value, quiet=quiet)


def _instead_of_constant(value: object, *, quiet: bool) -> Iterator[ast.AST]:
    if isinstance(value, bool):
        yield ast.Constant(value=not value)
    elif isinstance(value, int | float):
        yield ast.Constant(value=value + 1)
    elif isinstance(value, str) and not quiet:
        yield ast.Constant(value="XX" + value)


def _dropped(value: ast.expr) -> ast.expr:
    """None instead of *value*, which is still computed: a script that stops being one would be found by anything."""
    if not any(isinstance(node, ASKED) for node in ast.walk(value)):
        return ast.Constant(value=None)
    pair = ast.Tuple(elts=[value, ast.Constant(value=None)], ctx=ast.Load())
    dropped = ast.Subscript(value=pair, slice=ast.Constant(value=1), ctx=ast.Load())
    dropped.reads = "None"  # what a reader is shown
    return dropped


def _gone(node: ast.Expr) -> ast.stmt:
    """Nothing instead of *node*, in a function that stays a generator if it was one."""
    if not isinstance(node.value, ast.YieldFrom):
        return ast.Pass()
    never = ast.Expr(value=copy.deepcopy(node.value))
    return ast.If(test=ast.Constant(value=False), body=[ast.Pass(), never], orelse=[])


def _spoken(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    root = node.func
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(root, ast.Name) and root.id.strip("_").lower() in SPOKEN


def _error(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _text(node.func).endswith(("Error", "Exception"))


def _is(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _text(node: ast.AST) -> str:
    """One line of source: of a compound statement its head, of a definition its name."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return f"def {node.name}"
    if isinstance(node, ast.Pass):
        return "nothing"
    if isinstance(node, ast.If) and _is(node.test, False):  # noqa: FBT003 - the constant that is looked for
        return "nothing"
    if hasattr(getattr(node, "value", None), "reads"):
        return "its value is None"
    return ast.unparse(node).partition("\n")[0].rstrip(":")
