"""Bindings and their uses in one module, by Python's scope rules.

`analyze(source)` returns a Module with scopes and occurrences. An occurrence is an identifier token that is bound to a
binding of a scope: (line, column in bytes, name). Attributes and keywords are kept apart, with the node they belong to.
"""
from __future__ import annotations

import ast
import builtins
import re
from dataclasses import dataclass, field

BUILTINS = set(dir(builtins))


@dataclass(eq=False)
class Binding:
    scope: "Scope"
    name: str
    kind: str  # local, param, def, class, import, global
    target: tuple[str, str | None] | None = None  # import: (module, name or None for a module)
    alias: bool = False
    sites: list = field(default_factory=list)  # tokens: (line, col, name)
    node: object = None

    @property
    def qualname(self) -> str:
        prefix = self.scope.qualname
        return f"{prefix}.{self.name}" if prefix else self.name


@dataclass(eq=False)
class Scope:
    kind: str  # module, class, function, lambda, comprehension
    name: str
    parent: "Scope | None"
    node: object
    bindings: dict[str, Binding] = field(default_factory=dict)
    globals: set = field(default_factory=set)
    nonlocals: set = field(default_factory=set)
    children: list = field(default_factory=list)

    @property
    def qualname(self) -> str:
        parts = []
        scope = self
        while scope is not None and scope.kind != "module":
            if scope.kind in ("class", "function"):
                parts.append(scope.name)
            scope = scope.parent
        return ".".join(reversed(parts))

    def bind(self, name, kind, **more) -> Binding:
        if name in self.globals:
            scope = self
            while scope.parent is not None:
                scope = scope.parent
            return scope.bind(name, kind, **more)
        if name in self.nonlocals:
            scope = self.parent
            while scope is not None and not (scope.kind in ("function", "lambda") and name in scope.bindings):
                scope = scope.parent
            if scope is not None:
                return scope.bindings[name]
        found = self.bindings.get(name)
        if found is None:
            found = self.bindings[name] = Binding(self, name, kind)
        elif found.kind == "local" and kind in ("def", "class", "import"):
            found.kind = kind
        for key, value in more.items():
            if value is not None and getattr(found, key) in (None, False):
                setattr(found, key, value)
        return found


@dataclass(eq=False)
class Use:
    name: str
    token: tuple[int, int]
    scope: Scope
    binding: Binding | None = None
    node: object = None
    store: bool = False


@dataclass(eq=False)
class Attr:
    """value.name: `value` is an ast node; kind: attribute, keyword, pattern, string."""

    name: str
    token: tuple[int, int]
    kind: str
    value: object
    scope: Scope
    class_scope: Scope | None
    node: object = None


class Module:
    def __init__(self, source: str, name: str = "", path: str = "") -> None:
        self.source = source
        self.lines = [line.encode() for line in source.splitlines(keepends=True)]
        self.tree = ast.parse(source)
        self.name = name
        self.path = path
        self.package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
        self.root = Scope("module", "", None, self.tree)
        self.scope_of = {self.tree: self.root}
        self.uses: list[Use] = []
        self.attrs: list[Attr] = []
        self.strings: list = []  # (Constant node, scope, class scope)
        _Binder(self).run()
        _Resolver(self).run()

    def find(self, line: int, col: int, pattern: str) -> tuple[int, int]:
        """Position of group 1 of the pattern, from (line, col) on."""
        regex = re.compile(pattern.encode())
        start = col
        for number in range(line, min(line + 60, len(self.lines)) + 1):
            hit = regex.search(self.lines[number - 1], start)
            if hit:
                return number, hit.start(1)
            start = 0
        raise LookupError(f"{self.path}:{line}: {pattern}")


