"""Renders the kustomizations of deploy/kubernetes as `kubectl kustomize` does, where that is missing.

Knows only the features that are used there; anything else is a ValueError. test_kubernetes.py compares it with the real
one.
"""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import yaml

Object = dict[str, Any]
_KINDS = {"Kustomization": "kustomize.config.k8s.io/v1beta1", "Component": "kustomize.config.k8s.io/v1alpha1"}


def render(directory: pathlib.Path) -> list[Object]:
    """The objects of a directory with a kustomization.yaml."""
    # The real one finishes each base before it goes on, too.
    return _accumulate(directory, [])


def _accumulate(directory: pathlib.Path, objects: list[Object]) -> list[Object]:
    settings = yaml.safe_load((directory / "kustomization.yaml").read_text())
    kind = settings.pop("kind")
    if settings.pop("apiVersion") != _KINDS[kind]:
        raise ValueError(f"{directory}: {kind} needs apiVersion {_KINDS[kind]}")
    for name in settings.pop("resources", []):
        path = directory / name
        objects = objects + (render(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text())))
    for component in settings.pop("components", []):
        objects = _accumulate(directory / component, objects)
    for generator in settings.pop("configMapGenerator", []):
        objects = [*objects, _config_map(directory, generator)]
    for patch in settings.pop("patches", []):
        objects = _patched(objects, patch["target"], yaml.safe_load(patch["patch"]))
    for image in settings.pop("images", []):
        for one in objects:
            _set_image(one, **image)
    if settings:
        raise ValueError(f"{directory}: this renderer does not know {', '.join(settings)}")
    return copy.deepcopy(objects)


def _config_map(directory: pathlib.Path, generator: Object) -> Object:
    if generator["options"] != {"disableNameSuffixHash": True}:
        raise ValueError(f"{directory}: this renderer knows only generators with disableNameSuffixHash")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": generator["name"], "namespace": generator["namespace"]},
        "data": {name: (directory / name).read_text() for name in generator["files"]},
    }


def _set_image(value: Any, name: str, newTag: str) -> None:
    if isinstance(value, list):
        for item in value:
            _set_image(item, name, newTag)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key == "image" and isinstance(item, str) and item.split(":")[0] == name:
                value[key] = f"{name}:{newTag}"
            else:
                _set_image(item, name, newTag)


def _patched(objects: list[Object], target: Object, operations: list[Object]) -> list[Object]:
    hit = [one for one in objects if (one["kind"], one["metadata"]["name"]) == (target["kind"], target["name"])]
    if len(hit) != 1:
        raise ValueError(f"a patch is for {target}, and {len(hit)} objects are that")
    changed = copy.deepcopy(hit[0])
    for operation in operations:
        _apply(changed, operation)
    return [changed if one is hit[0] else one for one in objects]


def _apply(value: Any, operation: Object) -> None:
    """One operation of RFC 6902."""
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    for part in way:
        value = value[int(part)] if isinstance(value, list) else value[part]
    key: Any = int(last) if isinstance(value, list) else last
    if operation["op"] == "remove":
        del value[key]
    elif operation["op"] == "replace":
        value[key]  # has to be there
        value[key] = operation["value"]
    elif operation["op"] == "add" and isinstance(value, dict):
        value[key] = operation["value"]
    else:
        raise ValueError(f"this renderer does not know {operation}")
