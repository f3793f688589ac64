"""``ergon new``: which names and folders it takes, and what it writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema_rs
import pytest
import yaml
from typer.testing import CliRunner

from ergon_framework import ConsumerPolicy
from ergon_framework.cli.app import app
from ergon_framework.cli.new_work import LONGEST, Broker, NewExit, rendered, write
from ergon_framework.errors import ConfigurationError
from ergon_framework.runner.loading import load_policy
from ergon_framework.runner.settings import settings

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SCHEMAS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (HERE / "schemas").glob("*.json")}
every = pytest.mark.parametrize("broker", list(Broker))


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def new(*words):
    return CliRunner().invoke(app, ["new", *words])


def project(broker, name="shop"):
    done = new(name, "--broker", broker)
    assert done.exit_code == NewExit.OK, done.output
    return Path(name)


# -- names and folders ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, said",
    [
        ("Shop", "as 'shop'"),
        ("my-shop", "as 'my_shop'"),
        ("my__shop", "as 'my_shop'"),
        ("7shop", "beginning with a letter"),
        ("_shop", "as 'shop'"),
        ("", "beginning with a letter"),
        ("../shop", "as 'shop'"),
        ("shop/../../elsewhere", "go to another one first"),
        ("shöp", "small letters"),
        ("shop\n", "small letters"),
        ("class", "word of Python's; take another name, as 'class_worker'"),
        ("json", "would hide another"),
        ("tests", "would hide another"),
        ("ergon_framework", "would hide another"),
        ("pydantic", "would hide another"),
        ("redis", "would hide another"),
        ("s" * (LONGEST + 1), f"at most {LONGEST}"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_and_nothing_is_written(name, said, tmp_path):
    done = new("--", name)
    assert done.exit_code == NewExit.USAGE
    assert said in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_broker_that_is_not_known_is_refused(tmp_path):
    done = new("shop", "--broker", "kafka")
    assert done.exit_code == NewExit.USAGE
    assert "'postgres', 'rabbitmq', 'nats', 'redis'" in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_stays_as_it_is(tmp_path):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "notes").write_text("mine", encoding="utf-8")
    done = new("shop")
    assert (done.exit_code, "it has 'notes' in it" in done.stderr) == (NewExit.USAGE, True)
    assert [path.name for path in tmp_path.rglob("*")] == ["shop", "notes"]
    assert (tmp_path / "shop" / "notes").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("kind", ["file", "link", "broken link"])
def test_what_is_no_folder_stays_as_it_is(kind, tmp_path):
    target = tmp_path / "shop"
    if kind == "file":
        target.write_text("mine", encoding="utf-8")
    else:
        target.symlink_to(tmp_path if kind == "link" else tmp_path / "nowhere")
    done = new("shop")
    assert (done.exit_code, "is no folder" in done.stderr) == (NewExit.USAGE, True)
    assert [path.name for path in tmp_path.iterdir()] == ["shop"]


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "shop").mkdir()
    assert new("shop").exit_code == NewExit.OK
    assert (tmp_path / "shop" / "shop" / "tasks.py").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["shop"]


def test_what_came_in_between_is_not_overwritten(tmp_path):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "README.md").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="cannot be made"):
        write(tmp_path / "shop", rendered("shop", Broker.POSTGRES))
    assert [path.name for path in tmp_path.rglob("*")] == ["shop", "README.md"]


@pytest.mark.spec("RUN-05")
def test_the_help_has_an_example():
    said = new("--help").output
    assert "Example: ergon new shop --broker redis" in " ".join(said.split())


# -- what is written --------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("name", ["shop", "s" * LONGEST, "a", "order_desk_2"])
def test_no_word_of_a_template_is_left(broker, name):
    for path, text in rendered(name, broker).items():
        assert "{{" not in text, path
        assert text.endswith("\n"), path
        assert not text.endswith("\n\n"), path


@every
@pytest.mark.parametrize("name", ["shop", "z" * LONGEST])
def test_ruff_has_nothing_to_say(broker, name):
    folder = project(broker, name)
    for words in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "."], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


@every
def test_the_settings_are_read_and_name_the_queue_without_a_password(broker):
    folder = project(broker)
    found = settings(folder / "ergon.toml", environ={})
    url, options = found.queue("shop_orders")
    assert ("@" in url, options) == (False, {})


@every
def test_the_package_needs_what_its_broker_needs(broker):
    told = tomllib.loads((project(broker) / "pyproject.toml").read_text(encoding="utf-8"))
    assert re.fullmatch(rf"ergon-framework\[cli,.*\b{broker}\b.*\]>=.+", told["project"]["dependencies"][0])


# -- manifests --------------------------------------------------------------------------------------


def documents(folder):
    """Every manifest of a project with its kind."""
    found = {"compose": yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))}
    for path in sorted((folder / "deploy").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            found[document["kind"].lower()] = document
    return found


def faults(kind, document):
    return [error.message for error in jsonschema_rs.validator_for(SCHEMAS[kind]).iter_errors(document)]


@every
def test_every_manifest_is_what_its_schema_says(broker):
    found = documents(project(broker))
    wanted = {"compose", "configmap", "service", "networkpolicy", "deployment", "scaledobject"} | (
        {"job"} if broker == "postgres" else set()
    )
    assert set(found) == wanted
    assert {kind: faults(kind, document) for kind, document in found.items()} == {kind: [] for kind in found}


@every
@pytest.mark.spec("SEC-09")
def test_the_probes_of_a_new_project_are_open_to_the_monitoring_only(broker):
    found = documents(project(broker))
    policy, pod = found["networkpolicy"]["spec"], found["deployment"]["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    monitoring = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    assert rule["from"] == [{"namespaceSelector": monitoring}]
    (port,) = pod["spec"]["containers"][0]["ports"]
    assert rule["ports"] == [{"port": port["name"]}]


@pytest.mark.parametrize(
    "kind, where, value",
    [
        ("deployment", ("spec", "template", "spec", "terminationGracePeriod"), 35),
        ("deployment", ("spec", "template", "spec", "terminationGracePeriodSeconds"), "35s"),
        ("deployment", ("spec", "template", "spec", "containers", 0, "livenessProbe", "httpGet", "path"), "/healthz"),
        ("deployment", ("spec", "template", "spec", "containers", 0, "image"), "shop:latest"),
        ("deployment", ("metadata", "name"), "my_shop"),
        ("service", ("spec", "type"), "LoadBalancer"),
        ("networkpolicy", ("spec", "ingress"), []),
        ("networkpolicy", ("spec", "ingress", 0, "from"), []),
        ("configmap", ("data", "ERGON_RUN__PROBES__PORT"), 8080),
        ("scaledobject", ("spec", "triggers", 0, "metadata", "threshold"), 100),
        ("scaledobject", ("spec", "minReplicaCount"), 0),
        ("job", ("spec", "template", "spec", "restartPolicy"), "Always"),
        ("compose", ("services", "worker", "stop_grace_period"), 35),
        ("compose", ("services", "worker", "healthchek"), {}),
        ("compose", ("version",), "3"),
    ],
)
def test_a_broken_manifest_is_refused(kind, where, value):
    document = documents(project(Broker.POSTGRES))[kind]
    place = document
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    assert faults(kind, document) != []


@every
@pytest.mark.spec("RUN-01")
def test_whoever_kills_a_worker_waits_longer_than_it_drains(broker):
    folder = project(broker)
    found = documents(folder)
    # As the guide says: the grace and 1 s, in which the process is gone; and the system wants some time too.
    needed = load_policy(folder / "policy.toml", ConsumerPolicy).loop.drain_timeout + 2
    assert found["deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= needed
    assert int(found["compose"]["services"]["worker"]["stop_grace_period"].removesuffix("s")) >= needed


@every
def test_what_the_manifests_set_are_settings(broker):
    found = documents(project(broker))
    said = dict(found["configmap"]["data"])
    for service in found["compose"]["services"].values():
        said |= {name: text for name, text in service.get("environment", {}).items() if name.startswith("ERGON_")}
    read = settings(environ=said)  # an unknown one is an error
    assert read.run.probes.host == "0.0.0.0"
    assert read.queue("shop_orders")[0].partition(":")[0] in {"postgresql", "amqp", "nats", "redis"}


@every
def test_the_image_and_the_pod_run_the_same(broker):
    folder = project(broker)
    (command,) = re.findall(r"^CMD (.+)$", (folder / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    (worker,) = documents(folder)["deployment"]["spec"]["template"]["spec"]["containers"]
    assert worker["args"] == json.loads(command)
    assert worker["args"][-2:] == ["--probe-port", str(worker["ports"][0]["containerPort"])]


@pytest.mark.spec("RUN-04")
def test_scaling_goes_by_a_metric_that_there_is():
    query = documents(project(Broker.POSTGRES))["scaledobject"]["spec"]["triggers"][0]["metadata"]["query"]
    told = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
    (name, labels) = re.fullmatch(r"max\((\w+)\{(.+)\}\)", query).groups()
    row = next(line for line in told.splitlines() if line.startswith(f"| `{name.replace('_', '.')}` | gauge"))
    for label in re.findall(r"(\w+)=", labels):
        assert f"`{label.replace('_', '.')}`" in row
    assert 'ergon_queue_state="ready"' in labels
    assert "ready, delayed, in_flight or dead" in told