class _Binder(ast.NodeVisitor):
    def __init__(self, module: Module) -> None:
        self.m = module
        self.scope = module.root

    def run(self) -> None:
        for node in self.m.tree.body:
            self.visit(node)

    def child(self, kind, name, node) -> Scope:
        scope = Scope(kind, name, self.scope, node)
        self.scope.children.append(scope)
        self.m.scope_of[node] = scope
        # global and nonlocal hold for the whole body
        if kind == "function":
            for inner in _own(node.body):
                if isinstance(inner, ast.Global):
                    scope.globals.update(inner.names)
                if isinstance(inner, ast.Nonlocal):
                    scope.nonlocals.update(inner.names)
        return scope

    def function(self, node) -> None:
        site = self.m.find(node.lineno, node.col_offset, rf"\bdef\s+({re.escape(node.name)})\b")
        b = self.scope.bind(node.name, "def", node=node)
        b.sites.append((*site, node.name))
        for d in node.decorator_list:
            self.visit(d)
        self.arguments_outer(node.args)
        if node.returns:
            self.visit(node.returns)
        outer = self.scope
        self.scope = self.child("function", node.name, node)
        self.params(node.args)
        for s in node.body:
            self.visit(s)
        self.scope = outer

    visit_FunctionDef = visit_AsyncFunctionDef = function

    def arguments_outer(self, args) -> None:
        for a in _all_args(args):
            if a.annotation:
                self.visit(a.annotation)
        for d in [*args.defaults, *[x for x in args.kw_defaults if x]]:
            self.visit(d)

    def params(self, args) -> None:
        for a in _all_args(args):
            b = self.scope.bind(a.arg, "param", node=a)
            b.sites.append((a.lineno, a.col_offset, a.arg))

    def visit_Lambda(self, node) -> None:
        self.arguments_outer(node.args)
        outer = self.scope
        self.scope = self.child("lambda", "", node)
        self.params(node.args)
        self.visit(node.body)
        self.scope = outer

    def visit_ClassDef(self, node) -> None:
        site = self.m.find(node.lineno, node.col_offset, rf"\bclass\s+({re.escape(node.name)})\b")
        b = self.scope.bind(node.name, "class", node=node)
        b.sites.append((*site, node.name))
        for x in [*node.decorator_list, *node.bases, *[k.value for k in node.keywords]]:
            self.visit(x)
        outer = self.scope
        self.scope = self.child("class", node.name, node)
        for s in node.body:
            self.visit(s)
        self.scope = outer

    def comprehension(self, node) -> None:
        self.visit(node.generators[0].iter)
        outer = self.scope
        self.scope = self.child("comprehension", "", node)
        for i, g in enumerate(node.generators):
            if i:
                self.visit(g.iter)
            self.visit(g.target)
            for c in g.ifs:
                self.visit(c)
        if isinstance(node, ast.DictComp):
            self.visit(node.key)
            self.visit(node.value)
        else:
            self.visit(node.elt)
        self.scope = outer

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = comprehension

    def visit_NamedExpr(self, node) -> None:
        scope = self.scope
        while scope.kind == "comprehension":
            scope = scope.parent
        scope.bind(node.target.id, "local", node=node)
        self.visit(node.value)

    def visit_Name(self, node) -> None:
        if isinstance(node.ctx, (ast.Store, ast.Del)):
            self.scope.bind(node.id, "local", node=node)

    def visit_ExceptHandler(self, node) -> None:
        if node.name:
            self.scope.bind(node.name, "local", node=node)
        self.generic_visit(node)

    def visit_MatchAs(self, node) -> None:
        if node.name:
            self.scope.bind(node.name, "local", node=node)
        self.generic_visit(node)

    def visit_MatchStar(self, node) -> None:
        if node.name:
            self.scope.bind(node.name, "local", node=node)

    def visit_MatchMapping(self, node) -> None:
        if node.rest:
            self.scope.bind(node.rest, "local", node=node)
        self.generic_visit(node)

    def visit_Import(self, node) -> None:
        for a in node.names:
            if a.asname:
                self.scope.bind(a.asname, "import", target=(a.name, None), alias=True)
            else:
                top = a.name.split(".")[0]
                self.scope.bind(top, "import", target=(top, None))

    def visit_ImportFrom(self, node) -> None:
        module = absolute(self.m, node)
        for a in node.names:
            self.scope.bind(a.asname or a.name, "import", target=(module, a.name), alias=bool(a.asname))


def absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _own(body):
    """Statements of a function, not those of the functions inside."""
    stack = list(body)
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        stack.extend(ast.iter_child_nodes(node))


def _all_args(args):
    out = [*args.posonlyargs, *args.args]
    if args.vararg:
        out.append(args.vararg)
    out += args.kwonlyargs
    if args.kwarg:
        out.append(args.kwarg)
    return out


