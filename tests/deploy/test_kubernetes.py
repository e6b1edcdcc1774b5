"""Tests of deploy/kubernetes: what a cluster would be given is correct, complete and strict, and pods of it run."""

from __future__ import annotations

import base64
import copy
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import kubernetes_validate
import kustomize
import pytest
import yaml
from engine import Engine

from longhaul.testing import find_binary

pytest_plugins = ["images"]

ROOT = pathlib.Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
# The oldest release that has all that is used (backoffLimitPerIndex without a gate), and the newest known one.
VERSIONS = ["1.29", kubernetes_validate.latest_version()]
WITH_DAEMONS = [name for name in OVERLAYS if not name.startswith("trainer-")]
Object = dict[str, Any]


def objects(overlay: str) -> list[Object]:
    return kustomize.render(KUBERNETES / "overlays" / overlay)


def named(overlay: str, kind: str, name: str) -> Object:
    (found,) = [one for one in objects(overlay) if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def templates(overlay: str) -> dict[str, Object]:
    """The templates of pods, by the names of what makes the pods."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]
        for one in objects(overlay)
        if "template" in one.get("spec", {})
    }


def containers(overlay: str) -> Iterator[tuple[str, Object]]:
    for name, template in templates(overlay).items():
        for kind in ("initContainers", "containers"):
            for container in template["spec"].get(kind, []):
                yield f"{name}/{container['name']}", container


# -------------------------------------------------------------------- the schema

# What this tree uses of the objects of the Prometheus operator and of cert-manager, whose schemas are not Kubernetes'
# own.
TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
DURATION = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d))+$"}


def exactly(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": {**required, **optional},
    }


def custom(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = exactly({"name": TEXT, "namespace": TEXT}, labels=TEXTS)
    return exactly(
        {
            "apiVersion": {"const": version},
            "kind": {"const": kind},
            "metadata": metadata,
            "spec": spec,
        }
    )


RELABELING = exactly(
    {"action": {"const": "replace"}, "targetLabel": TEXT}, replacement=TEXT, sourceLabels={"type": "array"}
)
ENDPOINT = exactly({"port": TEXT, "path": TEXT}, interval=DURATION, relabelings={"type": "array", "items": RELABELING})
ALERT = exactly(
    {"alert": TEXT, "expr": TEXT}, **{"for": DURATION, "keep_firing_for": DURATION}, labels=TEXTS, annotations=TEXTS
)
RECORD = exactly({"record": TEXT, "expr": TEXT}, labels=TEXTS)
GROUP = exactly({"name": TEXT, "rules": {"type": "array", "items": {"oneOf": [ALERT, RECORD]}}}, interval=DURATION)
NAMES = {"type": "array", "items": TEXT, "minItems": 1}
KEY = exactly(
    {"algorithm": {"const": "ECDSA"}, "size": {"const": 256}, "rotationPolicy": {"enum": ["Always", "Never"]}}
)
CERTIFICATE = exactly(
    {
        "secretName": TEXT,
        "commonName": TEXT,
        "duration": DURATION,
        "privateKey": KEY,
        "issuerRef": exactly({"kind": {"const": "Issuer"}, "name": TEXT}),
    },
    isCA={"const": True},
    dnsNames=NAMES,
    uris=NAMES,
    usages={"type": "array", "items": {"enum": ["digital signature", "server auth", "client auth"]}},
    renewBefore=DURATION,
)
ISSUER = {"oneOf": [exactly({"selfSigned": exactly({})}), exactly({"ca": exactly({"secretName": TEXT})})]}
OPERATOR = {
    "Certificate": custom("cert-manager.io/v1", "Certificate", CERTIFICATE),
    "Issuer": custom("cert-manager.io/v1", "Issuer", ISSUER),
    "PodMonitor": custom(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        exactly(
            {"selector": exactly({"matchLabels": TEXTS}), "podMetricsEndpoints": {"type": "array", "items": ENDPOINT}}
        ),
    ),
    "PrometheusRule": custom(
        "monitoring.coreos.com/v1", "PrometheusRule", exactly({"groups": {"type": "array", "items": GROUP}})
    ),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_fits_the_strict_schema(overlay: str, version: str) -> None:
    for one in objects(overlay):
        if one["kind"] in OPERATOR:
            jsonschema.validate(one, OPERATOR[one["kind"]])
        else:
            kubernetes_validate.validate(one, version, strict=True)


def test_the_schemas_refuse_what_is_misspelt() -> None:
    wrong = named("gpu", "DaemonSet", "longhaul-peerd")
    wrong["spec"]["template"]["spec"]["hostNetwrok"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="hostNetwrok"):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)
    monitor = named("gpu-monitored", "PodMonitor", "longhaul-peerd")
    monitor["spec"]["podMetricsEndpoints"][0]["prot"] = "http"
    with pytest.raises(jsonschema.ValidationError, match="prot"):
        jsonschema.validate(monitor, OPERATOR["PodMonitor"])


# -------------------------------------------------------------------- the renderer


def real_kustomize() -> list[str]:
    """The command of a kustomize that knows all features that are used; empty: there is none."""
    if path := shutil.which("kustomize"):
        return [path, "build"]
    if path := shutil.which("kubectl"):
        # kubectl before 1.22 holds a kustomize of 2019.
        shown = subprocess.run([path, "version", "--client"], capture_output=True, text=True).stdout
        found = re.search(r"[Kk]ustomize ?Version: v?(\d+)", shown)
        if found and int(found[1]) >= 5:
            return [path, "kustomize"]
    return []


@pytest.mark.skipif(not real_kustomize(), reason="neither kustomize nor kubectl (1.27 or newer) is on this machine")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_real_kustomize_renders_the_same(overlay: str) -> None:
    command = [*real_kustomize(), str(KUBERNETES / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

    def by_name(rendered: list[Object]) -> dict[tuple[str, str], Object]:
        return {(one["kind"], one["metadata"]["name"]): one for one in rendered}

    assert by_name(objects(overlay)) == by_name(list(yaml.safe_load_all(done.stdout)))


def test_derived_manifests_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("derive", KUBERNETES / "derive.py")
    assert spec and spec.loader
    derive = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(derive)
    stale = [str(path.relative_to(ROOT)) for path, content in derive.DERIVED.items() if path.read_text() != content()]
    assert stale == [], "run deploy/kubernetes/derive.py"


# -------------------------------------------------------------------- what belongs together


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_named_is_there(overlay: str) -> None:
    rendered = objects(overlay)
    there = {(one["kind"], one["metadata"]["name"]) for one in rendered}
    pods = [template["metadata"]["labels"] for template in templates(overlay).values()]
    for one in rendered:
        spec = one.get("spec", {})
        for selector in (spec.get("selector"), spec.get("podSelector")):
            if selector:
                wanted = selector.get("matchLabels", selector)
                assert [labels for labels in pods if wanted.items() <= labels.items()], (one["kind"], wanted)
    for template in templates(overlay).values():
        pod = template["spec"]
        if "serviceAccountName" in pod:
            assert ("ServiceAccount", pod["serviceAccountName"]) in there
        if "priorityClassName" in pod:
            assert ("PriorityClass", pod["priorityClassName"]) in there
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in there
        volumes = {volume["name"] for volume in pod["volumes"]}
        used = {
            mount["name"]
            for kind in ("initContainers", "containers")
            for c in pod.get(kind, [])
            for mount in c["volumeMounts"]
        }
        claimed = {"store"}
        assert used - claimed == volumes
        for container in pod["containers"]:
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in ("readinessProbe", "livenessProbe"):
                if probe in container:
                    assert container[probe]["httpGet"]["port"] in ports
                    assert container[probe]["httpGet"]["path"] in ("/readyz", "/healthz")


@pytest.mark.parametrize("overlay", WITH_DAEMONS)
def test_the_daemons_get_flags_that_they_have_and_ports_that_they_serve(overlay: str) -> None:
    for name, template in templates(overlay).items():
        (container,) = template["spec"]["containers"]
        shown = subprocess.run([find_binary(name), "--help"], capture_output=True, text=True, check=True).stdout
        flags = dict(arg.removeprefix("--").split("=", 1) for arg in container["args"])
        defaults = dict(re.findall(r"^  --([\w-]+)(?:=(.*))?$", shown, re.M))
        assert flags.keys() <= defaults.keys()
        addresses = {**defaults, **flags}
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        served = {int(addresses[flag].rsplit(":", 1)[1]) for flag in ("listen", "http")}
        assert served == set(ports.values())
        # The kubelet reaches /readyz from outside the pod, which loopback would not allow.
        assert not addresses["http"].startswith("127.")
        # A drain ends before Kubernetes kills the pod.
        assert (
            template["spec"]["terminationGracePeriodSeconds"]
            > int(defaults.get("drain-timeout-ms", "2000")) / 1000 + 10
        )
    # Half of its memory.
    peerd = templates(overlay)["longhaul-peerd"]["spec"]["containers"][0]
    (scratch,) = [int(arg.split("=")[1]) for arg in peerd["args"] if arg.startswith("--scratch-limit=")]
    assert 2 * scratch == int(peerd["resources"]["limits"]["memory"].removesuffix("Gi")) << 30


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_are_those_of_this_release(overlay: str) -> None:
    version = re.search(r'kVersion\[\] = "(.*)"', (ROOT / "base" / "daemon" / "version.h").read_text())
    assert version
    targets = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "deploy" / "docker" / "Dockerfile").read_text(), re.M)
    for name, container in containers(overlay):
        image, tag = container["image"].split(":")
        assert tag == version[1], name
        assert image.removeprefix("longhaul/") in targets, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_containers_have_few_rights_and_bounded_memory(overlay: str) -> None:
    for name, template in templates(overlay).items():
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False, name
        # Only peerd is root, which has no right but to lock memory.
        assert (pod["securityContext"].get("runAsUser") == 0) == (name == "longhaul-peerd")
    for name, container in containers(overlay):
        rights = container["securityContext"]
        assert rights["allowPrivilegeEscalation"] is False, name
        assert rights["readOnlyRootFilesystem"] is True, name
        assert rights["capabilities"]["drop"] == ["ALL"], name
        assert rights["capabilities"].get("add", []) == (["IPC_LOCK"] if name.endswith("/peerd") else [])
        assert "memory" in container["resources"]["requests"] and "memory" in container["resources"]["limits"], name


def test_peerd_uses_the_profile_that_its_init_container_lays_down() -> None:
    pod = templates("gpu")["longhaul-peerd"]["spec"]
    (init,) = pod["initContainers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in init["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    source, target = (pathlib.PurePosixPath(argument) for argument in init["command"][-2:])
    assert source.name in named("gpu", "ConfigMap", volumes[mounts[str(source.parent)]]["configMap"]["name"])["data"]
    assert volumes[mounts["/seccomp"]]["hostPath"]["path"] == "/var/lib/kubelet/seccomp"
    profile = pod["containers"][0]["securityContext"]["seccompProfile"]
    assert profile == {"type": "Localhost", "localhostProfile": str(target.relative_to("/seccomp"))}


# -------------------------------------------------------------------- certificates and token

# Stands in for kubectl: keeps what is applied, says what was asked, and answers with a token.
KUBECTL = """#!/bin/sh
echo "$*" >>"$KUBECTL_DIRECTORY/calls"
case "$*" in
  apply*) cat >>"$KUBECTL_DIRECTORY/applied.yaml"; echo --- >>"$KUBECTL_DIRECTORY/applied.yaml" ;;
  *" exec "*) printf '%s\\n' "$KUBECTL_TOKEN" ;;
