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
from ergon_framework.connectors import registry
from ergon_framework.connectors.base import AsyncConnector, Capabilities, Connector
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.errors import MissingExtraError
from ergon_framework.runner import queues
from ergon_framework.runner.exit import RunExit
from ergon_framework.runner.loading import load_connector
from ergon_framework.runner.settings import load_settings
from ergon_framework.task.consumer import ConsumerMixin


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(queues, "_chosen", [])
    return tmp_path


@pytest.fixture
def memory_url():
    """Return an address that no other test has."""
    return f"memory://{uuid4().hex}"


@pytest.fixture
def register_scheme(monkeypatch):
    """Return a function that registers entry points as if a package were installed."""

    def register(scheme, value):
        installed = [EntryPoint(name=scheme, value=value, group=registry.ENTRY_POINT_GROUP)]
        monkeypatch.setattr(
            registry, "entry_points", lambda *, group: installed if group == registry.ENTRY_POINT_GROUP else []
        )

    return register


def write_settings(folder, name, url, more=""):
    (folder / "ergon.toml").write_text(f'[queues.{name}]\nurl = "{url}"\n{more}', encoding="utf-8")


def get_error(name="orders", **options):
    with pytest.raises(ConfigurationError) as caught:
        _ = queue(name, **options).connector
    return str(caught.value)


# -- one setting moves a handler ---------------------------------------------------------------------


HANDLER_SOURCE = """
from ergon_framework import consumer, queue

orders = queue("orders")
seen = []


@consumer(orders)
{flavour} charge(order, transaction):
    seen.append(transaction.id)
"""


@pytest.fixture
def import_handler(folder, monkeypatch, request):
    """Import the same module again, as a new process would."""
    name = f"moved_{uuid4().hex}"
    (folder / f"{name}.py").write_text(HANDLER_SOURCE.format(flavour=request.param), encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))

    def import_again():
        sys.modules.pop(name, None)
        return __import__(name)

    return import_again


@pytest.mark.spec("CNN-01")
@pytest.mark.parametrize("import_handler", ["def", "async def"], indirect=True)
def test_one_changed_line_moves_a_handler_to_another_broker(folder, import_handler, database, memory_url):
    for number, url in enumerate([memory_url, database, f"{memory_url}-2", database]):
        write_settings(folder, "orders", url)
        module = import_handler()
        module.orders.dispatch([Transaction({"total": number}, id=f"order-{number}")])
        report = module.charge.run()
        if asyncio.iscoroutine(report):
            asyncio.run(report)
        assert module.seen == [f"order-{number}"]
        expected = "MemoryConnector" if url.startswith("memory") else "PostgresQueue"
        assert type(module.orders.connector).__name__ == expected
        module.orders.close()


def test_nothing_is_read_before_the_queue_is_used(folder):
    orders = queue("orders")

    @consumer(orders)
    def charge(order):
        pass

    assert (orders.name, repr(orders), charge.connector) == ("orders", "queue('orders')", orders)
    assert "[queues.orders]" in get_error()


def test_a_task_keeps_the_connector_object_that_it_receives(folder, memory_url):
    write_settings(folder, "orders", memory_url)

    class Charge(ConsumerMixin, Task):
        def process_transaction(self, transaction):
            pass

    connector = MemoryConnector("orders")
    assert Charge(connector).connector is connector
    named_queue = Charge(queue("orders")).connector
    assert named_queue.connector is not connector


# -- location of the settings ----------------------------------------------------------------------


def test_the_environment_overrides_the_file_ignoring_case_and_hyphens(folder, monkeypatch, memory_url):
    write_settings(folder, "Orders-EU", "redis://nowhere", "options.lease = 5\n")
    monkeypatch.setenv("ERGON_QUEUES__ORDERS_EU__URL", memory_url)
    orders = queue("orders-eu")
    assert isinstance(orders.connector, MemoryConnector)
    assert orders.capabilities.lease == 5


def test_chosen_settings_override_the_current_folder(folder, memory_url):
    write_settings(folder, "orders", "redis://nowhere")
    other_file = folder / "other.toml"
    other_file.write_text(f'[queues.orders]\nurl = "{memory_url}"\n', encoding="utf-8")
    queues.set_settings(load_settings(other_file, {}))
    assert isinstance(queue("orders").connector, MemoryConnector)


