"""Apply rows (path, qualified name, new simple name) to the tree at ROOT: rename.py ROOT rows... [--write]."""
from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter, defaultdict

from load import load, module_of
from mypy import nodes, types
from mypy.types import get_proper_type
from scopes import BUILTINS, Module

ROOT = sys.argv[1]
WRITE = "--write" in sys.argv
ROW_FILES = [a for a in sys.argv[2:] if not a.startswith("--")]
LOG = open("rename.log", "w")
counts = Counter()


def log(kind, *words):
    counts[kind] += 1
    print(kind, *words, sep="\t", file=LOG)


rows: dict[tuple[str, str], str] = {}
rank: dict[tuple[str, str], int] = {}
for number, name in enumerate(ROW_FILES):
    for line in open(name):
        cells = line.rstrip("\n").split("\t")
        if len(cells) < 3 or not cells[0].strip():
            continue
        path, old, new = (c.strip().strip("`") for c in cells[:3])
        new = new.split(".")[-1]
        if not new.isidentifier():
            log("BADROW", name, line.strip())
            continue
        if (path, old) in rows and rows[path, old] != new:
            log("ROWCLASH", path, old, rows[path, old], new)
        rows.setdefault((path, old), new)
        rank.setdefault((path, old), number)

paths, module_by_path, trees, tables, refs, class_defs, result, attempted = load(ROOT)
path_by_module = {m: p for p, m in module_by_path.items()}
sources = {p: open(f"{ROOT}/{p}").read() for p in paths}
mods = {p: Module(sources[p], module_by_path[p], p) for p in paths}

# ---- classes -------------------------------------------------------------------------------------------------------
info_at: dict[tuple[str, int, str], nodes.TypeInfo] = {}
infos: dict[str, nodes.TypeInfo] = {}
for p, defs in class_defs.items():
    for d in defs:
        if d.info is None:
            continue
        info_at[p, d.line, d.name] = d.info
        infos[d.info.fullname] = d.info


def info_of_scope(path, scope):
    return info_at.get((path, scope.node.lineno, scope.name))


parent: dict[tuple[str, str], tuple[str, str]] = {}


def find(x):
    parent.setdefault(x, x)
    while parent[x] != x:
        parent[x] = parent[parent[x]]
        x = parent[x]
    return x


def union(a, b):
    a, b = find(a), find(b)
    if a != b:
        parent[b] = a


external: dict[tuple[str, str], str] = {}
own_names: dict[str, set[str]] = {}
for full, info in infos.items():
    own_names[full] = set(info.names)
# names of the class body and self-attributes that mypy did not put into names
scope_infos = {}
for p, m in mods.items():
    for node, scope in m.scope_of.items():
        if scope.kind == "class":
            info = info_of_scope(p, scope)
            scope_infos[p, scope] = info
            if info is not None:
                own_names[info.fullname] |= set(scope.bindings)
    for a in m.attrs:
        if a.kind == "attribute" and isinstance(a.value, ast.Name) and a.value.id == "self" and a.class_scope:
            if isinstance(a.node.ctx, ast.Store):
                info = info_of_scope(p, a.class_scope)
                if info is not None and not any(
                    a.name in own_names.get(b.fullname, ()) for b in info.mro[1:]
                ):
                    own_names[info.fullname].add(a.name)


def owner(info, name):
    for base in info.mro:
        if name in own_names.get(base.fullname, ()) or (base.fullname not in own_names and name in base.names):
            return base
    return None


for full, info in infos.items():
    for base in info.mro[1:]:
        if base.fullname in ("builtins.object", "typing.Protocol", "typing.Generic"):
            continue
        if base.fullname in infos:
            pass
    # every name that occurs in the hierarchy of this class is one member
    owners = defaultdict(list)
    for base in info.mro:
        if base.fullname == "builtins.object":
            continue
        for n in own_names.get(base.fullname, base.names):
            owners[n].append(base)
    for n, bases in owners.items():
        for b in bases:
            if b.fullname not in infos:
                for c in bases:
                    if c.fullname in infos:
                        external.setdefault((c.fullname, n), b.fullname)
            else:
                for c in bases:
                    if c.fullname in infos:
                        union((b.fullname, n), (c.fullname, n))


def protocol_members(info):
    out = set()
    for base in info.mro:
        if base.is_protocol:
            out |= {n for n in base.names if n not in ("__slots__", "__init__", "__doc__", "__module__")}
    return out


for left, rights in attempted.items():
    li = infos.get(left)
    for right in rights:
        ri = infos.get(right)
        if ri is None:
            if li is not None:
                continue
            continue
        members = protocol_members(ri)
        if li is None:
            continue
        if all(owner(li, n) is not None for n in members):
            for n in members:
                lo, ro = owner(li, n), owner(ri, n)
                if lo.fullname in infos and ro.fullname in infos:
                    union((lo.fullname, n), (ro.fullname, n))
                elif ro.fullname in infos:
                    external.setdefault((ro.fullname, n), lo.fullname)

# ---- rows to definitions -------------------------------------------------------------------------------------------
by_qual: dict[tuple[str, str], list] = defaultdict(list)
for p, m in mods.items():
    stack = [m.root]
    while stack:
        s = stack.pop()
        stack.extend(s.children)
        for b in s.bindings.values():
            by_qual[p, b.qualname].append(b)