class _Resolver(ast.NodeVisitor):
    def __init__(self, module: Module) -> None:
        self.m = module
        self.scope = module.root
        self.annotation = False

    def run(self) -> None:
        for node in self.m.tree.body:
            self.visit(node)

    def lookup(self, name: str, scope: Scope | None = None) -> Binding | None:
        scope = scope or self.scope
        first = True
        while scope is not None:
            if name in scope.globals:
                return self.m.root.bindings.get(name)
            if (first or scope.kind != "class") and name in scope.bindings and name not in scope.nonlocals:
                return scope.bindings[name]
            if scope.kind != "comprehension":
                first = False
            scope = scope.parent
        return None

    def use(self, name, line, col, node, store=False, binding=None) -> None:
        b = binding or self.lookup(name)
        u = Use(name, (line, col), self.scope, b, node, store)
        self.m.uses.append(u)

    def class_scope(self) -> Scope | None:
        scope = self.scope
        while scope is not None and scope.kind != "class":
            scope = scope.parent
        return scope

    def function(self, node) -> None:
        line, col = self.m.find(node.lineno, node.col_offset, rf"\bdef\s+({re.escape(node.name)})\b")
        self.use(node.name, line, col, node, store=True)
        for d in node.decorator_list:
            self.visit(d)
        for a in _all_args(node.args):
            if a.annotation:
                self.visit_annotation(a.annotation)
        for d in [*node.args.defaults, *[x for x in node.args.kw_defaults if x]]:
            self.visit(d)
        if node.returns:
            self.visit_annotation(node.returns)
        outer = self.scope
        self.scope = self.m.scope_of[node]
        for a in _all_args(node.args):
            self.use(a.arg, a.lineno, a.col_offset, a, store=True)
        for s in node.body:
            self.visit(s)
        self.scope = outer

    visit_FunctionDef = visit_AsyncFunctionDef = function

    def visit_annotation(self, node) -> None:
        before, self.annotation = self.annotation, True
        self.visit(node)
        self.annotation = before

    def visit_AnnAssign(self, node) -> None:
        self.visit(node.target)
        self.visit_annotation(node.annotation)
        if node.value:
            alias = getattr(node.annotation, "id", getattr(node.annotation, "attr", "")) == "TypeAlias"
            (self.visit_annotation if alias else self.visit)(node.value)

    def visit_Lambda(self, node) -> None:
        for d in [*node.args.defaults, *[x for x in node.args.kw_defaults if x]]:
            self.visit(d)
        outer = self.scope
        self.scope = self.m.scope_of[node]
        for a in _all_args(node.args):
            self.use(a.arg, a.lineno, a.col_offset, a, store=True)
        self.visit(node.body)
        self.scope = outer

    def visit_ClassDef(self, node) -> None:
        line, col = self.m.find(node.lineno, node.col_offset, rf"\bclass\s+({re.escape(node.name)})\b")
        self.use(node.name, line, col, node, store=True)
        for x in [*node.decorator_list, *node.bases]:
            before, self.annotation = self.annotation, isinstance(x, ast.Subscript)
            self.visit(x)
            self.annotation = before
        for k in node.keywords:
            self.visit(k.value)
        outer = self.scope
        self.scope = self.m.scope_of[node]
        for s in node.body:
            self.visit(s)
        self.scope = outer

    def comprehension(self, node) -> None:
        self.visit(node.generators[0].iter)
        outer = self.scope
        self.scope = self.m.scope_of[node]
        for i, g in enumerate(node.generators):
            if i:
                self.visit(g.iter)
            self.visit(g.target)
            for c in g.ifs:
                self.visit(c)
        if isinstance(node, ast.DictComp):
            self.visit(node.key)
            self.visit(node.value)
        else:
            self.visit(node.elt)
        self.scope = outer

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = comprehension

    def visit_Name(self, node) -> None:
        self.use(node.id, node.lineno, node.col_offset, node, store=not isinstance(node.ctx, ast.Load))

    def visit_ExceptHandler(self, node) -> None:
        if node.type:
            self.visit(node.type)
        if node.name:
            start = (node.type.end_lineno, node.type.end_col_offset)
            line, col = self.m.find(*start, rf"\bas\s+({re.escape(node.name)})\b")
            self.use(node.name, line, col, node, store=True)
        for s in node.body:
            self.visit(s)

    def names(self, node) -> None:
        line, col = node.lineno, node.col_offset
        for name in node.names:
            line, col = self.m.find(line, col, rf"\b({re.escape(name)})\b")
            self.use(name, line, col, node)
            col += len(name)

    visit_Global = visit_Nonlocal = names

    def visit_MatchAs(self, node) -> None:
        if node.pattern:
            self.visit(node.pattern)
        if node.name:
            if node.pattern:
                line, col = self.m.find(
                    node.pattern.end_lineno, node.pattern.end_col_offset, rf"\bas\s+({re.escape(node.name)})\b"
                )
            else:
                line, col = node.lineno, node.col_offset
            self.use(node.name, line, col, node, store=True)

    def visit_MatchStar(self, node) -> None:
        if node.name:
            line, col = self.m.find(node.lineno, node.col_offset, rf"\*\s*({re.escape(node.name)})\b")
            self.use(node.name, line, col, node, store=True)

    def visit_MatchMapping(self, node) -> None:
        self.generic_visit(node)
        if node.rest:
            line, col = self.m.find(node.lineno, node.col_offset, rf"\*\*\s*({re.escape(node.rest)})\b")
            self.use(node.rest, line, col, node, store=True)

    def visit_MatchClass(self, node) -> None:
        self.visit(node.cls)
        line, col = node.cls.end_lineno, node.cls.end_col_offset
        for p in node.patterns:
            self.visit(p)
        for name, p in zip(node.kwd_attrs, node.kwd_patterns, strict=True):
            # the keyword stands before its pattern
            hits = [h.start(1) for h in re.finditer(rf"\b({re.escape(name)})\s*=".encode(), self.m.lines[p.lineno - 1])
                    if h.start(1) < p.col_offset or p.lineno != p.lineno]
            hit = (p.lineno, hits[-1])
            self.m.attrs.append(Attr(name, hit, "pattern", node.cls, self.scope, self.class_scope(), node))
            self.visit(p)

    def visit_Import(self, node) -> None:
        for a in node.names:
            if a.asname:
                line, col = self.m.find(a.lineno, a.col_offset, rf"\bas\s+({re.escape(a.asname)})\b")
                self.use(a.asname, line, col, node, store=True)

    def visit_ImportFrom(self, node) -> None:
        module = absolute(self.m, node)
        for a in node.names:
            if a.asname:
                self.m.attrs.append(Attr(a.name, (a.lineno, a.col_offset), "import", module, self.scope, None, a))
                line, col = self.m.find(a.lineno, a.col_offset + len(a.name), rf"\bas\s+({re.escape(a.asname)})\b")
                self.use(a.asname, line, col, node, store=True)
            elif a.name != "*":
                self.use(a.name, a.lineno, a.col_offset, node, store=True)

    def visit_Attribute(self, node) -> None:
        self.visit(node.value)
        col = node.end_col_offset - len(node.attr.encode())
        self.m.attrs.append(
            Attr(node.attr, (node.end_lineno, col), "attribute", node.value, self.scope, self.class_scope(), node)
        )

    def visit_Call(self, node) -> None:
        self.visit(node.func)
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        for i, a in enumerate(node.args):
            typed = name in ("cast", "TypeVar") and i == 0 and name == "cast"
            if typed:
                self.visit_annotation(a)
            else:
                self.visit(a)
        for k in node.keywords:
            if k.arg:
                self.m.attrs.append(
                    Attr(k.arg, (k.lineno, k.col_offset), "keyword", node, self.scope, self.class_scope(), k)
                )
            if name == "TypeVar" and k.arg == "bound":
                self.visit_annotation(k.value)
            else:
                self.visit(k.value)

    def visit_Subscript(self, node) -> None:
        self.visit(node.value)
        base = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
        if base == "Literal":
            before, self.annotation = self.annotation, False
            self.visit(node.slice)
            self.annotation = before
        elif base == "Annotated" and isinstance(node.slice, ast.Tuple):
            self.visit(node.slice.elts[0])
            before, self.annotation = self.annotation, False
            for e in node.slice.elts[1:]:
                self.visit(e)
            self.annotation = before
        else:
            self.visit(node.slice)

    def visit_Constant(self, node) -> None:
        if isinstance(node.value, str):
            if self.annotation:
                self.quoted(node)
            else:
                self.m.strings.append((node, self.scope, self.class_scope()))

    def quoted(self, node) -> None:
        """An annotation in quotes: its names are uses."""
        try:
            inner = ast.parse(node.value.strip(), mode="eval")
        except SyntaxError:
            return
        text = self.m.lines[node.lineno - 1]
        at = text.find(node.value.encode(), node.col_offset)
        if at < 0:
            return
        for n in ast.walk(inner):
            if isinstance(n, ast.Name):
                self.use(n.id, node.lineno, at + n.col_offset, node)
            elif isinstance(n, ast.Attribute):
                col = at + n.end_col_offset - len(n.attr)
                self.m.attrs.append(
                    Attr(n.attr, (node.lineno, col), "quoted", n.value, self.scope, self.class_scope(), n)
                )