esac
"""


def make_secrets(directory: pathlib.Path, *arguments: str, token: str = "lht_0123_x") -> dict[str, dict[str, bytes]]:
    """What deploy/kubernetes/secrets applies, by the names of the Secrets."""
    program = directory / "bin" / "kubectl"
    program.parent.mkdir(exist_ok=True)
    program.write_text(KUBECTL)
    program.chmod(0o755)
    applied = directory / "applied.yaml"
    applied.unlink(missing_ok=True)
    path = f"{program.parent}:{pathlib.Path(find_binary('lhctl')).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "KUBECTL_DIRECTORY": str(directory), "KUBECTL_TOKEN": token}
    subprocess.run([KUBERNETES / "secrets", *arguments], env=environment, check=True, timeout=60)
    made = [one for one in yaml.safe_load_all(applied.read_text()) if one]
    for one in made:
        assert one["metadata"]["namespace"] == "longhaul"
        kubernetes_validate.validate(one, VERSIONS[0], strict=True)
    return {
        one["metadata"]["name"]: {key: base64.b64decode(value) for key, value in one["data"].items()} for one in made
    }


def secrets_of(overlay: str) -> Iterator[tuple[Object, Object, dict[str, Object]]]:
    """Each volume with a Secret: the pod's settings, the Secret, and where containers have it, by container."""
    for template in templates(overlay).values():
        for volume in template["spec"]["volumes"]:
            if "secret" in volume:
                mounts = {
                    container["name"]: mount
                    for kind in ("initContainers", "containers")
                    for container in template["spec"].get(kind, [])
                    for mount in container["volumeMounts"]
                    if mount["name"] == volume["name"]
                }
                yield template["spec"], volume["secret"], mounts


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_runs_in_clear(overlay: str) -> None:
    assert "insecure" not in yaml.safe_dump_all(objects(overlay)).lower()