class_scopes: dict[tuple[str, str], list] = defaultdict(list)
for (p, scope), info in scope_infos.items():
    class_scopes[p, scope.qualname].append((scope, info))

binding_new: dict[object, str] = {}
member_rows: dict[tuple[str, str], tuple[int, str, tuple]] = {}  # group root -> (rank, new, row)
used_rows = Counter()


def add_member(full, name, new, key):
    root = find((full, name))
    have = member_rows.get(root)
    if have is None or rank[key] < have[0]:
        if have is not None and have[1] != new:
            log("CONFLICT", key, new, "over", have[2], have[1])
        member_rows[root] = (rank[key], new, key)
    elif have[1] != new:
        log("CONFLICT", have[2], have[1], "over", key, new)


for key, new in rows.items():
    p, old = key
    if p not in mods:
        log("NOFILE", p, old, new)
        continue
    hits = by_qual.get(key, [])
    name = old.split(".")[-1]
    if name == new:
        continue
    done = False
    for b in hits:
        if b.scope.kind == "class":
            info = info_of_scope(p, b.scope)
            if info is None:
                log("NOINFO", p, old)
                continue
            add_member(info.fullname, name, new, key)
            done = True
        else:
            binding_new[b] = new
            done = True
    if not done and "." in old:
        for scope, info in class_scopes.get((p, old.rpartition(".")[0]), []):
            if info is None:
                continue
            o = owner(info, name)
            if o is not None and o.fullname in infos:
                add_member(o.fullname, name, new, key)
                done = True
    if not done:
        log("NODEF", p, old, new)
    used_rows[key] += done

member_new = {}
for root, (_, new, key) in member_rows.items():
    group = [x for x in parent if find(x) == root]
    ext = [(x, external[x]) for x in group if x in external]
    if ext and not all(e[1].startswith(("typing.", "builtins.object")) for e in ext):
        log("EXTERNAL", key, new, ext[0])
        continue
    member_new[root] = new


def new_member(full, name):
    return member_new.get(find((full, name)))


groups_by_attr: dict[str, set] = defaultdict(set)
for full, names in own_names.items():
    if full in infos:
        for n in names:
            groups_by_attr[n].add(find((full, n)))

# collisions among members
for full, info in infos.items():
    seen = {}
    for base in info.mro:
        if base.fullname == "builtins.object":
            continue
        for n in own_names.get(base.fullname, base.names):
            new = (new_member(base.fullname, n) if base.fullname in infos else None) or n
            if seen.setdefault(new, n) != n:
                log("COLLIDE", full, seen[new], n, "both", new)

# ---- functions and parameters --------------------------------------------------------------------------------------
func_at: dict[tuple[str, int, str], object] = {}
for p, m in mods.items():
    for node, scope in m.scope_of.items():
        if scope.kind == "function":
            func_at[p, node.lineno, node.name] = scope
param_group: dict[tuple, str] = {}
for b, new in list(binding_new.items()):
    if b.kind == "param" and b.scope.kind == "function" and b.scope.parent.kind == "class":
        f = b.scope
        if f.name.startswith("__") and f.name != "__call__":
            continue
        for p in ():
            pass


def method_root(path, scope):
    if scope.kind == "function" and scope.parent.kind == "class":
        if scope.name.startswith("__") and scope.name != "__call__":
            return None
        info = info_of_scope(path, scope.parent)
        if info is not None:
            return find((info.fullname, scope.name))
    return None


path_of_binding = {}
for p, m in mods.items():
    for scope in [m.root, *m.scope_of.values()]:
        for b in scope.bindings.values():
            path_of_binding[b] = p
for b, new in list(binding_new.items()):
    if b.kind == "param":
        root = method_root(path_of_binding[b], b.scope)
        if root is not None:
            have = param_group.setdefault((root, b.name), new)
            if have != new:
                log("PARAMCONFLICT", path_of_binding[b], b.qualname, new, have)


def is_fixture(node):
    for d in getattr(node, "decorator_list", ()):
        f = d.func if isinstance(d, ast.Call) else d
        if "fixture" in (f.id if isinstance(f, ast.Name) else getattr(f, "attr", "")):
            return True
    return False


fixtures_in = {}
for p, m in mods.items():
    fixtures_in[p] = {
        b.name: b
        for b in m.root.bindings.values()
        if (b.kind == "def" and is_fixture(b.node)) or (b.kind == "import" and p.startswith("tests"))
    }


def fixture_of(path, scope, name):
    """The (path, binding) of the fixture that a parameter of a test or fixture asks for."""
    if not path.startswith("tests") or not (scope.name.startswith("test") or is_fixture(scope.node)):
        return None
    places = [path]
    folder = path.rpartition("/")[0]
    while folder:
        places.append(folder + "/conftest.py")
        folder = folder.rpartition("/")[0]
    for p in places:
        b = fixtures_in.get(p, {}).get(name)
        if b is None:
            continue
        if b.kind == "import":
            at = origin(*b.target) if b.target[1] else None
            if at is None or at[1].kind != "def" or not is_fixture(at[1].node):
                continue
            return at
        elif b.node is scope.node:
            continue
        return p, b
    return None


