"""Reads a DecoderDeployment from a file, and says what is wrong with it in the words of its author."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from yaml.constructor import ConstructorError

from decodefleet_operator.api import API_VERSION, KIND, DecoderDeployment
from decodefleet_operator.invalid import explain
from decodefleet_operator.local.home import FleetError

_TOO_DEEP = f"is nested too deeply for a {KIND}"


class ManifestError(FleetError):
    """The file cannot be used; the message names file, field and what to change."""


def read(path: str) -> DecoderDeployment:
    """The one DecoderDeployment in a YAML or JSON file. Raises ManifestError."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: {getattr(error, 'strerror', None) or 'is not text in UTF-8'}") from error
    try:
        documents = [document for document in yaml.load_all(text, _Loader) if document is not None]
    except yaml.YAMLError as error:
        raise ManifestError(f"{path}{_where(error)}") from error
    except RecursionError as error:
        raise ManifestError(f"{path}: {_TOO_DEEP}") from error
    except ValueError as error:
        raise ManifestError(f"{path}: holds a value that cannot be read: {error}") from error
    fleets = [document for document in documents if not isinstance(document, dict) or document.get("kind") in (KIND, None)]
    if len(fleets) != 1:
        raise ManifestError(f"{path}: holds {len(fleets) or 'no'} {KIND}{'s' if len(fleets) > 1 else ''}; it must hold one")
    return parse(fleets[0], path)


def parse(document: Any, path: str) -> DecoderDeployment:
    """A document as a resource. Raises ManifestError with a line per mistake."""
    if not isinstance(document, dict):
        raise ManifestError(f"{path}: is not a resource; it must begin with `apiVersion: {API_VERSION}` and `kind: {KIND}`")
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if document.get(field) != wanted:
            found = f"is {document[field]!r}" if field in document else "is missing"
            raise ManifestError(f"{path}: {field} {found}; write `{field}: {wanted}`")
    try:
        text = json.dumps({k: v for k, v in document.items() if k != "status"}, default=str)
    except (RecursionError, ValueError) as error:
        raise ManifestError(f"{path}: is no tree of fields: {error}") from error
    try:
        # As an API server does, which takes no "2" or true for a number.
        return DecoderDeployment.model_validate_json(text, strict=True)
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise ManifestError(f"{path}: {_TOO_DEEP}") from error
        raise ManifestError("\n".join(f"{path}: {line}" for line in explain(error, DecoderDeployment))) from error


class _Loader(yaml.SafeLoader):
    """YAML as Kubernetes takes it: what JSON has, and each field once."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML declares it of the instance)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, yaml.Node] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise ConstructorError(None, None, "a field's name must be text; put it in quotes", key.start_mark)
            if key.value in seen:
                line = seen[key.value].start_mark.line + 1
                again = f"{key.value} is here for the second time (first in line {line}); remove one"
                raise ConstructorError(None, None, again, key.start_mark)
            seen[key.value] = key
        return super().construct_mapping(node, deep)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        value = super().construct_yaml_float(node)
        if not math.isfinite(value):
            raise ConstructorError(None, None, f"{node.value} is no number; write a finite one, or leave the field out", node.start_mark)
        return value


_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    context = getattr(error, "context", None)
    place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    if isinstance(error, ConstructorError) and context is None:
        return f"{place}: {problem}"
    return f"{place}: is not YAML: {problem}" + (f" ({context})" if context else "")