@pytest.mark.parametrize("overlay", WITH_DAEMONS)
def test_each_daemon_reads_secrets_that_something_makes(overlay: str, tmp_path: pathlib.Path) -> None:
    made = make_secrets(tmp_path, "certificates", str(tmp_path / "ca")) | make_secrets(tmp_path, "token")
    # cert-manager makes these three keys, and ca.crt for an Issuer that is a CA.
    by_cert_manager = {
        one["spec"]["secretName"]: {"tls.crt", "tls.key", "ca.crt"}
        for one in objects(overlay)
        if one["kind"] == "Certificate"
    }
    if overlay == "gpu-cert-manager":
        assert by_cert_manager.keys() == {"longhaul-ca", "longhaul-coordinator-tls", "longhaul-peerd-tls"}
    else:
        assert not by_cert_manager
    keys = {name: set(data) for name, data in made.items()}
    # One Secret has the same keys, whatever makes it.
    assert all(keys.get(name, there) == there for name, there in by_cert_manager.items())
    keys |= by_cert_manager
    found: set[tuple[str, str]] = set()
    for pod, secret, mounts in secrets_of(overlay):
        assert secret["secretName"] in keys
        assert not secret.get("optional"), "the pod waits for its secrets"
        user = pod["securityContext"]["runAsUser"]
        assert secret["defaultMode"] == (0o400 if user == 0 else 0o440)
        assert user == 0 or pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
        assert mounts.keys() <= {"coordinator", "peerd"}
        for name, mount in mounts.items():
            # A file that is mounted by subPath would never change.
            assert mount["readOnly"] is True and "subPath" not in mount
            found |= {(name, f"{mount['mountPath']}/{key}") for key in keys[secret["secretName"]]}
    wanted = {
        (name.split("/")[1], argument.split("=")[1])
        for name, container in containers(overlay)
        for argument in container.get("args", [])
        if argument.startswith(("--tls-c", "--tls-key", "--token-file")) and "=/" in argument
    }
    assert wanted == found