def test_options_of_the_settings_override_those_of_the_program(folder, memory_url):
    write_settings(folder, "orders", memory_url, "options.lease = 7\n")
    assert queue("orders", lease=3).capabilities.lease == 7


def test_the_error_for_an_unknown_queue_names_the_setting_and_the_known_queues(folder, memory_url):
    write_settings(folder, "letters", memory_url)
    message = get_error("my-orders")
    assert "[queues.my-orders]" in message
    assert "ERGON_QUEUES__MY_ORDERS__URL" in message
    assert "known queues: letters" in message


@pytest.mark.spec("RUN-03")
@pytest.mark.parametrize(
    "text, message",
    [
        ('[queues.orders]\nurk = "a://b"', "did you mean 'queues.orders.url'?"),
        ('[queues.orders]\nurl = "localhost"', "begins with a scheme"),
        ('[queues.orders]\nurl = "amqp://app:hidden@host"', "set ERGON_QUEUES__ORDERS__URL"),
        ('[queues.orders]\nurl = "redis://:hidden@host"', "holds a password"),
        ('[queues.orders]\nurl = "nats://hidden@host"', "holds a token"),
        ('[queues.orders.options]\npassword = "hidden"', "is named like a secret"),
    ],
)
def test_errors_of_the_file_do_not_show_secrets(folder, text, message):
    (folder / "ergon.toml").write_text(text, encoding="utf-8")
    error = get_error()
    assert message in error
    assert "hidden" not in error


@pytest.mark.parametrize("broker", ["rabbitmq", "nats", "redis"])
def test_variables_that_connectors_read_themselves_are_accepted(folder, broker):
    loaded = load_settings(environ={f"ERGON_{broker.upper()}__URL": "scheme://host"})
    assert getattr(loaded, broker).url == "scheme://host"


# -- choice of the connector -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, message",
    [
        ("rabbit://app:hidden@host", "Known are amqp://, amqps://, memory://, nats://, "),
        ("postgresq://app:hidden@host", "did you mean postgresql://?"),
    ],
)
def test_an_unknown_scheme_is_rejected_with_the_list_of_known_schemes(monkeypatch, url, message):
    monkeypatch.setenv("ERGON_QUEUES__ORDERS__URL", url)
    error = get_error()
    assert message in error
    assert "hidden" not in error


def test_a_missing_client_library_is_an_error_that_names_the_extra(folder, monkeypatch):
    write_settings(folder, "orders", "postgresql://localhost/none")
    for module in [name for name in sys.modules if name.startswith("ergon_framework.connectors.postgres")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtraError, match=r"needs the extra 'postgres'.*ergon-framework\[postgres"):
        _ = queue("orders").connector


def test_an_option_of_another_broker_is_rejected_by_name(folder, memory_url):
    write_settings(folder, "orders", memory_url, "options.inbox = true\n")
    assert "has no option 'inbox'; it has lease, clock, wall, codec" in get_error()
    write_settings(folder, "orders", "postgresql://localhost/none", "options.inbx = true\n")
    assert "PostgresQueue, has no option 'inbx'; did you mean 'inbox'?" in get_error()


@pytest.mark.parametrize("url", ["memory://bad", "postgresql://localhost/none"])
def test_an_option_with_a_wrong_value_is_an_error_of_the_settings(folder, url):
    write_settings(folder, "orders", url, "options.lease = -1\n")
    assert "lease must be" in get_error()


def test_a_memory_queue_is_shared_by_name_within_a_process(folder, memory_url):
    write_settings(folder, "orders", memory_url)
    queue("orders").dispatch([Transaction(id="order-1")])
    assert queue("orders").depth().ready == 1
    assert "with the options []" in get_error(lease=3.0)


THIRD_PARTY_SOURCE = """
from ergon_framework import MemoryConnector

class Foreign(MemoryConnector):
    def __init__(self, name, *, url, **options):
        super().__init__(name)
        self.url, self.options = url, options

def no_connector(name, *, url):
    return name + url
"""


