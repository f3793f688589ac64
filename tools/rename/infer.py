"""A little inference for code without annotations: fixtures, helpers without return types, locals."""
from __future__ import annotations

import ast
from collections import defaultdict

from mypy import nodes, types
from mypy.types import get_proper_type

SEQ = {
    "builtins.list", "builtins.tuple", "builtins.set", "builtins.frozenset", "typing.Sequence", "typing.Iterator",
    "typing.Iterable", "typing.AsyncIterator", "typing.AsyncIterable", "collections.deque", "typing.Collection",
    "typing.MutableSequence", "typing.AbstractSet", "typing.Generator", "typing.AsyncGenerator", "builtins.enumerate",
    "builtins.reversed", "typing.Reversible", "builtins.filter",
}
MAP = {"builtins.dict", "typing.Mapping", "typing.MutableMapping", "collections.defaultdict", "collections.OrderedDict"}


class Infer:
    def __init__(self, mods, refs, tables, infos, info_at, own_names, func_at, path_by_module, fixture_of):
        self.__dict__.update(locals())
        self.binding_at = {}
        self.parents = {}
        self.stores = defaultdict(list)  # binding -> [(path, Name node)]
        self.calls = defaultdict(list)  # def binding -> [(path, Call, scope, class scope)]
        self.self_stores = defaultdict(list)  # (info fullname, attr) -> [(path, node)]
        self.scope_at = {}
        self.memo = {}
        self.defs_by_node = {}
        for p, m in mods.items():
            up = {}
            for n in ast.walk(m.tree):
                for c in ast.iter_child_nodes(n):
                    up[c] = n
            self.parents[p] = up
            for u in m.uses:
                if isinstance(u.node, ast.Name):
                    self.binding_at[u.node] = u.binding
                    self.scope_at[u.node] = u.scope
                    if u.store and u.binding is not None:
                        self.stores[u.binding].append((p, u.node))
            for a in m.attrs:
                if a.kind == "attribute":
                    self.scope_at[a.node] = (a.scope, a.class_scope)
                    if (
                        isinstance(a.node.ctx, ast.Store)
                        and isinstance(a.value, ast.Name)
                        and a.value.id == "self"
                        and a.class_scope is not None
                    ):
                        info = info_at.get((p, a.class_scope.node.lineno, a.class_scope.name))
                        if info is not None:
                            self.self_stores[info.fullname, a.name].append((p, a.node))
        for p, m in mods.items():
            for n in ast.walk(m.tree):
                if isinstance(n, ast.Call) and isinstance(n.func, ast.Name):
                    b = self.binding_at.get(n.func)
                    at = self.origin_of(p, b)
                    if at is not None and at[1].kind == "def":
                        self.calls[at[1]].append((p, n))

    def origin_of(self, p, b, depth=0):
        while b is not None and b.kind == "import" and depth < 12:
            module, name = b.target
            if name is None:
                return None
            q = self.path_by_module.get(module)
            if q is None:
                return None
            p, b = q, self.mods[q].root.bindings.get(name)
            depth += 1
        return None if b is None else (p, b)

    def class_scope(self, p, node):
        up = self.parents[p]
        while node is not None and not isinstance(node, ast.ClassDef):
            node = up.get(node)
        return None if node is None else self.mods[p].scope_of.get(node)

    # -- things: mypy types, ("func", path, scope), ("class", info), ("iter", things), ("cm", things)
    def infer(self, p, node, depth=0):
        if depth > 14 or not hasattr(node, "lineno"):
            return []
        key = (p, id(node))
        if key in self.memo:
            return self.memo[key]
        self.memo[key] = []
        out = self._infer(p, node, depth)
        self.memo[key] = out
        return out

    def known(self, p, node):
        key = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        ref = self.refs.get(p, {}).get(key)
        out = []
        if isinstance(ref, nodes.TypeInfo):
            return [("class", ref)]
        for t in self.tables.get(p, {}).get(key, []):
            t = get_proper_type(t)
            if isinstance(t, (types.AnyType, types.NoneType, types.UninhabitedType)):
                continue
            out.append(t)
        return out

    def useful(self, t):
        """A type that says what an attribute belongs to."""
        t = get_proper_type(t)
        if isinstance(t, types.CallableType):
            return t.is_type_obj() or not isinstance(get_proper_type(t.ret_type), types.AnyType)
        if isinstance(t, types.Instance) and (t.type.fullname in SEQ or t.type.fullname in MAP):
            return not any(isinstance(get_proper_type(a), types.AnyType) for a in t.args)
        if isinstance(t, types.Instance) and t.type.fullname == "builtins.object":
            return False
        if isinstance(t, types.TupleType):
            return not any(isinstance(get_proper_type(a), types.AnyType) for a in t.items)
        return not isinstance(t, types.AnyType)

    def _infer(self, p, node, depth):
        got = self.known(p, node)
        if got and all(isinstance(t, tuple) or self.useful(t) for t in got):
            return got
        more = self.by_shape(p, node, depth)
        return more or got

    def by_shape(self, p, node, depth):
        d = depth + 1
        if isinstance(node, ast.Name):
            return self.name(p, node, d)
        if isinstance(node, ast.Await):
            return self.infer(p, node.value, d)
        if isinstance(node, ast.NamedExpr):
            return self.infer(p, node.value, d)
        if isinstance(node, ast.IfExp):
            return self.infer(p, node.body, d) + self.infer(p, node.orelse, d)
        if isinstance(node, ast.BoolOp):
            return [x for v in node.values for x in self.infer(p, v, d)]
        if isinstance(node, ast.Attribute):
            return self.attribute(p, node, d)
        if isinstance(node, ast.Call):
            return self.call(p, node, d)
        if isinstance(node, ast.Subscript):
            return self.item(self.infer(p, node.value, d), node.slice)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [("iter", [x for e in node.elts[:4] for x in self.infer(p, e, d)])]
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
            return [("iter", self.infer(p, node.elt, d))]
        if isinstance(node, ast.Dict):
            return [("map", [x for e in node.values[:4] for x in self.infer(p, e, d)])]
        if isinstance(node, ast.DictComp):
            return [("map", self.infer(p, node.value, d))]
        return []

    def name(self, p, node, d):
        b = self.binding_at.get(node)
        if b is None:
            return []
        return self.binding(p, b, d)

    def binding(self, p, b, d):
        if d > 14:
            return []
        key = ("b", id(b))
        if key in self.memo:
            return self.memo[key]
        self.memo[key] = []
        out = self._binding(p, b, d)
        self.memo[key] = out
        return out

    def _binding(self, p, b, d):
        at = self.origin_of(p, b)
        if at is None:
            return []
        p, b = at
        if b.kind == "def":
            s = self.mods[p].scope_of.get(b.node)
            return [("func", p, s)] if s is not None else []
        if b.kind == "class":
            info = self.info_at.get((p, b.node.lineno, b.name))
            return [("class", info)] if info is not None else []
        if b.kind == "param":
            return self.param(p, b, d)
        out = []
        for q, n in self.stores.get(b, ())[:6]:
            out += self.stored(q, n, d)
        return out

    def param(self, p, b, d):
        scope = b.scope
        if scope.kind != "function":
            return []
        if b.name in ("self", "cls") and scope.parent.kind == "class":
            info = self.info_at.get((p, scope.parent.node.lineno, scope.parent.name))
            return [("inst", info)] if info is not None else []
        fixture = self.fixture_of(p, scope, b.name)
        if fixture is not None:
            q, fb = fixture
            s = self.mods[q].scope_of.get(fb.node)
            return self.values(q, s, d) if s is not None else []
        fn = scope.node
        if fn.name.startswith("test"):
            return self.parametrized(p, fn, b.name, d)
        # from the calls
        names = [a.arg for a in [*fn.args.posonlyargs, *fn.args.args]]
        outer = scope.parent
        defb = outer.bindings.get(scope.name) if outer.kind != "class" else None
        out = []
        if defb is not None:
            for q, call in self.calls.get(defb, ())[:5]:
                for k in call.keywords:
                    if k.arg == b.name:
                        out += self.infer(q, k.value, d)
                if b.name in names:
                    i = names.index(b.name)
                    if i < len(call.args) and not any(isinstance(x, ast.Starred) for x in call.args[: i + 1]):
                        out += self.infer(q, call.args[i], d)
        return out

    def parametrized(self, p, fn, name, d):
        for deco in fn.decorator_list:
            if isinstance(deco, ast.Call) and getattr(deco.func, "attr", "") == "parametrize" and len(deco.args) > 1:
                first = deco.args[0]
                if isinstance(first, ast.Constant):
                    names = [x.strip() for x in first.value.split(",")]
                elif isinstance(first, (ast.Tuple, ast.List)):
                    names = [e.value for e in first.elts if isinstance(e, ast.Constant)]
                else:
                    continue
                if name not in names:
                    continue
                out = []
                if isinstance(deco.args[1], (ast.List, ast.Tuple)):
                    for e in deco.args[1].elts[:3]:
                        if len(names) == 1:
                            out += self.infer(p, e, d)
                        elif isinstance(e, ast.Tuple):
                            out += self.infer(p, e.elts[names.index(name)], d)
                elif len(names) == 1:
                    out += self.elements(self.infer(p, deco.args[1], d))
                return out
        return []

    def stored(self, p, n, d):
        up = self.parents[p]
        path = []
        node = n
        parent = up.get(node)
        while isinstance(parent, (ast.Tuple, ast.List, ast.Starred)):
            path.append((parent, node))
            node, parent = parent, up.get(parent)
        if isinstance(parent, ast.Assign) and node in parent.targets:
            things = self.infer(p, parent.value, d)
            if path and isinstance(parent.value, (ast.Tuple, ast.List)) and len(path) == 1:
                outer, inner = path[0]
                i = outer.elts.index(inner)
                if i < len(parent.value.elts) and len(parent.value.elts) == len(outer.elts):
                    return self.infer(p, parent.value.elts[i], d)
        elif isinstance(parent, (ast.For, ast.AsyncFor)) and node is parent.target:
            things = self.elements(self.infer(p, parent.iter, d))
        elif isinstance(parent, ast.comprehension) and node is parent.target:
            things = self.elements(self.infer(p, parent.iter, d))
        elif isinstance(parent, ast.withitem) and node is parent.optional_vars:
            things = self.entered(p, parent.context_expr, d)
        elif isinstance(parent, ast.NamedExpr):
            things = self.infer(p, parent.value, d)
        else:
            return []
        for outer, inner in reversed(path):
            if isinstance(inner, ast.Starred) or isinstance(outer, ast.Starred):
                continue
            i = outer.elts.index(inner) if inner in outer.elts else 0
            things = self.position(things, i)
        return things

    def entered(self, p, expr, d):
        out = []
        for t in self.infer(p, expr, d):
            if isinstance(t, tuple):
                if t[0] == "cm":
                    out += t[1]
                elif t[0] in ("inst",):
                    out += self.method_result(t[1], "__enter__", d) or self.method_result(t[1], "__aenter__", d) or [t]
                continue
            t = get_proper_type(t)
            if isinstance(t, types.Instance):
                if "ContextManager" in t.type.name and t.args:
                    out.append(t.args[0])
                else:
                    got = self.method_result(t.type, "__enter__", d) or self.method_result(t.type, "__aenter__", d)
                    out += got or [t]
        return out

    def method_result(self, info, name, d):
        for base in info.mro:
            sym = base.names.get(name)
            if sym is not None:
                return self.result_of_node(base, sym.node, d)
        return []

    def func_of_node(self, base, node):
        if isinstance(node, nodes.Decorator):
            node = node.func
        if isinstance(node, nodes.OverloadedFuncDef):
            return self.func_of_node(base, node.impl or node.items[0])
        if not isinstance(node, nodes.FuncDef):
            return None
        for (p, line, n), info in self.info_at.items() if False else self.positions(base):
            s = self.func_at.get((p, node.line, node.name))
            if s is not None:
                return ("func", p, s)
        return None

    def positions(self, base):
        if not hasattr(self, "_pos"):
            self._pos = defaultdict(list)
            for k, info in self.info_at.items():
                self._pos[info.fullname].append((k, info))
        return self._pos.get(base.fullname, ())

    def result_of_node(self, base, node, d):
        t = getattr(node, "type", None)
        if isinstance(node, nodes.Decorator):
            t = node.var.type if node.var.type is not None else node.func.type
        t = get_proper_type(t) if t is not None else None
        if isinstance(t, types.CallableType):
            r = get_proper_type(t.ret_type)
            if isinstance(r, types.Instance) and r.type.fullname == "typing.Coroutine":
                r = get_proper_type(r.args[2])
            if not isinstance(r, types.AnyType):
                if isinstance(r, types.TypeVarType) and r.name in ("Self", "_Self"):
                    return [("inst", base)]
                return [r]
        f = self.func_of_node(base, node)
        return self.values(f[1], f[2], d) if f is not None else []

    def values(self, p, scope, d):
        """What a call of this function gives; a fixture's yield counts as its value."""
        key = ("v", id(scope))
        if key in self.memo:
            return self.memo[key]
        self.memo[key] = []
        rets, yields = [], []
        stack = list(scope.node.body)
        while stack:
            n = stack.pop()
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
                continue
            if isinstance(n, ast.Return) and n.value is not None:
                rets.append(n.value)
            if isinstance(n, ast.Yield) and n.value is not None:
                yields.append(n.value)
            stack.extend(ast.iter_child_nodes(n))
        decos = [ast.unparse(x) for x in scope.node.decorator_list]
        if yields:
            things = [x for y in yields[:4] for x in self.infer(p, y, d + 1)]
            if any("fixture" in x for x in decos):
                out = things
            elif any("contextmanager" in x for x in decos):
                out = [("cm", things)]
            else:
                out = [("iter", things)]
        else:
            out = [x for r in rets[:4] for x in self.infer(p, r, d + 1)]
        self.memo[key] = out
        return out

    def call(self, p, node, d):
        out = []
        f = node.func
        if isinstance(f, ast.Name):
            if f.id in ("list", "sorted", "tuple", "set", "reversed", "iter") and node.args:
                return [("iter", self.elements(self.infer(p, node.args[0], d)))]
            if f.id == "next" and node.args:
                return self.elements(self.infer(p, node.args[0], d))
            if f.id in ("max", "min") and len(node.args) == 1:
                return self.elements(self.infer(p, node.args[0], d))
            if f.id == "enumerate" and node.args:
                return [("iter", [("tup", [[], self.elements(self.infer(p, node.args[0], d))])])]
            if f.id == "zip":
                return [("iter", [("tup", [self.elements(self.infer(p, a, d)) for a in node.args])])]
        if isinstance(f, ast.Attribute) and f.attr in ("result", "to_thread", "run", "enter_context", "enter_async_context", "run_until_complete", "wait_for"):
            # futures and helpers of asyncio give what they were given
            if f.attr in ("enter_context", "enter_async_context") and node.args:
                return self.entered(p, node.args[0], d)
            if f.attr in ("run", "run_until_complete", "wait_for") and node.args and isinstance(f.value, ast.Name) and f.value.id in ("asyncio", "runner", "loop"):
                return self.infer(p, node.args[0], d)
            if f.attr == "to_thread" and node.args:
                return self.call_things(self.infer(p, node.args[0], d), d)
        if isinstance(f, ast.Attribute) and f.attr in ("pop", "popleft", "get", "popitem", "copy", "values", "items"):
            base = self.infer(p, f.value, d)
            if f.attr in ("values",):
                return [("iter", self.item(base, None, mapped=True))]
            if f.attr == "items":
                return [("iter", [("tup", [[], self.item(base, None, mapped=True)])])]
            if f.attr == "get" and any(isinstance(t, tuple) and t[0] == "map" for t in base):
                return self.item(base, None)
            if f.attr in ("pop", "popleft") and any(isinstance(t, tuple) and t[0] in ("iter", "map") for t in base):
                return self.item(base, None)
        return self.call_things(self.infer(p, f, d), d)

    def call_things(self, things, d):
        out = []
        for t in things:
            if isinstance(t, tuple):
                if t[0] == "class":
                    out.append(("inst", t[1]))
                elif t[0] == "func":
                    out += self.values(t[1], t[2], d)
                elif t[0] == "inst":
                    out += self.method_result(t[1], "__call__", d)
                continue
            t = get_proper_type(t)
            if isinstance(t, types.Overloaded):
                t = t.items[0]
            if isinstance(t, types.CallableType):
                r = get_proper_type(t.ret_type)
                if isinstance(r, types.Instance) and r.type.fullname == "typing.Coroutine":
                    r = get_proper_type(r.args[2])
                if not isinstance(r, types.AnyType):
                    out.append(r)
                elif isinstance(t.definition, (nodes.FuncDef, nodes.Decorator)):
                    n = t.definition.func if isinstance(t.definition, nodes.Decorator) else t.definition
                    full = (n.fullname or "").split(".")
                    for i in range(len(full), 0, -1):
                        q = self.path_by_module.get(".".join(full[:i]))
                        if q is not None:
                            s = self.func_at.get((q, n.line, n.name))
                            if s is not None:
                                out += self.values(q, s, d)
                            break
            elif isinstance(t, types.TypeType):
                out.append(t.item)
            elif isinstance(t, types.Instance):
                out += self.method_result(t.type, "__call__", d)
        return out

    def infos_of(self, things):
        out = []
        for t in things:
            if isinstance(t, tuple):
                if t[0] in ("inst", "class"):
                    out.append(t[1])
                continue
            out += self.type_infos(t)
        return out

    def type_infos(self, t, depth=0):
        t = get_proper_type(t)
        if depth > 6:
            return []
        if isinstance(t, types.Instance):
            return [t.type]
        if isinstance(t, types.UnionType):
            return [i for x in t.items for i in self.type_infos(x, depth + 1)]
        if isinstance(t, types.TupleType):
            return self.type_infos(t.partial_fallback, depth + 1)
        if isinstance(t, types.TypeVarType):
            return self.type_infos(t.upper_bound, depth + 1)
        if isinstance(t, types.CallableType) and t.is_type_obj():
            return self.type_infos(t.ret_type, depth + 1)
        if isinstance(t, types.TypeType):
            return self.type_infos(t.item, depth + 1)
        return []

    def attribute(self, p, node, d):
        out = []
        name = node.attr
        if name == "__class__":
            return []
        key = (node.value.lineno, node.value.col_offset, node.value.end_lineno, node.value.end_col_offset)
        ref = self.refs.get(p, {}).get(key)
        if isinstance(ref, nodes.MypyFile):
            q = self.path_by_module.get(ref.fullname)
            if q is None:
                return []
            b = self.mods[q].root.bindings.get(name)
            return self.binding(q, b, d) if b is not None else []
        for info in self.infos_of(self.infer(p, node.value, d)):
            for base in info.mro:
                sym = base.names.get(name)
                if sym is None and name not in self.own_names.get(base.fullname, ()):
                    continue
                n = sym.node if sym is not None else None
                if isinstance(n, nodes.Decorator) and n.var.is_property:
                    out += self.result_of_node(base, n, d)
                elif isinstance(n, (nodes.FuncDef, nodes.Decorator, nodes.OverloadedFuncDef)):
                    t = n.var.type if isinstance(n, nodes.Decorator) else n.type
                    t = get_proper_type(t) if t is not None else None
                    if isinstance(t, types.CallableType) and not isinstance(get_proper_type(t.ret_type), types.AnyType):
                        out.append(t)
                    else:
                        f = self.func_of_node(base, n)
                        if f is not None:
                            out.append(f)
                else:
                    t = get_proper_type(n.type) if isinstance(n, nodes.Var) and n.type is not None else None
                    if t is not None and self.useful(t):
                        out.append(t)
                    else:
                        for q, store in self.self_stores.get((base.fullname, name), ())[:4]:
                            out += self.stored(q, store, d)
                break
        return out

    def elements(self, things):
        out = []
        for t in things:
            if isinstance(t, tuple):
                if t[0] == "iter":
                    out += t[1]
                elif t[0] == "tup":
                    out += [x for e in t[1] for x in e]
                continue
            t = get_proper_type(t)
            if isinstance(t, types.Instance) and t.args and (t.type.fullname in SEQ or t.type.fullname in MAP):
                out.append(t.args[0])
            elif isinstance(t, types.TupleType):
                out += t.items
            elif isinstance(t, types.UnionType):
                out += self.elements(t.items)
            elif isinstance(t, types.Instance):
                sub = [b for b in t.type.bases if b.type.fullname in SEQ and b.args]
                out += [b.args[0] for b in sub]
        return [t for t in out if isinstance(t, tuple) or not isinstance(get_proper_type(t), types.AnyType)]

    def position(self, things, i):
        out = []
        for t in things:
            if isinstance(t, tuple):
                if t[0] == "tup":
                    out += t[1][i] if i < len(t[1]) else []
                elif t[0] == "iter":
                    out += t[1]
                continue
            t = get_proper_type(t)
            if isinstance(t, types.TupleType):
                if i < len(t.items):
                    out.append(t.items[i])
            elif isinstance(t, types.Instance) and t.type.fullname in SEQ and t.args:
                out.append(t.args[0])
        return [t for t in out if isinstance(t, tuple) or not isinstance(get_proper_type(t), types.AnyType)]

    def item(self, things, index, mapped=False):
        out = []
        if isinstance(index, ast.Slice):
            return things
        for t in things:
            if isinstance(t, tuple):
                if t[0] in ("iter", "map"):
                    out += t[1]
                elif t[0] == "tup" and isinstance(index, ast.Constant) and isinstance(index.value, int):
                    out += t[1][index.value] if index.value < len(t[1]) else []
                continue
            t = get_proper_type(t)
            if isinstance(t, types.Instance) and t.type.fullname in MAP and len(t.args) > 1:
                out.append(t.args[1])
            elif isinstance(t, types.Instance) and t.type.fullname in SEQ and t.args:
                out.append(t.args[0])
            elif isinstance(t, types.TupleType):
                if isinstance(index, ast.Constant) and isinstance(index.value, int) and -len(t.items) <= index.value < len(t.items):
                    out.append(t.items[index.value])
                else:
                    out += t.items
        return [t for t in out if isinstance(t, tuple) or not isinstance(get_proper_type(t), types.AnyType)]
