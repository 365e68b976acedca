"""The manifests of deploy/kubernetes: schemas, settings and flags, probes, and a chart of the same."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from dataplane import settings
from dataplane.cli import cli

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
CHART = FOLDER / "chart"
EXAMPLES = sorted((FOLDER / "examples").glob("*.yaml"))
OVERLAYS = sorted(folder.name for folder in (FOLDER / "overlays").iterdir())
VERSIONS = ("1.29", "1.36")
"""The first with native sidecars by default, and a new one."""
KUBECTL = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
Document = dict[str, Any]


@cache
def values() -> Document:
    made: Document = yaml.safe_load((CHART / "values.yaml").read_text())
    return made


def evaluated(text: str) -> str:
    """A template with its default values, in the namespace dataplane: all that ours use."""
    text = re.sub(
        r"^\{\{- (/\*.*\*/|if eq .Values.overlay .*|end) ?\}\}\n", "", text, flags=re.MULTILINE
    )

    def place(match: re.Match[str]) -> str:
        if match[1] == ".Release.Namespace":
            return "dataplane"
        value = values()
        for name in match[1].removeprefix(".Values.").split("."):
            value = value[name]
        return str(value)

    return re.sub(r"\{\{ ([\w.]+) \}\}", place, text)


def overlay(name: str) -> list[Document]:
    text = evaluated((CHART / "templates" / f"{name}.yaml").read_text())
    assert "{{" not in text
    return list(yaml.safe_load_all(text))


def everything() -> Iterator[tuple[str, Document]]:
    for name in OVERLAYS:
        yield from ((name, document) for document in overlay(name))
    for path in EXAMPLES:
        yield from ((path.stem, document) for document in yaml.safe_load_all(path.read_text()))


def pods(value: Any) -> Iterator[Document]:
    """All templates of pods in a document."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        for inner in value.values():
            yield from pods(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pods(inner)


def containers(of: Document) -> Iterator[Document]:
    for pod in pods(of):
        yield from [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def ours() -> Iterator[tuple[str, Document]]:
    for name, document in everything():
        for container in containers(document):
            if container["image"].startswith("dataplane:"):
                yield name, container


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_and_every_pod_in_one_has_its_schema(version):
    seen, checked = [], 0
    for _, document in everything():
        wrapped = [
            {"apiVersion": "v1", "kind": "PodTemplate", "template": p} for p in pods(document)
        ]
        for resource in (document, *wrapped):
            if resource in seen:
                continue
            seen.append(resource)
            try:
                kubernetes_validate.validate(resource, version, strict=True)
                checked += 1
            except kubernetes_validate.SchemaNotFoundError:
                group = resource["apiVersion"].partition("/")[0]
                assert group.partition(".")[2], f"{group} is no group of others"
    assert checked > 20


def test_every_setting_and_flag_is_real():
    variables = {setting.variable for setting in settings.SETTINGS}
    for name, document in everything():
        if document["kind"] == "ConfigMap":
            assert document["data"].keys() <= variables, name
            for variable, value in document["data"].items():
                setting = settings.BY_NAME[variable.removeprefix("DATAPLANE_").lower()]
                settings.parse(setting, value, name)
        for container in containers(document):
            given = {variable["name"] for variable in container.get("env", ())}
            assert {var for var in given if var.startswith("DATAPLANE_")} <= variables, name
    commands = [container["args"] for _, container in ours()]
    for _, container in ours():
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            command = container.get(probe, {}).get("exec", {}).get("command", [])
            words = " ".join(command).replace("sh -c ", "").partition(" || ")[0].split()
            commands += [words[1:]] if words else []
    assert len(commands) > 12
    for words in commands:
        context = click.Context(cli)
        command = cli.get_command(context, words[0])
        assert command is not None
        command.make_context(words[0], list(words[1:]), parent=context, resilient_parsing=False)


def test_prometheus_finds_the_port_that_the_settings_name_at_all_that_have_it():
    for name in ("metrics", "metrics-tls"):
        path = FOLDER / "components" / name / "podmonitor.yaml"
        monitor = yaml.safe_load(path.read_text())["spec"]
        (endpoint,) = monitor["podMetricsEndpoints"]
        assert ("tlsConfig" in endpoint) == (name == "metrics-tls")
        label = monitor["selector"]["matchLabels"]
        for _, document in everything():
            for pod in pods(document):
                inside = list(containers({"pod": pod}))
                if any(container["image"].startswith("dataplane:") for container in inside):
                    assert label.items() <= pod["metadata"]["labels"].items()
        server = endpoint.get("tlsConfig", {}).get("serverName")
        for document in overlay("daemonset-tls"):
            if document["kind"] == "Certificate" and not document["spec"].get("isCA"):
                assert server in (None, *document["spec"]["dnsNames"])
        for _, container in ours():
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert ports[endpoint["port"]] == 9400
    for name in OVERLAYS:
        (config,) = (document for document in overlay(name) if document["kind"] == "ConfigMap")
        assert config["data"]["DATAPLANE_METRICS_LISTEN"].endswith(":9400")


def test_liveness_asks_no_store_and_no_coordinator():
    for name, container in ours():
        probe = container["livenessProbe"]
        if "--coordinator" in container["args"]:
            tls = name.endswith("-tls")
            assert probe["tcpSocket" if tls else "grpc"] == {"port": 7077}
        else:
            assert probe["exec"]["command"][-1] == "dataplane status --node || [ $? -eq 1 ]"
            assert probe["timeoutSeconds"] > 10  # the probe's own limit


def test_containers_have_no_rights_and_pods_of_a_node_have_its_user():
    for name, container in ours():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted & {"/var/lib/dataplane", "/var/cache/dataplane"}
    for name, document in everything():
        for pod in pods(document):
            context = pod["spec"]["securityContext"]
            assert context["runAsUser"] == context["runAsGroup"] == 1000, name
            if name != "mpijob":
                assert pod["spec"]["automountServiceAccountToken"] is False


def test_all_examples_have_the_same_node():
    sidecars = [c for name, c in ours() if c.get("restartPolicy") == "Always"]
    assert len(sidecars) == 7
    assert all(sidecar == sidecars[0] for sidecar in sidecars)
    (of_daemonset,) = (c for name, c in ours() if name == "daemonset" and "--node" in c["args"])
    for key in sidecars[0].keys() - {"restartPolicy"}:
        assert sidecars[0][key] == of_daemonset[key]


@KUBECTL
def test_the_chart_is_what_kustomize_makes():
    path = FOLDER / "make_chart.py"
    spec = importlib.util.spec_from_file_location("make_chart", path)
    assert spec is not None
    assert spec.loader is not None
    make_chart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_chart)
    assert sorted(make_chart.OVERLAYS) == OVERLAYS
    texts = ""
    for name in OVERLAYS:
        committed = (CHART / "templates" / f"{name}.yaml").read_text()
        assert committed == make_chart.template(name), "run deploy/kubernetes/make_chart.py"
        made = subprocess.run(
            ["kubectl", "kustomize", str(FOLDER / "overlays" / name)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert overlay(name) == list(yaml.safe_load_all(made))
        texts += committed
    for _, place in make_chart.PLACES:
        assert place in texts
    monitors = (CHART / "templates" / "podmonitor.yaml").read_text()
    assert monitors == make_chart.monitors(), "run deploy/kubernetes/make_chart.py"
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert values()["image"] == f"dataplane:{chart['appVersion']}"