@pytest.mark.parametrize("overlay", WITH_DAEMONS)
def test_a_peer_shows_a_certificate_and_a_token(overlay: str) -> None:
    flags = {name: set(container.get("args", [])) for name, container in containers(overlay)}
    assert "--auth=both" in flags["longhaul-coordinator/coordinator"]
    assert "--token-file=/etc/longhaul/token/token" in flags["longhaul-peerd/peerd"]
    # Operators use the loopback of the pod.
    assert not [flag for flag in flags["longhaul-coordinator/coordinator"] if flag.startswith("--admin")]


def names_in(certificate: pathlib.Path) -> set[str]:
    command = ["openssl", "x509", "-in", str(certificate), "-noout", "-ext", "subjectAltName"]
    shown = subprocess.check_output(command, text=True)
    return {name.strip() for name in shown.splitlines()[1].split(",")}


def test_cert_manager_and_lhctl_issue_for_the_same_names(tmp_path: pathlib.Path) -> None:
    make_secrets(tmp_path, "certificates", str(tmp_path / "ca"))
    for name in ("coordinator", "peerd"):
        spec = named("gpu-cert-manager", "Certificate", f"longhaul-{name}")["spec"]
        names = {f"DNS:{dns}" for dns in spec.get("dnsNames", [])} | {f"URI:{uri}" for uri in spec["uris"]}
        assert names == names_in(tmp_path / "ca" / f"{name}.crt")
    peerd = templates("gpu")["longhaul-peerd"]["spec"]["containers"][0]
    (dialled,) = re.findall(r"--coordinator=(\S+):29600", "\n".join(peerd["args"]))
    assert f"DNS:{dialled}" in names_in(tmp_path / "ca" / "coordinator.crt")
    # The Service has this name, in this namespace.
    assert named("gpu", "Service", dialled)["metadata"]["namespace"] == "longhaul"
    issuers = {one["metadata"]["name"]: one for one in objects("gpu-cert-manager") if one["kind"] == "Issuer"}
    for one in objects("gpu-cert-manager"):
        if one["kind"] == "Certificate":
            assert one["spec"]["issuerRef"]["name"] in issuers
    authority = named("gpu-cert-manager", "Certificate", "longhaul-ca")["spec"]
    assert issuers["longhaul"]["spec"]["ca"]["secretName"] == authority["secretName"]