def fixture_new(path, scope, name):
    at = fixture_of(path, scope, name)
    return None if at is None else new_binding(*at) or name


def param_new(path, b):
    if b in binding_new:
        return binding_new[b]
    if b.scope.kind == "function":
        new = fixture_new(path, b.scope, b.name)
        if new is not None:
            if new != b.name and new in b.scope.bindings:
                log("FIXTURETAKEN", path, b.qualname, new)
            return new if new != b.name else None
    root = method_root(path, b.scope)
    if root is None:
        return None
    new = param_group.get((root, b.name))
    if new and new in b.scope.bindings:
        log("PARAMTAKEN", path, b.qualname, new)
        return None
    return new


# ---- resolution ----------------------------------------------------------------------------------------------------
def origin(module, name, depth=0):
    """The (path, binding) where `name` of `module` is defined, through imports."""
    p = path_by_module.get(module)
    if p is None or depth > 12:
        return None
    b = mods[p].root.bindings.get(name)
    if b is None:
        return None
    if b.kind == "import" and b.target[1] is not None:
        return origin(*b.target, depth + 1) or (p, b)
    return p, b


def new_global(module, name):
    """The new name of `name` as a binding of `module`."""
    p = path_by_module.get(module)
    if p is None:
        return None
    b = mods[p].root.bindings.get(name)
    return None if b is None else new_binding(p, b)


def new_binding(path, b):
    if b.scope.kind == "class":
        info = info_of_scope(path, b.scope)
        return None if info is None else new_member(info.fullname, b.name)
    if b.kind == "param":
        return param_new(path, b)
    if b in binding_new:
        return binding_new[b]
    if b.kind == "import" and not b.alias and b.target[1] is not None:
        return new_global(*b.target)
    return None


def key_of(node):
    return (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)


def infos_of_type(t, depth=0):
    """TypeInfos, modules behind a type; None stands for Any."""
    t = get_proper_type(t)
    if depth > 8:
        return []
    if isinstance(t, types.Instance):
        return [t.type]
    if isinstance(t, types.UnionType):
        return [i for x in t.items for i in infos_of_type(x, depth + 1)]
    if isinstance(t, types.TypeVarType):
        if t.values:
            return [i for x in t.values for i in infos_of_type(x, depth + 1)]
        return infos_of_type(t.upper_bound, depth + 1)
    if isinstance(t, types.TupleType):
        return infos_of_type(t.partial_fallback, depth + 1)
    if isinstance(t, types.LiteralType):
        return infos_of_type(t.fallback, depth + 1)
    if isinstance(t, types.TypedDictType):
        return [t.fallback.type]
    if isinstance(t, types.TypeType):
        return infos_of_type(t.item, depth + 1)
    if isinstance(t, types.CallableType):
        if t.is_type_obj():
            return infos_of_type(t.ret_type, depth + 1)
        return [t.fallback.type]
    if isinstance(t, types.Overloaded):
        return infos_of_type(t.items[0], depth + 1)
    if isinstance(t, types.AnyType):
        return [None]
    return []


def owners_of(path, value, scope, class_scope):
    """TypeInfos of an expression (ast), or ("module", name)."""
    if isinstance(value, ast.Name) and value.id in ("self", "cls") and class_scope is not None:
        info = info_of_scope(path, class_scope)
        if info is not None:
            return [info]
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super" and class_scope:
        info = info_of_scope(path, class_scope)
        if info is not None:
            return [("super", info)]
    if isinstance(value, ast.Name):
        s = scope
        while s is not None:
            b = s.bindings.get(value.id)
            if b is not None:
                if b.kind == "import":
                    full = ".".join(x for x in b.target if x)
                    if full in path_by_module and not (b.target[1] and origin(*b.target)):
                        return [("module", full)]
                break
            s = s.parent
    if not hasattr(value, "lineno"):
        return [None]
    key = key_of(value)
    node = refs.get(path, {}).get(key)
    if isinstance(node, nodes.MypyFile):
        return [("module", node.fullname)]
    if isinstance(node, nodes.TypeInfo):
        return [node]
    if isinstance(node, nodes.TypeAlias):
        got = infos_of_type(node.target)
        if got:
            return got
    out = []
    for t in tables.get(path, {}).get(key, []):
        out += infos_of_type(t)
    if not out and isinstance(node, nodes.Var) and node.type is not None:
        out = infos_of_type(node.type)
    real = [i for i in out if i is not None and i.fullname != "builtins.object"]
    if real and not (len(real) < len(out)):
        return real
    more = [i for i in inference.infos_of(inference.infer(path, value)) if i is not None]
    counts["inferred"] += bool(more)
    return real + more or [None]


def attr_new(path, value, name, scope, class_scope, where):
    """(new name or None, resolved?)"""
    answers = set()
    resolved = False
    for o in owners_of(path, value, scope, class_scope):
        if o is None:
            continue
        if isinstance(o, tuple):
            if o[0] == "module":
                resolved = True
                if o[1] in path_by_module:
                    answers.add(new_global(o[1], name) or name)
                else:
                    answers.add(name)
                continue
            mro = o[1].mro[1:]
        else:
            mro = o.mro
        for base in mro:
            if name in own_names.get(base.fullname, base.names):
                resolved = True
                answers.add((new_member(base.fullname, name) if base.fullname in infos else None) or name)
                break
    if not resolved:
        return None, False
    if len(answers) > 1:
        log("MIXED", where, name, sorted(answers))
    changed = sorted(a for a in answers if a != name)
    return (changed[0] if changed else None), True


