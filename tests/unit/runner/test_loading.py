from __future__ import annotations

import sys

import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.runner.loading import load_policy, load_task, load_tasks
from ergon_framework.worker.policies import ConsumerPolicy

APP = """
from ergon_framework import ConsumerMixin, MemoryConnector, Task, consumer, producer, router

queue = MemoryConnector("orders")

@consumer(queue)
def charge(order): ...

@consumer(queue)
async def refund(order): ...

@producer(queue)
def send(order): ...

class Charge(ConsumerMixin, Task):
    def process_transaction(self, transaction): ...

made = Charge(queue)

events = router(queue)

@events.on("created")
async def created(order): ...

def plain(order): ...
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "loadedapp.py").write_text(APP, encoding="utf-8")
    (tmp_path / "brokenapp.py").write_text("\nimport loadedapp\nloadedapp.nothing\n", encoding="utf-8")
    (tmp_path / "needyapp.py").write_text("import no_such_library\n", encoding="utf-8")
    (tmp_path / "emptyapp.py").write_text("", encoding="utf-8")
    yield tmp_path
    for name in ("loadedapp", "brokenapp", "needyapp", "emptyapp"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["charge", "refund", "made", "events"])
def test_functions_of_both_variants_and_classes_are_tasks(folder, name):
    assert load_task(f"loadedapp:{name}") is getattr(sys.modules["loadedapp"], name)


@pytest.mark.parametrize(
    "name, message",
    [
        ("loadedapp", "write MODULE:TASK"),
        (":charge", "write MODULE:TASK"),
        ("./jobs/loadedapp.py:charge", "name the module: jobs.loadedapp:charge"),
        ("nosuchapp:charge", "there is no module 'nosuchapp'"),
        ("loadedapp.inner:charge", "there is no module 'loadedapp.inner'"),
        ("needyapp:charge", "'needyapp' cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"),
        ("brokenapp:charge", "brokenapp.py, line 3)"),
        ("loadedapp:chrage", "has no 'chrage'; did you mean 'charge'?"),
        ("loadedapp:zzz", "its tasks are: charge, refund, made, events"),
        ("emptyapp:charge", "it has no task"),
        ("loadedapp:Charge", "a class; create an instance of it: charge = Charge(connector)"),
        ("loadedapp:send", "only produces"),
        ("loadedapp:created", "a handler of the router 'orders'; name the router"),
        ("loadedapp:plain", "decorate it with @consumer(connector)"),
        ("loadedapp:queue", "of type MemoryConnector"),
    ],
)
def test_a_target_that_is_not_a_task_is_rejected_with_the_remedy(folder, name, message):
    with pytest.raises(ConfigurationError) as caught:
        load_task(name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name, content",
    [("p.toml", "[loop]\nstreaming = true\n"), ("p.json", '{"loop": {"streaming": true}}')],
)
def test_a_policy_is_read_from_either_format_and_keeps_the_other_defaults(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8")
    policy = load_policy(tmp_path / name, ConsumerPolicy)
    assert (policy.loop.streaming, policy.loop.drain_timeout) == (True, 30.0)


@pytest.mark.spec("RUN-03")
@pytest.mark.parametrize(
    "name, content, message",
    [
        ("p.yaml", "", "must end in .toml or .json"),
        ("gone.toml", None, "cannot be read: No such file"),
        ("p.toml", "[loop", "cannot be parsed"),
        ("p.json", "[]", "must hold a table, not a list"),
        ("p.toml", "[loop]\nlimt = 3", "did you mean 'limit'?"),
        ("p.toml", "[loop]\nlimit = -3", "loop.limit"),
    ],
)
def test_the_error_for_an_invalid_policy_file_names_the_place(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        load_policy(tmp_path / name, ConsumerPolicy)
    assert name in str(caught.value)
    assert message in str(caught.value)


SHARED_APP = """
from ergon_framework import ConsumerMixin, MemoryConnector, Task, consumer, producer
from otherapp import refund

@consumer(MemoryConnector("orders"))
def charge(order): ...

again = charge

@consumer(MemoryConnector("letters"))
async def email(letter): ...

@producer(MemoryConnector("orders"))
def send(order): ...

class Ship(ConsumerMixin, Task):
    def process_transaction(self, transaction): ...

ship = Ship(MemoryConnector("parcels"))
"""
OTHER_APP = """
from ergon_framework import ConsumerMixin, MemoryConnector, Task, consumer

@consumer(MemoryConnector("refunds"))
def refund(order): ...

@consumer(MemoryConnector("charges"))
def charge(order): ...

queue = MemoryConnector("both")

@consumer(queue)
def first(order): ...

@consumer(queue)
def second(order): ...
"""


@pytest.fixture
def shared(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "sharedpkg"
    package.mkdir()
    (tmp_path / "sharedapp.py").write_text(SHARED_APP, encoding="utf-8")
    (tmp_path / "otherapp.py").write_text(OTHER_APP, encoding="utf-8")
    (tmp_path / "importerapp.py").write_text("from otherapp import refund\n", encoding="utf-8")
    (package / "__init__.py").write_text("from sharedpkg.inner import charge, ship\n", encoding="utf-8")
    (package / "inner.py").write_text(SHARED_APP, encoding="utf-8")
    yield
    for name in ("sharedapp", "otherapp", "importerapp", "sharedpkg", "sharedpkg.inner"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "names, tasks",
    [
        (["sharedapp"], ["charge", "email", "Ship"]),
        (["sharedapp:charge"], ["charge"]),
        (["sharedapp:send"], ["send"]),
        (["sharedapp:email", "sharedapp:charge"], ["email", "charge"]),
        (["sharedapp:email", "sharedapp", "sharedapp:again"], ["email", "charge", "Ship"]),
        (["sharedapp:email", "otherapp:refund"], ["email", "refund"]),
        (["sharedpkg"], ["charge", "Ship"]),
    ],
)
def test_a_module_stands_for_its_own_consumers(shared, names, tasks):
    assert [task.name for task in load_tasks(names)] == tasks


@pytest.mark.parametrize(
    "names, message",
    [
        (["importerapp"], "has no consumer of its own"),
        (["sharedapp.py"], "is a file; name the module: sharedapp:TASK"),
        (["nosuchapp"], "there is no module 'nosuchapp'"),
        (["sharedapp:charge", "otherapp:charge"], "are both called 'charge'"),
        (["sharedapp:charge", "otherapp:charge"], "name one of them with @consumer(name=…)"),
        (["sharedapp:charge", "sharedapp:send"], "a task that only produces"),
        (["otherapp:first", "otherapp:second"], "consume the same queue, 'both'"),
    ],
)
def test_tasks_that_cannot_share_a_process_are_rejected_with_the_remedy(shared, names, message):
    with pytest.raises(ConfigurationError) as caught:
        load_tasks(names)
    assert message in str(caught.value)
