from __future__ import annotations

import asyncio
import sys
from importlib.metadata import EntryPoint
from textwrap import dedent
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from ergon_framework import ConfigurationError, MemoryConnector, Task, Transaction, consumer, queue
from ergon_framework.cli.app import app as app_of_ergon
from ergon_framework.connectors import schemes
from ergon_framework.connectors.base import AsyncConnector, Capabilities, Connector
from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.errors import MissingExtraError
from ergon_framework.runner import queues
from ergon_framework.runner.exits import Exit
from ergon_framework.runner.loading import load_connector
from ergon_framework.runner.settings import settings
from ergon_framework.task.mixins.consumer import ConsumerMixin


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(queues, "_chosen", [])
    return tmp_path


@pytest.fixture
def memory():
    """An address that no other test has."""
    return f"memory://{uuid4().hex}"


@pytest.fixture
def registered(monkeypatch):
    """Have entry points as if a package were installed."""

    def register(scheme, value):
        found = [EntryPoint(name=scheme, value=value, group=schemes.GROUP)]
        monkeypatch.setattr(schemes, "entry_points", lambda *, group: found if group == schemes.GROUP else [])

    return register


def say(folder, name, url, more=""):
    (folder / "ergon.toml").write_text(f'[queues.{name}]\nurl = "{url}"\n{more}', encoding="utf-8")


def refusal(name="orders", **options):
    with pytest.raises(ConfigurationError) as caught:
        _ = queue(name, **options).connector
    return str(caught.value)


# -- one line moves a handler ------------------------------------------------------------------------


HANDLER = """
from ergon_framework import consumer, queue

orders = queue("orders")
seen = []


@consumer(orders)
{flavour} charge(order, transaction):
    seen.append(transaction.id)
"""


@pytest.fixture
def handler(folder, monkeypatch, request):
    """The same module, imported anew as a new process would."""
    name = f"moved_{uuid4().hex}"
    (folder / f"{name}.py").write_text(HANDLER.format(flavour=request.param), encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))

    def fresh():
        sys.modules.pop(name, None)
        return __import__(name)

    return fresh


@pytest.mark.spec("CNN-01")
@pytest.mark.parametrize("handler", ["def", "async def"], indirect=True)
def test_one_changed_line_moves_a_handler_to_another_broker(folder, handler, database, memory):
    for number, url in enumerate([memory, database, f"{memory}-2", database]):
        say(folder, "orders", url)
        module = handler()
        module.orders.dispatch([Transaction(f"order-{number}", {"total": number})])
        report = module.charge.run()
        if asyncio.iscoroutine(report):
            asyncio.run(report)
        assert module.seen == [f"order-{number}"]
        wanted = "MemoryConnector" if url.startswith("memory") else "PostgresQueue"
        assert type(module.orders.connector).__name__ == wanted
        module.orders.close()


def test_nothing_is_read_before_the_queue_is_used(folder):
    orders = queue("orders")

    @consumer(orders)
    def charge(order):
        pass

    assert (orders.name, repr(orders), charge.connector) == ("orders", "queue('orders')", orders)
    assert "[queues.orders]" in refusal()


def test_a_task_that_was_given_an_object_has_that_object(folder, memory):
    say(folder, "orders", memory)

    class Charge(ConsumerMixin, Task):
        def process_transaction(self, transaction):
            pass

    own = MemoryConnector("orders")
    assert Charge(own).connector is own
    named = Charge(queue("orders")).connector
    assert named.connector is not own


# -- where the settings are ------------------------------------------------------------------------


def test_the_environment_wins_over_the_file_and_knows_neither_capitals_nor_hyphens(folder, monkeypatch, memory):
    say(folder, "Orders-EU", "redis://nowhere", "options.lease = 5\n")
    monkeypatch.setenv("ERGON_QUEUES__ORDERS_EU__URL", memory)
    found = queue("orders-eu")
    assert isinstance(found.connector, MemoryConnector)
    assert found.capabilities.lease == 5


def test_settings_that_were_chosen_win_over_the_current_folder(folder, memory):
    say(folder, "orders", "redis://nowhere")
    other = folder / "other.toml"
    other.write_text(f'[queues.orders]\nurl = "{memory}"\n', encoding="utf-8")
    queues.use(settings(other, {}))
    assert isinstance(queue("orders").connector, MemoryConnector)