from infer import Infer  # noqa: E402

inference = Infer(mods, refs, tables, infos, info_at, own_names, func_at, path_by_module, fixture_of)
edits: dict[str, dict[tuple[int, int], tuple[str, str]]] = defaultdict(dict)


def edit(path, token, old, new):
    if new is None or new == old:
        return
    have = edits[path].get(token)
    if have is not None and have != (old, new):
        log("TWICE", path, token, have, (old, new))
        return
    line = mods[path].lines[token[0] - 1]
    assert line[token[1] : token[1] + len(old.encode())] == old.encode(), (path, token, old)
    edits[path][token] = (old, new)


near_cache = {}


def near_groups(path, name):
    """Members of that name of classes that this file defines or imports."""
    if path not in near_cache:
        d = defaultdict(set)
        local = set()
        for k, info in info_at.items():
            if k[0] == path:
                local.add(info.fullname)
        for b in mods[path].root.bindings.values():
            if b.kind == "import" and b.target[1] is not None:
                at = origin(*b.target)
                if at is not None and at[1].kind == "class":
                    info = info_at.get((at[0], at[1].node.lineno, at[1].name))
                    if info is not None:
                        local.add(info.fullname)
        for full in local:
            for base in infos[full].mro:
                for n in own_names.get(base.fullname, ()):
                    if base.fullname in infos:
                        d[n].add(find((base.fullname, n)))
        near_cache[path] = d
    return near_cache[path].get(name, set())


overrides = {}
try:
    for l in open("override.tsv"):
        c = l.rstrip("\n").split("\t")
        if len(c) == 4:
            overrides[c[0], c[1], c[2]] = c[3]
except FileNotFoundError:
    pass


def guess(path, line, name, why):
    for k in ((path, why, name), (path, "*", name)):
        if k in overrides:
            return overrides[k]
    if name in ("future", "confirmation", "part", "kills", "locked"):
        return None
    groups = groups_by_attr.get(name)
    if not groups:
        if name[:1].isupper() and len(unique_classes.get(name, ())) == 1:
            new = next(iter(unique_classes[name]))
            if new != name:
                log("GUESSCLASS", f"{path}:{line}", name, new, why)
                return new
        return None
    news = {member_new.get(g) or name for g in groups}
    if news == {name}:
        return None
    if len(news) == 1:
        log("GUESS", f"{path}:{line}", name, next(iter(news)), why)
        return next(iter(news))
    if not path.startswith("src"):
        near = near_groups(path, name)
        news = {member_new.get(g) or name for g in near}
        if len(news) == 1:
            new = next(iter(news))
            if new != name:
                log("LOCALGUESS", f"{path}:{line}", name, new, why)
                return new
            return None
        news = {member_new.get(g) or name for g in groups}
    if True:
        log("AMBIGUOUS", f"{path}:{line}", name, sorted(news), why)
    return None


def func_scope(node):
    """My function scope for a mypy FuncDef."""
    if isinstance(node, nodes.Decorator):
        node = node.func
    if isinstance(node, nodes.OverloadedFuncDef):
        node = node.impl or node.items[0]
        return func_scope(node)
    if not isinstance(node, nodes.FuncDef):
        return None
    full = node.fullname or ""
    parts = full.split(".")
    for i in range(len(parts), 0, -1):
        p = path_by_module.get(".".join(parts[:i]))
        if p is not None:
            s = func_at.get((p, node.line, node.name))
            return (p, s) if s is not None else None
    return None


def local_func_scope(path, node):
    if isinstance(node, nodes.Decorator):
        node = node.func
    if isinstance(node, nodes.FuncDef):
        s = func_at.get((path, node.line, node.name))
        return (path, s) if s else None
    return None


_forwarding = []


def keyword_of_func(found, name):
    p, scope = found
    b = scope.bindings.get(name)
    if b is None or b.kind != "param":
        kw = scope.node.args.kwarg
        if kw is None or len(_forwarding) > 3 or (p, scope) in _forwarding:
            return None, False
        _forwarding.append((p, scope))
        try:
            for n in ast.walk(scope.node):
                if isinstance(n, ast.Call):
                    for k in n.keywords:
                        if k.arg is None and any(isinstance(x, ast.Name) and x.id == kw.arg for x in ast.walk(k.value)):
                            cls = inference.class_scope(p, n)
                            got = keyword_new(p, n, name, scope, cls)
                            if got[1]:
                                return got
        finally:
            _forwarding.pop()
        return None, False
    return param_new(p, b), True