def test_secrets_made_again_have_the_same_ca_and_new_certificates(tmp_path: pathlib.Path) -> None:
    first = make_secrets(tmp_path, "certificates", str(tmp_path / "ca"))
    second = make_secrets(tmp_path, "certificates", str(tmp_path / "ca"))
    for name in ("longhaul-coordinator-tls", "longhaul-peerd-tls"):
        assert [key for key in first[name] if first[name][key] == second[name][key]] == ["ca.crt"]
    assert (tmp_path / "ca").stat().st_mode & 0o777 == 0o700


def test_the_token_comes_from_the_coordinator_once_it_is_ready(tmp_path: pathlib.Path) -> None:
    assert make_secrets(tmp_path, "token", token="lht_ab_cd") == {"longhaul-token": {"token": b"lht_ab_cd\n"}}
    assert (tmp_path / "calls").read_text().splitlines() == [
        "--namespace=longhaul rollout status statefulset/longhaul-coordinator --timeout=300s",
        "--namespace=longhaul exec longhaul-coordinator-0 -- lhctl token create --run=* --label=kubernetes --ttl=365d",
        "apply --server-side --force-conflicts --filename=-",
    ]


# -------------------------------------------------------------------- pods


class Node:
    """A node, played by podman: it runs the pods that a cluster would make from the templates.

    Podman has no controllers, services or kubelet. So what they add is added here: names, addresses, numbers and Secrets.
    Probes are made by the test.
    """

    def __init__(self, engine: Engine, directory: pathlib.Path) -> None:
        self.engine = engine
        self.directory = directory
        self.seccomp = directory / "seccomp"
        self.sockets = directory / "run"
        self.secrets: dict[str, dict[str, bytes]] = {}

    def _mount(self, pod: str, volume: Object, group: int) -> Object:
        """The directory that the kubelet makes of a Secret."""
        secret = volume["secret"]
        place = self.directory / f"{pod}-{volume['name']}"
        place.mkdir()
        for name, content in self.secrets[secret["secretName"]].items():
            (place / name).write_bytes(content)
            os.chown(place / name, 0, group)
            (place / name).chmod(secret["defaultMode"])
        return {"name": volume["name"], "hostPath": {"path": str(place), "type": "Directory"}}

    def play(self, pod: str, template: Object, *more: Object, environment: dict[str, str] | None = None) -> None:
        """Starts a pod of a template, beside other objects that it needs."""
        spec = template["spec"]
        for volume in spec["volumes"]:
            host = {"/run/longhaul": self.sockets, "/var/lib/kubelet/seccomp": self.seccomp}
            if "hostPath" in volume:
                volume["hostPath"] = {"path": str(host[volume["hostPath"]["path"]]), "type": "Directory"}
        group = spec["securityContext"].get("fsGroup", 0)
        used = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
        spec["volumes"] = [
            self._mount(pod, volume, group) if "secret" in volume else volume
            for volume in spec["volumes"]
            if volume["name"] in used or "secret" not in volume
        ]
        # All pods are in the network of the node. A file gives the service its name there, because podman 4.3 ignores
        # the hostAliases of such pods.
        spec["hostNetwork"] = True
        hosts = self.directory / "hosts"
        hosts.write_text("127.0.0.1 localhost longhaul-coordinator\n")
        spec["volumes"].append({"name": "hosts", "hostPath": {"path": str(hosts), "type": "File"}})
        annotations = {}
        profiles = self.seccomp
        for container in spec.get("initContainers", []) + spec["containers"]:
            container["image"] = container["image"].split(":")[0] + ":latest"
            container["volumeMounts"].append({"name": "hosts", "mountPath": "/etc/hosts", "readOnly": True})
            container.pop("livenessProbe", None)
            container.pop("readinessProbe", None)
            container.pop("ports", None)
            given = {"POD_IP": "127.0.0.1", **(environment or {})}
            container["env"] = [{"name": name, "value": value} for name, value in given.items()]
            container["args"] = [expanded(argument, given) for argument in container.get("args", [])]
            # Podman takes a profile of the node from an annotation only, and none from a directory below.
            profile = container["securityContext"].get("seccompProfile", {})
            if profile.get("type") == "Localhost":
                key = f"container.seccomp.security.alpha.kubernetes.io/{container['name']}"
                profiles = (self.seccomp / profile["localhostProfile"]).parent
                annotations[key] = f"localhost/{pathlib.PurePosixPath(profile['localhostProfile']).name}"
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": pod, "labels": template["metadata"]["labels"], "annotations": annotations},
            "spec": spec,
        }
        path = self.directory / f"{pod}.yaml"
        path.write_text(yaml.safe_dump_all([*more, manifest]))
        self.engine.podman("kube", "play", f"--seccomp-profile-root={profiles}", str(path))

    def get(self, url: str) -> int:
        """The status that a page has; 0: nobody answers."""
        code = (
            "import sys, urllib.request, urllib.error\n"
            "try: print(urllib.request.urlopen(sys.argv[1], timeout=10).status)\n"
            "except urllib.error.HTTPError as error: print(error.code)\n"
            "except OSError: print(0)"
        )
        return int(self.engine.inside(sys.executable, "-c", code, url))

    def said(self, pod: str, event: str) -> list[Object]:
        """What a trainer has reported, as long as it runs."""
        assert self.engine.inspect(f"{pod}-trainer")["State"]["Running"], f"{pod} has ended"
        lines = self.engine.logs(f"{pod}-trainer").splitlines()
        return [told for line in lines if line.startswith("{") and (told := json.loads(line))["event"] == event]

    def logs(self) -> str:
        names = self.engine.podman("ps", "--all", "--format={{.Names}}").split()
        return "\n".join(f"--- {name}\n{self.engine.logs(name)[-3000:]}" for name in names)