def test_options_of_the_settings_win_over_those_of_the_program(folder, memory):
    say(folder, "orders", memory, "options.lease = 7\n")
    assert queue("orders", lease=3).capabilities.lease == 7


def test_an_unknown_queue_says_what_to_write_and_what_is_known(folder, memory):
    say(folder, "letters", memory)
    said = refusal("my-orders")
    assert "[queues.my-orders]" in said
    assert "ERGON_QUEUES__MY_ORDERS__URL" in said
    assert "Known are: letters" in said


@pytest.mark.spec("RUN-03")
@pytest.mark.parametrize(
    "text, said",
    [
        ('[queues.orders]\nurk = "a://b"', "did you mean 'queues.orders.url'?"),
        ('[queues.orders]\nurl = "localhost"', "begins with a scheme"),
        ('[queues.orders]\nurl = "amqp://app:hidden@host"', "set ERGON_QUEUES__ORDERS__URL"),
        ('[queues.orders]\nurl = "redis://:hidden@host"', "holds a password"),
        ('[queues.orders]\nurl = "nats://hidden@host"', "holds a token"),
        ('[queues.orders.options]\npassword = "hidden"', "is named like a secret"),
    ],
)
def test_what_is_wrong_in_the_file_is_told_without_secrets(folder, text, said):
    (folder / "ergon.toml").write_text(text, encoding="utf-8")
    told = refusal()
    assert said in told
    assert "hidden" not in told


@pytest.mark.parametrize("broker", ["rabbitmq", "nats", "redis"])
def test_the_variables_that_connectors_read_by_themselves_are_known(folder, broker):
    found = settings(environ={f"ERGON_{broker.upper()}__URL": "scheme://host"})
    assert getattr(found, broker).url == "scheme://host"


# -- which connector it is -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, said",
    [
        ("rabbit://app:hidden@host", "Known are amqp://, amqps://, memory://, nats://, "),
        ("postgresq://app:hidden@host", "did you mean postgresql://?"),
    ],
)
def test_an_unknown_scheme_is_refused_with_the_list_of_the_known_ones(monkeypatch, url, said):
    monkeypatch.setenv("ERGON_QUEUES__ORDERS__URL", url)
    told = refusal()
    assert said in told
    assert "hidden" not in told


def test_a_missing_client_is_told_with_the_extra_that_brings_it(folder, monkeypatch):
    say(folder, "orders", "postgresql://localhost/none")
    for module in [name for name in sys.modules if name.startswith("ergon_framework.connectors.postgres")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtraError, match=r"needs the extra 'postgres'.*ergon-framework\[postgres"):
        _ = queue("orders").connector


def test_an_option_of_another_broker_is_refused_by_name(folder, memory):
    say(folder, "orders", memory, "options.inbox = true\n")
    assert "has no option 'inbox'; it has lease, clock, wall, codec" in refusal()
    say(folder, "orders", "postgresql://localhost/none", "options.inbx = true\n")
    assert "PostgresQueue, has no option 'inbx'; did you mean 'inbox'?" in refusal()


@pytest.mark.parametrize("url", ["memory://bad", "postgresql://localhost/none"])
def test_an_option_with_a_wrong_value_is_an_error_of_the_settings(folder, url):
    say(folder, "orders", url, "options.lease = -1\n")
    assert "lease must be" in refusal()


def test_all_in_one_process_who_name_a_queue_in_memory_have_the_same(folder, memory):
    say(folder, "orders", memory)
    queue("orders").dispatch([Transaction("order-1")])
    assert queue("orders").depth().ready == 1
    assert "with the options []" in refusal(lease=3.0)


FOREIGN = """
from ergon_framework import MemoryConnector

class Foreign(MemoryConnector):
    def __init__(self, name, *, url, **options):
        super().__init__(name)
        self.url, self.options = url, options

def no_connector(name, *, url):
    return name + url
"""