def dict_sources(p, expr, depth=0):
    """Dict displays and dict() calls that an expression may be."""
    if depth > 4:
        return
    if isinstance(expr, ast.Dict):
        yield expr
        for k, v in zip(expr.keys, expr.values):
            if k is None:
                yield from dict_sources(p, v, depth + 1)
    elif isinstance(expr, ast.BinOp):
        yield from dict_sources(p, expr.left, depth + 1)
        yield from dict_sources(p, expr.right, depth + 1)
    elif isinstance(expr, ast.IfExp):
        yield from dict_sources(p, expr.body, depth + 1)
        yield from dict_sources(p, expr.orelse, depth + 1)
    elif isinstance(expr, ast.BoolOp):
        for v in expr.values:
            yield from dict_sources(p, v, depth + 1)
    elif isinstance(expr, ast.Call) and isinstance(expr.func, ast.Name) and expr.func.id == "dict":
        yield expr
        for a in expr.args:
            yield from dict_sources(p, a, depth + 1)
    elif isinstance(expr, ast.Name):
        b = inference.binding_at.get(expr)
        if b is None:
            return
        for q, n in inference.stores.get(b, ()):
            up = inference.parents[q].get(n)
            if isinstance(up, ast.Assign) and n in up.targets:
                yield from dict_sources(q, up.value, depth + 1)
            elif isinstance(up, ast.AnnAssign) and up.value is not None:
                yield from dict_sources(q, up.value, depth + 1)
            elif isinstance(up, ast.AugAssign):
                yield from dict_sources(q, up.value, depth + 1)
        if b.kind == "param" and b.scope.kind == "function":
            fn = b.scope.node
            for deco in fn.decorator_list:
                if not (isinstance(deco, ast.Call) and getattr(deco.func, "attr", "") == "parametrize" and len(deco.args) > 1):
                    continue
                first = deco.args[0]
                names = (
                    [x.strip() for x in first.value.split(",")]
                    if isinstance(first, ast.Constant)
                    else [e.value for e in getattr(first, "elts", []) if isinstance(e, ast.Constant)]
                )
                if b.name not in names or not isinstance(deco.args[1], (ast.List, ast.Tuple)):
                    continue
                for e in deco.args[1].elts:
                    if isinstance(e, ast.Call) and getattr(e.func, "attr", "") == "param":
                        values = e.args
                    elif len(names) > 1 and isinstance(e, ast.Tuple):
                        values = e.elts
                    else:
                        values = [e]
                    i = names.index(b.name)
                    if i < len(values):
                        yield from dict_sources(p, values[i], depth + 1)


def keyword_of_info(info, name):
    if info.typeddict_type is not None:
        return None, True
    for base in info.mro:
        for ctor in ("__init__", "__new__"):
            sym = base.names.get(ctor)
            if sym is None or base.fullname == "builtins.object":
                continue
            node = sym.node
            found = func_scope(node) if base.fullname in infos else None
            if found is None and base.fullname in infos and isinstance(node, (nodes.FuncDef, nodes.Decorator)):
                fd = node.func if isinstance(node, nodes.Decorator) else node
                for p, line, n in info_positions.get(base.fullname, ()):
                    s = func_at.get((p, fd.line, fd.name))
                    if s is not None and s.parent.kind == "class" and s.parent.name == n:
                        found = (p, s)
            if found is not None and found[1].name == ctor:
                return keyword_of_func(found, name)
            if base.fullname not in infos and ctor == "__init__" and base.fullname.startswith(
                ("pydantic", "builtins.tuple", "pydantic_settings")
            ):
                break
            if base.fullname not in infos:
                return None, True
            # made by a plugin: fields
            o = owner(info, name)
            if o is not None:
                return (new_member(o.fullname, name) if o.fullname in infos else None), True
            return None, False
    o = owner(info, name)
    if o is not None:
        return (new_member(o.fullname, name) if o.fullname in infos else None), True
    return None, False


info_positions = defaultdict(list)
for (p, line, n), info in info_at.items():
    info_positions[info.fullname].append((p, line, n))


def keyword_new(path, call, name, scope, class_scope):
    func = call.func
    fname = func.id if isinstance(func, ast.Name) else getattr(func, "attr", "")
    if fname in ("replace", "evolve") and call.args:
        real = [o for o in owners_of(path, call.args[0], scope, class_scope) if isinstance(o, nodes.TypeInfo)]
        real = [o for o in real if o.fullname in infos]
        if real:
            return attr_new(path, call.args[0], name, scope, class_scope, f"{path}:{call.lineno}")
    if fname == "partial" and call.args:
        return keyword_callee(path, call.args[0], name, scope, class_scope)
    if fname == "model_copy":
        return None, True
    return keyword_callee(path, func, name, scope, class_scope)


