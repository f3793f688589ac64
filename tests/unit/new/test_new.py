"""``ergon new``: accepted names and folders, and the written files."""

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
from ergon_framework.cli.new import MAX_NAME_CHARS, Broker, NewExit, render_files, write
from ergon_framework.errors import ConfigurationError
from ergon_framework.runner.loading import load_policy
from ergon_framework.runner.settings import load_settings

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SCHEMAS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (HERE / "schemas").glob("*.json")}
every_broker = pytest.mark.parametrize("broker", list(Broker))


@pytest.fixture(autouse=True)
def _working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_new(*arguments):
    return CliRunner().invoke(app, ["new", *arguments])


def make_project(broker, name="shop"):
    result = run_new(name, "--broker", broker)
    assert result.exit_code == NewExit.OK, result.output
    return Path(name)


# -- names and folders ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, message",
    [
        ("Shop", "example 'shop'"),
        ("my-shop", "example 'my_shop'"),
        ("my__shop", "example 'my_shop'"),
        ("7shop", "beginning with a letter"),
        ("_shop", "example 'shop'"),
        ("", "beginning with a letter"),
        ("../shop", "example 'shop'"),
        ("shop/../../elsewhere", "folder; change the folder first"),
        ("shöp", "lower-case letters"),
        ("shop\n", "lower-case letters"),
        ("class", "Python keyword; use another name, such as 'class_worker'"),
        ("json", "would hide an existing package"),
        ("tests", "would hide an existing package"),
        ("ergon_framework", "would hide an existing package"),
        ("pydantic", "would hide an existing package"),
        ("redis", "would hide an existing package"),
        ("s" * (MAX_NAME_CHARS + 1), f"the maximum is {MAX_NAME_CHARS}"),
    ],
)
def test_an_invalid_name_is_rejected_and_nothing_is_written(name, message, tmp_path):
    result = run_new("--", name)
    assert result.exit_code == NewExit.USAGE
    assert message in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_broker_is_rejected(tmp_path):
    result = run_new("shop", "--broker", "kafka")
    assert result.exit_code == NewExit.USAGE
    assert "'postgres', 'rabbitmq', 'nats', 'redis'" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_is_unchanged(tmp_path):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "notes").write_text("mine", encoding="utf-8")
    result = run_new("shop")
    assert (result.exit_code, "is not empty, it contains 'notes'" in result.stderr) == (NewExit.USAGE, True)
    assert [path.name for path in tmp_path.rglob("*")] == ["shop", "notes"]
    assert (tmp_path / "shop" / "notes").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("kind", ["file", "link", "broken link"])
def test_a_file_or_link_in_place_of_the_folder_is_unchanged(kind, tmp_path):
    target = tmp_path / "shop"
    if kind == "file":
        target.write_text("mine", encoding="utf-8")
    else:
        target.symlink_to(tmp_path if kind == "link" else tmp_path / "nowhere")
    result = run_new("shop")
    assert (result.exit_code, "is not a folder" in result.stderr) == (NewExit.USAGE, True)
    assert [path.name for path in tmp_path.iterdir()] == ["shop"]


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "shop").mkdir()
    assert run_new("shop").exit_code == NewExit.OK
    assert (tmp_path / "shop" / "shop" / "tasks.py").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["shop"]


def test_a_file_created_in_the_meantime_is_not_overwritten(tmp_path):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "README.md").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"creating the folder .* failed: "):
        write(tmp_path / "shop", render_files("shop", Broker.POSTGRES))
    assert [path.name for path in tmp_path.rglob("*")] == ["shop", "README.md"]


@pytest.mark.spec("RUN-05")
def test_the_help_has_an_example():
    output = run_new("--help").output
    assert "Example: ergon new shop --broker redis" in " ".join(output.split())


# -- written files ----------------------------------------------------------------------------------


@every_broker
@pytest.mark.parametrize("name", ["shop", "s" * MAX_NAME_CHARS, "a", "order_desk_2"])
def test_no_template_placeholder_is_left(broker, name):
    for path, text in render_files(name, broker).items():
        assert "{{" not in text, path
        assert text.endswith("\n"), path
        assert not text.endswith("\n\n"), path


@every_broker
@pytest.mark.parametrize("name", ["shop", "z" * MAX_NAME_CHARS])
def test_ruff_finds_nothing(broker, name):
    folder = make_project(broker, name)
    for arguments in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "."], cwd=folder, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout


@every_broker
def test_the_settings_are_read_and_name_the_queue_without_a_password(broker):
    folder = make_project(broker)
    loaded = load_settings(folder / "ergon.toml", environ={})
    url, options = loaded.queue("shop_orders")
    assert ("@" in url, options) == (False, {})


@every_broker
def test_the_package_requires_the_extra_of_its_broker(broker):
    project_file = tomllib.loads((make_project(broker) / "pyproject.toml").read_text(encoding="utf-8"))
    assert re.fullmatch(rf"ergon-framework\[cli,.*\b{broker}\b.*\]>=.+", project_file["project"]["dependencies"][0])


# -- manifests --------------------------------------------------------------------------------------


def load_manifests(folder):
    """Every manifest of a project with its kind."""
    manifests = {"compose": yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))}
    for path in sorted((folder / "deploy").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            manifests[document["kind"].lower()] = document
    return manifests


def list_schema_errors(kind, document):
    return [error.message for error in jsonschema_rs.validator_for(SCHEMAS[kind]).iter_errors(document)]


@every_broker
def test_every_manifest_matches_its_schema(broker):
    manifests = load_manifests(make_project(broker))
    expected = {"compose", "configmap", "service", "networkpolicy", "deployment", "scaledobject"} | (
        {"job"} if broker == "postgres" else set()
    )
    assert set(manifests) == expected
    assert {kind: list_schema_errors(kind, document) for kind, document in manifests.items()} == {
        kind: [] for kind in manifests
    }


@every_broker
@pytest.mark.spec("SEC-09")
def test_the_probes_of_a_new_project_are_open_to_the_monitoring_only(broker):
    manifests = load_manifests(make_project(broker))
    policy, pod = manifests["networkpolicy"]["spec"], manifests["deployment"]["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    monitoring = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    assert rule["from"] == [{"namespaceSelector": monitoring}]
    (port,) = pod["spec"]["containers"][0]["ports"]
    assert rule["ports"] == [{"port": port["name"]}]


@pytest.mark.parametrize(
    "kind, path, value",
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
def test_an_invalid_manifest_is_rejected(kind, path, value):
    document = load_manifests(make_project(Broker.POSTGRES))[kind]
    node = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    assert list_schema_errors(kind, document) != []


@every_broker
@pytest.mark.spec("RUN-01")
def test_the_termination_grace_period_is_longer_than_the_drain(broker):
    folder = make_project(broker)
    manifests = load_manifests(folder)
    # The guide's value: the grace period plus 1 s for the process to exit; the system needs some time too.
    min_seconds = load_policy(folder / "policy.toml", ConsumerPolicy).loop.drain_timeout + 2
    assert manifests["deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= min_seconds
    assert int(manifests["compose"]["services"]["worker"]["stop_grace_period"].removesuffix("s")) >= min_seconds


@every_broker
def test_every_variable_in_the_manifests_is_a_setting(broker):
    manifests = load_manifests(make_project(broker))
    environ = dict(manifests["configmap"]["data"])
    for service in manifests["compose"]["services"].values():
        environ |= {name: text for name, text in service.get("environment", {}).items() if name.startswith("ERGON_")}
    loaded = load_settings(environ=environ)  # unknown settings are errors
    assert loaded.run.probes.host == "0.0.0.0"
    assert loaded.queue("shop_orders")[0].partition(":")[0] in {"postgresql", "amqp", "nats", "redis"}


@every_broker
def test_the_image_and_the_pod_run_the_same_command(broker):
    folder = make_project(broker)
    (command,) = re.findall(r"^CMD (.+)$", (folder / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    (worker,) = load_manifests(folder)["deployment"]["spec"]["template"]["spec"]["containers"]
    assert worker["args"] == json.loads(command)
    assert worker["args"][-2:] == ["--probe-port", str(worker["ports"][0]["containerPort"])]


@pytest.mark.spec("RUN-04")
def test_scaling_uses_an_existing_metric():
    query = load_manifests(make_project(Broker.POSTGRES))["scaledobject"]["spec"]["triggers"][0]["metadata"]["query"]
    documentation = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
    (name, labels) = re.fullmatch(r"max\((\w+)\{(.+)\}\)", query).groups()
    row = next(line for line in documentation.splitlines() if line.startswith(f"| `{name.replace('_', '.')}` | gauge"))
    for label in re.findall(r"(\w+)=", labels):
        assert f"`{label.replace('_', '.')}`" in row
    assert 'ergon_queue_state="ready"' in labels
    assert "ready, delayed, in_flight or dead" in documentation