@pytest.fixture
def foreign(folder, monkeypatch):
    """The name of a module of somebody else's."""
    name = f"foreign_{uuid4().hex}"
    (folder / f"{name}.py").write_text(FOREIGN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    return name


def test_a_package_can_register_a_scheme_of_its_own(folder, registered, foreign):
    registered("Kafka", f"{foreign}:Foreign")
    say(folder, "orders", "kafka://host", "options.partitions = 3\n")
    found = queue("orders")
    assert (type(found.connector).__name__, found.url, found.options) == ("Foreign", "kafka://host", {"partitions": 3})
    say(folder, "orders", "kafak://host")
    assert "did you mean kafka://?" in refusal()


def test_a_package_that_registers_something_else_is_told_so(folder, registered, foreign):
    say(folder, "orders", "kafka://host")
    registered("kafka", f"{foreign}:no_connector")
    assert "made a str, which is no connector" in refusal()
    registered("kafka", "nowhere_to_be_found:Foreign")
    assert "cannot be imported: ModuleNotFoundError" in refusal()


# -- it is a connector like any other ---------------------------------------------------------------


def test_every_method_of_the_contract_is_handed_on(folder, memory):
    say(folder, "orders", memory)
    contract = {
        name
        for kind in (Connector, AsyncConnector)
        for name, value in vars(kind).items()
        if callable(value) and not name.startswith("_")
    }
    assert contract <= vars(queues.NamedQueue).keys()
    assert isinstance(queue("orders").capabilities, Capabilities)


def test_what_only_some_connectors_have_is_that_connectors(folder, memory):
    say(folder, "orders", memory)
    orders = queue("orders")
    assert list(orders.dead_letters) == []
    with pytest.raises(AttributeError, match="is a MemoryConnector by the settings, which has no 'mark_on'"):
        _ = orders.mark_on
    with pytest.raises(AttributeError):
        _ = orders._secret


def test_dead_letters_are_found_by_the_name_of_the_queue_alone(folder, memory):
    say(folder, "orders", memory)
    assert load_connector("orders").list_dead(DeadLetterQuery()) == []
    with pytest.raises(ConfigurationError, match=r"where the queue 'letters' is;.* for example app:orders"):
        load_connector("letters")


def test_a_queue_that_is_known_but_wrong_is_told_without_another_way_to_name_it(folder):
    say(folder, "orders", "nowhere://at-all")
    with pytest.raises(ConfigurationError, match="no connector is known for") as caught:
        load_connector("orders")
    assert "MODULE:CONNECTOR" not in str(caught.value)


# -- the commands ----------------------------------------------------------------------------------


@pytest.fixture
def ergon(folder, monkeypatch, memory):
    app = """
    from ergon_framework import BusinessError, Transaction, consumer, queue

    @consumer(queue("orders"))
    def charge(order):
        raise BusinessError("declined")
    """
    (folder / "queueapp.py").write_text(dedent(app), encoding="utf-8")
    say(folder, "orders", memory)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # It would end this process, the tests' own, when the time of the command is over.
    monkeypatch.setattr("ergon_framework.cli.run.guard", lambda _ended: None)
    yield lambda *words: CliRunner().invoke(app_of_ergon, words)
    sys.modules.pop("queueapp", None)


def test_a_run_and_the_dead_letters_know_the_queue_by_its_name(folder, ergon):
    queue("orders").dispatch([Transaction("order-1")])
    assert "declined" in ergon("run", "queueapp:charge").stdout
    assert "order-1" in ergon("dlq", "list", "orders").stdout
    assert "order-1" in ergon("dlq", "list", "queueapp:charge").stdout
    assert ergon("dlq", "list", "letters").exit_code == 2


def test_a_run_obeys_the_file_that_it_was_told(folder, ergon, memory):
    other = folder / "other.toml"
    other.write_text(f'[queues.orders]\nurl = "{memory}-other"\n', encoding="utf-8")
    queue("orders").dispatch([Transaction("order-1")])
    done = ergon("run", "queueapp:charge", "--config", str(other))
    assert (done.exit_code, "failed" in done.stdout) == (0, False)


def test_a_run_without_its_queue_does_not_begin(folder, ergon):
    say(folder, "letters", "memory://none")
    done = ergon("run", "queueapp:charge")
    assert done.exit_code == Exit.USAGE
    assert "nobody says where the queue 'orders' is" in done.stderr
