"""Prove that two trees differ in names only: prove.py OLD NEW rows...

For every module: the same tokens apart from identifiers (comments, docstrings and layout ignored), every binding of the old module
is one binding of the new one, and every renamed attribute or keyword is allowed by a row or by inheritance (applied.json).
"""
from __future__ import annotations

import ast
import json
import sys
from collections import Counter, defaultdict

from load import files, module_of
from scopes import Module

OLD, NEW = sys.argv[1:3]
ROWS = [a for a in sys.argv[3:] if not a.startswith("--")]
allowed = defaultdict(set)
exact = defaultdict(set)
for f in ROWS:
    for line in open(f):
        c = line.rstrip("\n").split("\t")
        if len(c) >= 3:
            old, new = c[1].split(".")[-1], c[2].split(".")[-1]
            allowed[old].add(new)
            exact[c[0], c[1]].add(new)


def skeleton(tree):
    """The tree with identifiers blank; docstrings blank."""
    out = []

    def walk(node):
        if isinstance(node, ast.AST):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body
                if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str):
                    body[0].value.value = ""
            out.append(type(node).__name__)
            children = list(ast.iter_fields(node))
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                # import order is layout
                out.append("import")
                return
            for name, value in children:
                if name in ("id", "attr", "arg", "name", "rest", "asname") and (value is None or isinstance(value, str)):
                    continue
                if name in ("names", "kwd_attrs") and isinstance(value, list) and all(isinstance(v, str) for v in value):
                    continue
                if name in ("lineno", "col_offset", "end_lineno", "end_col_offset", "type_comment", "kind"):
                    continue
                walk(value)
        elif isinstance(node, list):
            out.append("[")
            for item in node:
                walk(item)
            out.append("]")
        elif isinstance(node, str):
            out.append(("str", node))
        else:
            out.append(repr(node))

    walk(tree)
    return out


def key(binding):
    return id(binding)


stats = Counter()
problems = []
strings = []
pairs = Counter()
old_files, new_files = files(OLD), files(NEW)
if set(old_files) != set(new_files):
    print("files differ", set(old_files) ^ set(new_files))
for path in old_files:
    if path not in new_files:
        continue
    a = Module(open(f"{OLD}/{path}").read(), module_of(path), path)
    b = Module(open(f"{NEW}/{path}").read(), module_of(path), path)
    stats["files"] += 1
    sa = [x for x in skeleton(a.tree)]
    sb = [x for x in skeleton(b.tree)]
    if len(sa) != len(sb):
        problems.append((path, "shape"))
        for i, (x, y) in enumerate(zip(sa, sb)):
            if x != y:
                problems.append((path, i, sa[max(0, i - 3) : i + 4], sb[max(0, i - 3) : i + 4]))
                break
        continue
    for x, y in zip(sa, sb):
        if x != y:
            if isinstance(x, tuple) and isinstance(y, tuple):
                strings.append((path, x[1], y[1]))
            else:
                problems.append((path, x, y))
    # imports may be sorted anew: compare them as a set, the rest in order
    def plain(m):
        return [u for u in m.uses if not isinstance(u.node, (ast.Import, ast.ImportFrom))]

    ua, ub = plain(a), plain(b)
    if len(ua) != len(ub):
        problems.append((path, "uses", len(ua), len(ub)))
        continue
    forth, back = {}, {}
    for x, y in zip(ua, ub):
        stats["names"] += 1
        if (x.binding is None) != (y.binding is None):
            problems.append((path, x.token, x.name, y.name, "bound and unbound"))
            continue
        if x.binding is None:
            if x.name != y.name:
                problems.append((path, x.token, x.name, y.name, "unbound renamed"))
            continue
        if forth.setdefault(key(x.binding), y.binding) is not y.binding or back.setdefault(key(y.binding), x.binding) is not x.binding:
            problems.append((path, x.token, x.name, y.name, "another binding"))
        if x.name != y.name:
            stats["renamed"] += 1
            pairs[x.name, y.name] += 1
            if y.name not in allowed[x.name]:
                problems.append((path, x.token, x.name, y.name, "no row"))
    aa, ab = [x for x in a.attrs if x.kind != "import"], [x for x in b.attrs if x.kind != "import"]
    if len(aa) != len(ab):
        problems.append((path, "attributes", len(aa), len(ab)))
        continue
    for x, y in zip(aa, ab):
        stats["attributes"] += 1
        if x.name != y.name:
            stats["renamed"] += 1
            pairs[x.name, y.name] += 1
            if y.name not in allowed[x.name]:
                problems.append((path, x.token, x.name, y.name, "no row"))
    ia = Counter((u.binding.target[0] if u.binding and u.binding.target else "") for u in a.uses if isinstance(u.node, (ast.Import, ast.ImportFrom)))
    ib = Counter((u.binding.target[0] if u.binding and u.binding.target else "") for u in b.uses if isinstance(u.node, (ast.Import, ast.ImportFrom)))
    if ia != ib:
        problems.append((path, "imports", ia - ib, ib - ia))
print(json.dumps({**stats, "distinct pairs": len(pairs), "strings": len(strings), "problems": len(problems)}))
if "-v" in sys.argv or True:
    with open("prove.log", "w") as out:
        for p in problems:
            print("PROBLEM", *p, sep="\t", file=out)
        for s in strings:
            print("STRING", *map(repr, s), sep="\t", file=out)
