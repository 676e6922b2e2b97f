"""Says what is wrong with a resource in the words of its author: the field's path, what is there, and what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Path = tuple[int | str, ...]


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line per mistake, such as `spec.engine.batching.maxBatch: 0 is below 1`."""
    return [f"{dotted(details['loc']) or 'the resource'}: {_sentence(details, model)}" for details in error.errors(include_url=False)]


def dotted(path: Path) -> str:
    """`spec.sla.objectives[0].target` of ("spec", "sla", "objectives", 0, "target")."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _sentence(details: ErrorDetails, model: type[BaseModel]) -> str:
    value, limits, kind = details["input"], details.get("ctx", {}), details["type"]
    match kind:
        case "missing":
            about = _description(model, details["loc"])
            return "is required" + (f": {about}" if about else "")
        case "extra_forbidden":
            return _unknown_field(model, details["loc"])
        case "greater_than_equal":
            return f"{_shown(value)} is below {limits['ge']}"
        case "less_than_equal":
            return f"{_shown(value)} is above {limits['le']}"
        case "literal_error" | "enum":
            return f"{_shown(value)} is none of {limits['expected']}"
        case "string_pattern_mismatch":
            about = _description(model, details["loc"])
            return f"{_shown(value)} does not fit; " + (about if about else f"it must match {limits['pattern']}")
        case "value_error":
            return str(limits["error"])
        case "string_type" | "int_type" | "float_type" | "bool_type" | "int_parsing" | "float_parsing" | "bool_parsing" | "int_from_float":
            wanted = {"string": "text", "int": "a whole number", "float": "a number", "bool": "true or false"}[kind.split("_")[0]]
            return f"{_shown(value)} is not {wanted}{_quotes(value, wanted)}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{_shown(value)} is not a mapping of fields"
        case "list_type":
            return f"{_shown(value)} is not a list"
    return f"{details['msg']}, not {_shown(value)}"


def _quotes(value: Any, wanted: str) -> str:
    """What to do where only YAML's quotes are wrong."""
    if wanted == "text" and isinstance(value, bool | int | float):
        return f'; put it in quotes: "{_shown(value)}"'
    words = {"true or false": r"true|false", "a whole number": r"-?[0-9]+", "a number": r"-?[0-9]+(\.[0-9]+)?"}.get(wanted)
    return "; write it without quotes" if words and isinstance(value, str) and re.fullmatch(words, value) else ""


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value if len(value) <= 80 else value[:77] + "..."}"'
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence):
        return "a list"
    return str(value)


def _unknown_field(model: type[BaseModel], path: Path) -> str:
    parent = _model_at(model, path[:-1])
    known = [field.alias or name for name, field in parent.model_fields.items()] if parent else []
    close = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.6)
    if close:
        return f"there is no such field; did you mean {close[0]}?"
    return "there is no such field" + (f"; there are {', '.join(known)}" if known else "")


def _description(model: type[BaseModel], path: Path) -> str:
    parent = _model_at(model, path[:-1])
    if parent is None:
        return ""
    for name, field in parent.model_fields.items():
        if path[-1] in (name, field.alias):
            return (field.description or "").rstrip(".")
    return ""


def _model_at(model: type[BaseModel] | None, path: Path) -> type[BaseModel] | None:
    """The model that describes the value at a path, through optionals and lists."""
    for part in path:
        if model is None:
            return None
        if isinstance(part, int):
            continue  # an item of the list that the field before it named
        field = next((f for name, f in model.model_fields.items() if part in (name, f.alias)), None)
        model = _model_in(field.annotation) if field else None
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _model_in(inner)) is not None), None)