def expanded(argument: str, environment: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], argument)


def until(what: str, condition: Callable[[], Any], seconds: float = 600) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)
    return found


@pytest.fixture
def node(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    directory = tmp_path_factory.mktemp("node")
    node = Node(engine, directory)
    # What type: DirectoryOrCreate makes: directories of root.
    node.seccomp.mkdir(mode=0o755)
    node.sockets.mkdir(mode=0o755)
    try:
        yield node
    finally:
        print(node.logs())
        engine.podman("pod", "rm", "--all", "--force", "--time=0")
        engine.podman("volume", "rm", "--all", "--force")


def test_the_pods_of_the_overlays_run_and_train(node: Node) -> None:
    node.secrets = make_secrets(node.directory, "certificates", str(node.directory / "ca"))
    coordinator = templates("cpu")["longhaul-coordinator"]
    (claim,) = named("cpu", "StatefulSet", "longhaul-coordinator")["spec"]["volumeClaimTemplates"]
    claim |= {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    coordinator["spec"]["volumes"].append({"name": "store", "persistentVolumeClaim": {"claimName": "store"}})
    node.play("longhaul-coordinator-0", coordinator, claim)
    until("the coordinator is ready", lambda: node.get("http://127.0.0.1:29601/readyz") == 200)
    pod = "longhaul-coordinator-0-coordinator"
    token = node.engine.podman("exec", pod, "lhctl", "token", "create", "--run=*").strip()
    node.secrets |= make_secrets(node.directory, "token", token=token)

    # The kubelet reads the profile after the init container has written it, and podman before.
    peerd = templates("cpu")["longhaul-peerd"]
    before = copy.deepcopy(peerd)
    before["spec"]["containers"] = before["spec"].pop("initContainers")
    before["spec"]["restartPolicy"] = "Never"
    profile = named("cpu", "ConfigMap", "longhaul-seccomp")
    node.play("before", before, profile)
    laid = node.seccomp / "longhaul" / "seccomp-peerd.json"
    until(
        "the init container has ended",
        lambda: node.engine.inspect("before-seccomp-profile")["State"]["Status"] == "exited",
    )
    assert laid.read_text() == profile["data"]["seccomp-peerd.json"]
    del peerd["spec"]["initContainers"]
    peerd["spec"]["volumes"] = [volume for volume in peerd["spec"]["volumes"] if "configMap" not in volume]
    node.play("longhaul-peerd-x", peerd)
    until("peerd is ready", lambda: node.get("http://127.0.0.1:29701/readyz") == 200)
    assert node.get("http://127.0.0.1:29701/healthz") == 200
    log = node.engine.logs("longhaul-peerd-x-peerd")
    assert "epoll instead of io_uring" not in log
    assert '"auth":"both","admin_auth":"none"' in node.engine.logs(pod)

    for index in range(2):
        trainer = templates("trainer-cpu")["longhaul-trainer"]
        node.play(f"longhaul-trainer-{index}", trainer, environment={"JOB_COMPLETION_INDEX": str(index)})
    until(
        "both train together", lambda: [told for told in node.said("longhaul-trainer-0", "round") if told["size"] == 2]
    )
    members = node.engine.podman("exec", "longhaul-coordinator-0-coordinator", "lhctl", "members")
    assert members.count("longhaul-peerd-x") == 2, members

    node.engine.podman("pod", "stop", "--time=60", "longhaul-peerd-x")
    assert node.engine.inspect("longhaul-peerd-x-peerd")["State"]["ExitCode"] == 0
    assert "drained; closing" in node.engine.logs("longhaul-peerd-x-peerd")
    assert node.get("http://127.0.0.1:29601/readyz") == 200