def keyword_callee(path, func, name, scope, class_scope):
    key = key_of(func)
    if fname_self(func) and class_scope is not None:
        info = info_of_scope(path, class_scope)
        if info is not None and isinstance(func, ast.Name):
            return keyword_of_info(info, name)
    node = refs.get(path, {}).get(key)
    if isinstance(node, nodes.TypeInfo):
        return keyword_of_info(node, name)
    if isinstance(node, nodes.TypeAlias):
        for i in infos_of_type(node.target):
            if i is not None:
                return keyword_of_info(i, name)
    found = func_scope(node) if node is not None else None
    if found is None and node is not None:
        found = local_func_scope(path, node)
    if found is not None:
        got = keyword_of_func(found, name)
        if got[1]:
            return got
    if isinstance(func, ast.Attribute):
        for o in owners_of(path, func.value, scope, class_scope):
            if o is None:
                continue
            if isinstance(o, tuple):
                if o[0] == "module":
                    at = origin(o[1], func.attr)
                    if at is None:
                        continue
                    b = at[1]
                    if b.kind == "def":
                        s = mods[at[0]].scope_of.get(b.node)
                        if s is not None:
                            return keyword_of_func((at[0], s), name)
                    if b.kind == "class":
                        i = info_at.get((at[0], b.node.lineno, b.name))
                        if i is not None:
                            return keyword_of_info(i, name)
                    continue
                mro = o[1].mro[1:]
            else:
                mro = o.mro
            for base in mro:
                if base.fullname not in infos:
                    if func.attr in base.names:
                        return None, True
                    continue
                if func.attr in ("__init__",) and func.attr not in base.names:
                    continue
                if func.attr in own_names.get(base.fullname, ()):
                    for p, line, n in info_positions[base.fullname]:
                        for s in mods[p].scope_of.values():
                            if (
                                s.kind == "function"
                                and s.name == func.attr
                                and s.parent.kind == "class"
                                and s.parent.node.lineno == line
                            ):
                                got = keyword_of_func((p, s), name)
                                if got[1]:
                                    return got
                    if func.attr == "__init__":
                        return keyword_of_info(base, name)
                    break
    for t in tables.get(path, {}).get(key, []):
        t = get_proper_type(t)
        if isinstance(t, types.Overloaded):
            t = t.items[0]
        if isinstance(t, types.TypeType):
            for i in infos_of_type(t):
                if i is not None:
                    return keyword_of_info(i, name)
        if isinstance(t, types.CallableType):
            if t.is_type_obj():
                for i in infos_of_type(t.ret_type):
                    if i is not None:
                        return keyword_of_info(i, name)
            if t.definition is not None:
                found = func_scope(t.definition) or local_func_scope(path, t.definition)
                if found is not None:
                    got = keyword_of_func(found, name)
                    if got[1]:
                        return got
        if isinstance(t, (types.Instance, types.UnionType)):
            for i in infos_of_type(t):
                if i is None:
                    continue
                for base in i.mro:
                    sym = base.names.get("__call__")
                    found = func_scope(sym.node) if sym is not None and base.fullname in infos else None
                    if found is not None:
                        return keyword_of_func(found, name)
    if fname_self(func):
        return None, False
    for t in inference.infer(path, func):
        if isinstance(t, tuple) and t[0] == "func":
            got = keyword_of_func((t[1], t[2]), name)
            if got[1]:
                return got
        if isinstance(t, tuple) and t[0] == "class":
            return keyword_of_info(t[1], name)
        if not isinstance(t, tuple):
            t = get_proper_type(t)
            if isinstance(t, types.CallableType) and t.definition is not None:
                found = func_scope(t.definition)
                if found is not None:
                    got = keyword_of_func(found, name)
                    if got[1]:
                        return got
    if external_callee(path, func):
        return None, True
    return None, False


def external_callee(path, func):
    """A function or class of a library: its keywords stay."""
    node = refs.get(path, {}).get(key_of(func))
    full = getattr(node, "fullname", "") or ""
    if full and not full.startswith(("ergon_framework", "tests.", "bench.", "tools.", "examples.", "reference.", "ergon_pytest")):
        return "." in full
    if isinstance(func, ast.Name) and func.id in BUILTINS:
        return True
    if isinstance(func, ast.Attribute):
        real = [o for o in owners_of(path, func.value, None, None) if isinstance(o, nodes.TypeInfo)]
        if real and all(o.fullname not in infos for o in real):
            return True
        ref = refs.get(path, {}).get(key_of(func.value))
        if isinstance(ref, nodes.MypyFile) and ref.fullname not in path_by_module:
            return True
        if isinstance(func.value, ast.Name) and func.value.id in ("subprocess", "asyncio", "celery", "wire"):
            return True
    return False


def fname_self(func):
    return isinstance(func, ast.Name) and func.id == "cls"


unique_classes = defaultdict(set)
for p, m in mods.items():
    if p.startswith("src"):
        for b in m.root.bindings.values():
            if b.kind == "class":
                unique_classes[b.name].add(new_binding(p, b) or b.name)

# ---- walk ----------------------------------------------------------------------------------------------------------
params_by_name: dict[str, set] = defaultdict(set)
for p, m in mods.items():
    for s in m.scope_of.values():
        if s.kind == "function":
            for b in s.bindings.values():
                if b.kind == "param":
                    params_by_name[b.name].add(param_new(p, b) or b.name)