@pytest.fixture
def third_party_module(folder, monkeypatch):
    """Return the name of a third-party module."""
    name = f"foreign_{uuid4().hex}"
    (folder / f"{name}.py").write_text(THIRD_PARTY_SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    return name


def test_a_package_can_register_its_own_scheme(folder, register_scheme, third_party_module):
    register_scheme("Kafka", f"{third_party_module}:Foreign")
    write_settings(folder, "orders", "kafka://host", "options.partitions = 3\n")
    orders = queue("orders")
    assert (type(orders.connector).__name__, orders.url, orders.options) == (
        "Foreign",
        "kafka://host",
        {"partitions": 3},
    )
    write_settings(folder, "orders", "kafak://host")
    assert "did you mean kafka://?" in get_error()


def test_an_entry_point_that_is_not_a_connector_is_an_error(folder, register_scheme, third_party_module):
    write_settings(folder, "orders", "kafka://host")
    register_scheme("kafka", f"{third_party_module}:no_connector")
    assert "returned a str, which is not a connector" in get_error()
    register_scheme("kafka", "nowhere_to_be_found:Foreign")
    assert "cannot be imported: ModuleNotFoundError" in get_error()


# -- it behaves like any other connector ------------------------------------------------------------


def test_every_method_of_the_connector_contract_is_forwarded(folder, memory_url):
    write_settings(folder, "orders", memory_url)
    contract = {
        name
        for kind in (Connector, AsyncConnector)
        for name, value in vars(kind).items()
        if callable(value) and not name.startswith("_")
    }
    assert contract <= vars(queues.NamedQueue).keys()
    assert isinstance(queue("orders").capabilities, Capabilities)


def test_methods_that_only_some_connectors_have_are_forwarded(folder, memory_url):
    write_settings(folder, "orders", memory_url)
    orders = queue("orders")
    assert list(orders.dead_letters) == []
    with pytest.raises(
        AttributeError, match="is a MemoryConnector in the settings, which has no 'record_processed_on'"
    ):
        _ = orders.record_processed_on
    with pytest.raises(AttributeError):
        _ = orders._secret


def test_dead_letters_can_be_listed_by_queue_name(folder, memory_url):
    write_settings(folder, "orders", memory_url)
    assert load_connector("orders").list_dead(DeadLetterQuery()) == []
    with pytest.raises(ConfigurationError, match=r"queue 'letters' has no address.* for example app:orders"):
        load_connector("letters")


def test_the_error_for_a_misconfigured_queue_suggests_no_other_target(folder):
    write_settings(folder, "orders", "nowhere://at-all")
    with pytest.raises(ConfigurationError, match="no connector is known for") as caught:
        load_connector("orders")
    assert "MODULE:CONNECTOR" not in str(caught.value)


# -- the commands ----------------------------------------------------------------------------------


@pytest.fixture
def run_cli(folder, monkeypatch, memory_url):
    source = """
    from ergon_framework import BusinessError, Transaction, consumer, queue

    @consumer(queue("orders"))
    def charge(order):
        raise BusinessError("declined")
    """
    (folder / "queueapp.py").write_text(dedent(source), encoding="utf-8")
    write_settings(folder, "orders", memory_url)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # It would end this process, that of the tests, when the time of the command is over.
    monkeypatch.setattr("ergon_framework.cli.run.force_exit_at_deadline", lambda _ended: None)
    yield lambda *words: CliRunner().invoke(app_of_ergon, words)
    sys.modules.pop("queueapp", None)


def test_run_and_dlq_commands_accept_the_queue_name(folder, run_cli):
    queue("orders").dispatch([Transaction(id="order-1")])
    assert "declined" in run_cli("run", "queueapp:charge").stdout
    assert "order-1" in run_cli("dlq", "list", "orders").stdout
    assert "order-1" in run_cli("dlq", "list", "queueapp:charge").stdout
    assert run_cli("dlq", "list", "letters").exit_code == 2


def test_a_run_uses_the_configuration_file_that_it_is_given(folder, run_cli, memory_url):
    other_file = folder / "other.toml"
    other_file.write_text(f'[queues.orders]\nurl = "{memory_url}-other"\n', encoding="utf-8")
    queue("orders").dispatch([Transaction(id="order-1")])
    result = run_cli("run", "queueapp:charge", "--config", str(other_file))
    assert (result.exit_code, "failed" in result.stdout) == (0, False)


def test_a_run_without_settings_for_its_queue_does_not_start(folder, run_cli):
    write_settings(folder, "letters", "memory://none")
    result = run_cli("run", "queueapp:charge")
    assert result.exit_code == RunExit.USAGE
    assert "queue 'orders' has no address" in result.stderr
