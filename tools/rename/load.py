"""Types of every expression of the tree at ROOT, by mypy: {path: {(line, col, end_line, end_col): type}} and classes."""
from __future__ import annotations

import os
import sys
from pathlib import Path

from mypy import build, nodes, types
from mypy.modulefinder import BuildSource
from mypy.options import Options
from mypy.typestate import type_state

FOLDERS = ("src", "tests", "bench", "tools", "examples", "reference")


def files(root: str) -> list[str]:
    out = []
    for folder in FOLDERS:
        for base, dirs, names in os.walk(f"{root}/{folder}"):
            dirs[:] = [d for d in dirs if d not in ("__pycache__", "node_modules", "target", ".venv")]
            out += [os.path.relpath(f"{base}/{n}", root) for n in names if n.endswith(".py")]
    return sorted(out)


def module_of(path: str) -> str:
    parts = list(Path(path).with_suffix("").parts)
    if parts[0] == "src":
        parts = parts[1:]
    elif path.startswith("examples/shop/"):
        parts = parts[2:] if len(parts) > 2 and parts[2] != "shop" else parts
        parts = ["examples", "shop_", *parts] if parts[0] == "x" else parts
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(p.replace("-", "_") for p in parts)


SKIP = {"node", "info", "type", "unanalyzed_type", "def_frame", "names", "metadata", "original_def", "mro", "alias_deps", "arg_names", "imports", "ignored_lines", "skipped_lines", "plugin_deps", "future_import_flags", "type_guard", "dataclass_transform_spec", "deco_line", "defn", "typeddict_type", "tuple_type", "self_type", "alt_promote", "_promote", "declared_metaclass", "metaclass_type", "special_alias", "typevar_tuple_prefix", "target", "as_type"}
_fields = {}


def fields(kind):
    got = _fields.get(kind)
    if got is None:
        got = []
        for base in kind.__mro__:
            for name in getattr(base, "__mypyc_attrs__", ()) or getattr(base, "__slots__", ()) or ():
                if name not in SKIP and name not in got and not name.startswith("__"):
                    got.append(name)
        _fields[kind] = got
    return got


def collect(tree, all_types):
    table, refs, classes = {}, {}, []
    seen = set()
    stack = [tree]
    while stack:
        o = stack.pop()
        if isinstance(o, (list, tuple)):
            stack.extend(o)
            continue
        if isinstance(o, dict):
            stack.extend(o.values())
            continue
        if not isinstance(o, nodes.Node) or id(o) in seen:
            continue
        seen.add(id(o))
        if isinstance(o, (nodes.TypeInfo, nodes.SymbolTable)):
            continue
        if isinstance(o, nodes.ClassDef):
            classes.append(o)
        if isinstance(o, nodes.Expression):
            key = (o.line, o.column, o.end_line, o.end_column)
            t = all_types.get(o)
            if t is not None:
                table.setdefault(key, [])
                if t not in table[key]:
                    table[key].append(t)
            if isinstance(o, nodes.RefExpr) and o.node is not None:
                refs.setdefault(key, o.node)
        for name in fields(type(o)):
            value = getattr(o, name, None)
            if value is not None and not isinstance(value, (str, int, bool)):
                stack.append(value)
    return table, refs, classes


def load(root: str):
    paths = files(root)
    options = Options()
    options.python_version = (3, 11)
    options.check_untyped_defs = True
    options.namespace_packages = True
    options.explicit_package_bases = True
    options.mypy_path = [f"{root}/src", root]
    options.ignore_missing_imports = True
    options.export_types = True
    options.preserve_asts = True
    options.incremental = False
    options.cache_dir = os.devnull
    options.ignore_errors = True
    options.show_traceback = True
    options.python_executable = sys.executable
    sources = [BuildSource(f"{root}/{p}", module_of(p)) for p in paths]
    seen = {}
    for s in sources:
        if s.module in seen:
            print("same module", s.module, s.path, seen[s.module])
        seen[s.module] = s.path
    os.chdir(root)
    result = build.build(sources, options)
    tables, refs, trees, classes = {}, {}, {}, {}
    by_path = {os.path.relpath(s.path, root): s.module for s in sources}
    for path, module in by_path.items():
        tree = result.files.get(module)
        if tree is None:
            print("no tree", path)
            continue
        trees[path] = tree
        tables[path], refs[path], classes[path] = collect(tree, result.types)
    protocols = dict(type_state._attempted_protocols)
    return paths, by_path, trees, tables, refs, classes, result, protocols


if __name__ == "__main__":
    import time

    t = time.time()
    paths, by_path, trees, tables, refs, classes, result, protocols = load(sys.argv[1])
    n = hit = miss = noany = 0
    import ast
    for p in paths:
        if p not in tables or not p.startswith(sys.argv[2] if len(sys.argv) > 2 else "src"):
            continue
        for node in ast.walk(ast.parse(open(p).read())):
            if isinstance(node, ast.Attribute):
                v = node.value
                n += 1
                got = tables[p].get((v.lineno, v.col_offset, v.end_lineno, v.end_col_offset))
                if got is None:
                    if (v.lineno, v.col_offset, v.end_lineno, v.end_col_offset) in refs[p]:
                        hit += 1
                    else:
                        miss += 1
                        if miss < 15:
                            print(p, node.lineno, ast.unparse(node))
                elif any(isinstance(types.get_proper_type(t), types.AnyType) for t in got):
                    noany += 1
                else:
                    hit += 1
    print("attributes", n, hit, miss, noany)
    print(len(paths), sum(map(len, tables.values())), time.time() - t, len(protocols))
    print(result.errors[:5])
    for k in list(protocols)[:10]:
        print(k, protocols[k])