for p, m in mods.items():
    for u in m.uses:
        if u.binding is None:
            continue
        new = new_binding(p, u.binding)
        if new:
            edit(p, u.token, u.name, new)
    for a in m.attrs:
        line = a.token[0]
        where = f"{p}:{line}"
        if a.kind == "import":
            if isinstance(a.value, str):
                edit(p, a.token, a.name, new_global(a.value, a.name))
        elif a.kind in ("attribute", "pattern"):
            new, ok = attr_new(p, a.value, a.name, a.scope, a.class_scope, where)
            if not ok:
                new = guess(p, line, a.name, ast.unparse(a.value)[:60])
            if new:
                edit(p, a.token, a.name, new)
        elif a.kind == "keyword":
            new, ok = keyword_new(p, a.value, a.name, a.scope, a.class_scope)
            if not ok:
                news = params_by_name.get(a.name, set()) | {
                    member_new.get(g) or a.name for g in groups_by_attr.get(a.name, ())
                }
                if news - {a.name}:
                    log("KEYWORD?", where, a.name, sorted(news), ast.unparse(a.value.func)[:70])
            elif new:
                edit(p, a.token, a.name, new)
        elif a.kind == "quoted" and isinstance(a.value, ast.Name):
            b = a.scope
            binding = None
            s = a.scope
            while s is not None and binding is None:
                binding = s.bindings.get(a.value.id)
                s = s.parent
            if binding is not None and binding.kind == "import" and binding.target[1] is None:
                edit(p, a.token, a.name, new_global(binding.target[0], a.name))
            elif binding is not None and binding.kind == "import":
                full = ".".join(x for x in binding.target if x)
                if full in path_by_module:
                    edit(p, a.token, a.name, new_global(full, a.name))

seen_dicts = set()
for p, m in mods.items():
    for node in ast.walk(m.tree):
        if not isinstance(node, ast.Call):
            continue
        for k in node.keywords:
            if k.arg is not None:
                continue
            for d in dict_sources(p, k.value):
                keys = (
                    [(c, c.value) for c in d.keys if isinstance(c, ast.Constant) and isinstance(c.value, str)]
                    if isinstance(d, ast.Dict)
                    else [(kk, kk.arg) for kk in d.keywords if kk.arg]
                )
                for c, name in keys:
                    if not name.isidentifier():
                        continue
                    new, ok = keyword_new(p, node, name, m.root, inference.class_scope(p, node))
                    if ok and new and (p, id(c)) not in seen_dicts:
                        seen_dicts.add((p, id(c)))
                        log("DICTKEY", f"{p}:{c.lineno}", name, new)
                        if isinstance(c, ast.keyword):
                            edit(p, (c.lineno, c.col_offset), name, new)
                        else:
                            raw = mods[p].lines[c.lineno - 1]
                            at = raw.find(name.encode(), c.col_offset)
                            if 0 <= at <= c.end_col_offset:
                                edit(p, (c.lineno, at), name, new)

DOTTED = re.compile(r"ergon_framework(\.\w+)+(:\w+(\.\w+)*)?|tests(\.\w+)+(:\w+)?|bench(\.\w+)+:\w+")


def string_edit(path, node, old, new, start=0):
    """Replace `old` at offset `start` of a plain one-line string constant."""
    raw = mods[path].lines[node.lineno - 1]
    at = raw.find(old.encode(), node.col_offset)
    if at < 0 or node.lineno != node.end_lineno:
        log("STRING?", f"{path}:{node.lineno}", node.value, new)
        return
    edit(path, (node.lineno, at), old, new)


for p, m in mods.items():
    consts = {id(n): (n, s, c) for n, s, c in m.strings}
    # names in __all__ and __slots__, TypeVar("X")
    for node in ast.walk(m.tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            t = targets[0]
            if isinstance(t, ast.Name) and t.id in ("__all__",):
                for c in ast.walk(node.value):
                    if isinstance(c, ast.Constant) and isinstance(c.value, str):
                        b = m.root.bindings.get(c.value)
                        new = new_binding(p, b) if b is not None else None
                        if new:
                            string_edit(p, c, c.value, new)
            if isinstance(t, ast.Name) and isinstance(node.value, ast.Call) and node.value.args:
                f = node.value.func
                fn = f.id if isinstance(f, ast.Name) else getattr(f, "attr", "")
                c = node.value.args[0]
                if fn in ("TypeVar", "NewType", "ParamSpec", "namedtuple") and isinstance(c, ast.Constant):
                    b = m.root.bindings.get(t.id)
                    new = new_binding(p, b) if b is not None and c.value == t.id else None
                    if new:
                        string_edit(p, c, c.value, new)
        if isinstance(node, ast.ClassDef):
            for s in node.body:
                if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name) and s.targets[0].id == "__slots__":
                    info = info_at.get((p, node.lineno, node.name))
                    for c in ast.walk(s.value):
                        if isinstance(c, ast.Constant) and isinstance(c.value, str) and info is not None:
                            new = new_member(info.fullname, c.value)
                            if new:
                                string_edit(p, c, c.value, new)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            scope = m.scope_of[node]
            for d in node.decorator_list:
                if not isinstance(d, ast.Call):
                    continue
                fn = d.func.id if isinstance(d.func, ast.Name) else getattr(d.func, "attr", "")
                if fn == "parametrize" and d.args:
                    for c in ast.walk(d.args[0]):
                        if isinstance(c, ast.Constant) and isinstance(c.value, str):
                            names = [x.strip() for x in c.value.split(",")]
                            out = []
                            for n in names:
                                b = scope.bindings.get(n)
                                out.append((param_new(p, b) if b is not None and b.kind == "param" else None) or n)
                            if out != names:
                                string_edit(p, c, c.value, ", ".join(out))
                if fn == "usefixtures":
                    for c in d.args:
                        if isinstance(c, ast.Constant):
                            new = fixture_new(p, scope, c.value)
                            if new and new != c.value:
                                string_edit(p, c, c.value, new)
                if fn == "given":
                    for k in d.keywords:
                        b = scope.bindings.get(k.arg)
                        new = param_new(p, b) if b is not None and b.kind == "param" else None
                        if new:
                            edit(p, (k.lineno, k.col_offset), k.arg, new)
        if isinstance(node, ast.Call):
            f = node.func
            if getattr(f, "attr", "") == "getfixturevalue" and node.args and isinstance(node.args[0], ast.Constant):
                log("GETFIXTURE", f"{p}:{node.lineno}", node.args[0].value)
            fn = f.id if isinstance(f, ast.Name) else getattr(f, "attr", "")
            if fn in ("getattr", "setattr", "hasattr", "delattr", "object") and len(node.args) >= 2:
                c = node.args[1]
                if isinstance(c, ast.Constant) and isinstance(c.value, str) and c.value.isidentifier():
                    got = consts.get(id(c))
                    scope, cls = (got[1], got[2]) if got else (m.root, None)
                    new, ok = attr_new(p, node.args[0], c.value, scope, cls, f"{p}:{node.lineno}")
                    if not ok:
                        new = guess(p, node.lineno, c.value, "string of " + fn)
                    if new:
                        string_edit(p, c, c.value, new)
            if fn in ("attrgetter", "methodcaller") and node.args and isinstance(node.args[0], ast.Constant):
                new = guess(p, node.lineno, str(node.args[0].value), fn)
                if new:
                    string_edit(p, node.args[0], node.args[0].value, new)
    for node, _scope, _cls in m.strings:
        text = node.value
        if not DOTTED.fullmatch(text):
            continue
        head, _, tail = text.partition(":")
        names = tail.split(".") if tail else []
        module = head
        while module and module not in path_by_module:
            module, _, last = module.rpartition(".")
            names.insert(0, last)
        if not module or not names:
            continue
        out = list(names)
        at = origin(module, names[0])
        new = new_global(module, names[0])
        if new:
            out[0] = new
        if len(names) > 1 and at is not None and at[1].kind == "class":
            info = info_at.get((at[0], at[1].node.lineno, at[1].name))
            if info is not None:
                o = owner(info, names[1])
                if o is not None:
                    out[1] = new_member(o.fullname, names[1]) or names[1]
        if out != names:
            fresh = text[: len(text) - len(".".join(names))] + ".".join(out)
            if ":" in text or True:
                string_edit(p, node, text, fresh)

