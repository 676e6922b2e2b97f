"""Reads a DecoderDeployment from a file, and says what is wrong with it in the words of its author."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from decodefleet_operator.api import API_VERSION, KIND, DecoderDeployment
from decodefleet_operator.invalid import explain
from decodefleet_operator.local.home import FleetError


class ManifestError(FleetError):
    """The file cannot be used; the message names file, field and what to change."""


def read(path: str) -> DecoderDeployment:
    """The one DecoderDeployment in a YAML or JSON file. Raises ManifestError."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: {getattr(error, 'strerror', None) or 'is not text in UTF-8'}") from error
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ManifestError(f"{path}{_where(error)}") from error
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
        return DecoderDeployment.model_validate({k: v for k, v in document.items() if k != "status"})
    except ValidationError as error:
        raise ManifestError("\n".join(f"{path}: {line}" for line in explain(error, DecoderDeployment))) from error


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    context = getattr(error, "context", None)
    place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    return f"{place}: is not YAML: {problem}" + (f" ({context})" if context else "")