total = sum(map(len, edits.values()))
print("edits", total, "files", len(edits), "rows", len(rows), "used", sum(used_rows.values()))
print(dict(counts))

# ---- no name may be caught by another binding ----------------------------------------------------------------------
for p, m in mods.items():
    for scope in {id(s): s for s in [m.root, *m.scope_of.values()]}.values():
        seen = {}
        for b in scope.bindings.values():
            new = new_binding(p, b) or b.name
            other = seen.setdefault(new, b)
            if other is not b:
                log("SAMESCOPE", p, scope.qualname, other.name, b.name, new)
    for u in m.uses:
        target = u.binding
        new = (new_binding(p, target) if target is not None else None) or u.name
        # find what the new name means at this place
        scope, first, got = u.scope, True, None
        while scope is not None and got is None:
            if u.name in scope.globals:
                scope, first = m.root, False
            if first or scope.kind != "class":
                for b in scope.bindings.values():
                    if (new_binding(p, b) or b.name) == new and b.name not in scope.nonlocals:
                        got = b
                        break
            if scope.kind != "comprehension":
                first = False
            scope = scope.parent
        if got is not target and not (u.store and isinstance(u.node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.arg))):
            log("CAUGHT", f"{p}:{u.token[0]}", u.name, new, "by", got.qualname if got else None)
print({k: v for k, v in counts.items()})
LOG.close()

globals_map = {}
for p, m in mods.items():
    if p.startswith("src") or p.startswith("tests") or p.startswith(("bench", "examples", "tools")):
        d = {}
        for b in m.root.bindings.values():
            new = new_binding(p, b)
            if new and new != b.name:
                d[b.name] = new
        if d:
            globals_map[module_by_path[p]] = d
attrs_map = {}
for name, groups in groups_by_attr.items():
    news = sorted({member_new.get(g) or name for g in groups})
    if news != [name]:
        attrs_map[name] = news
class_map = {}
for full, names in own_names.items():
    if full in infos:
        d = {n: new_member(full, n) for n in names if new_member(full, n)}
        if d:
            class_map[full] = d
params_map = {n: sorted(v) for n, v in params_by_name.items() if v != {n}}
json.dump({"globals": globals_map, "attrs": attrs_map, "classes": class_map, "params": params_map}, open("rename-map.json", "w"))

if WRITE:
    for p, changes in edits.items():
        lines = list(mods[p].lines)
        for (line, col), (old, new) in sorted(changes.items(), reverse=True):
            raw = lines[line - 1]
            lines[line - 1] = raw[:col] + new.encode() + raw[col + len(old.encode()) :]
        open(f"{ROOT}/{p}", "wb").write(b"".join(lines))
    json.dump(
        {
            "members": [[g[0], g[1], n] for r, n in member_new.items() for g in parent if find(g) == r],
            "edits": {p: [[*t, *c] for t, c in sorted(ch.items())] for p, ch in edits.items()},
        },
        open("rename-edits.json", "w"),
    )
