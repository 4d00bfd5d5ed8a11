"""Checks a custom resource against its definition as an API server with strict field validation would.

Nulls are pruned and defaults filled in first; then unknown fields, wrong types, duplicate list keys and failed CEL
rules are errors. Rules on transitions (oldSelf) are skipped: a resource is checked as if it were being created.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celpy
import yaml
from celpy.adapter import json_to_cel
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

COPIED_KEYWORDS = (
    *("enum", "minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "minProperties"),
    *("maxProperties", "required", "multipleOf", "default", "uniqueItems", "not"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations"),
)
STRING_META = (
    *("name", "generateName", "namespace", "uid", "resourceVersion", "selfLink"),
    *("creationTimestamp", "deletionTimestamp"),
)
OBJECT_META = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        **{name: {"type": "string"} for name in STRING_META},
        "generation": {"type": "integer"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
        "finalizers": {"type": "array", "items": {"type": "string"}},
    },
}
# libyaml reads the megabytes of a definition ten times faster, where PyYAML was built with it.
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Schema = dict[str, Any]


def load_definition(path: Path) -> dict[str, Schema]:
    """The strict JSON schema of each served version, by apiVersion, of the one definition in the file."""
    definition = yaml.load(path.read_text(), Loader)["spec"]
    schemas = {}
    for version in definition["versions"]:
        if version.get("served"):
            schema = _convert(version["schema"]["openAPIV3Schema"])
            schema["properties"] |= {
                "apiVersion": {"const": f"{definition['group']}/{version['name']}"},
                "kind": {"const": definition["names"]["kind"]},
                "metadata": OBJECT_META,
            }
            schema["required"] = sorted({"apiVersion", "kind", "metadata", *schema.get("required", [])})
            schemas[f"{definition['group']}/{version['name']}"] = schema
    return schemas


def errors_of(resource: Any, schema: Schema) -> list[str]:
    """What is wrong with the resource, each with its place in it."""
    filled = copy.deepcopy(resource)
    _prune_nulls(schema, filled)
    _fill_defaults(schema, filled)
    return [
        f"{'.'.join(map(str, error.absolute_path)) or 'resource'}: {error.message[:300]}"
        for error in StrictValidator(schema).iter_errors(filled)
    ]


def _convert(schema: Any) -> Any:
    """A structural schema as a strict JSON schema."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        pattern = {"pattern": schema["pattern"]} if "pattern" in schema else {}
        return {"type": ["integer", "string", *(["null"] if schema.get("nullable") else [])], **pattern}
    converted = {keyword: schema[keyword] for keyword in COPIED_KEYWORDS if keyword in schema}
    for keyword in ("allOf", "anyOf", "oneOf"):
        if keyword in schema:
            converted[keyword] = [_convert(part) if part.get("properties") else part for part in schema[keyword]]
    if "type" in schema:
        converted["type"] = [schema["type"], "null"] if schema.get("nullable") else schema["type"]
    if "items" in schema:
        converted["items"] = _convert(schema["items"])
    return converted | _convert_fields(schema)


def _convert_fields(schema: Schema) -> Schema:
    converted: Schema = {}
    if "properties" in schema:
        converted["properties"] = {name: _convert(field) for name, field in schema["properties"].items()}
    if "additionalProperties" in schema:
        converted["additionalProperties"] = _convert(schema["additionalProperties"])
    elif "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        converted["additionalProperties"] = False
    return converted


def _children(schema: Schema, value: Any) -> Iterator[tuple[Schema, Any]]:
    """The parts of the value whose schema is known, with it."""
    if isinstance(value, dict):
        others = schema.get("additionalProperties")
        for name, part in value.items():
            part_schema = schema.get("properties", {}).get(name, others)
            if isinstance(part_schema, dict):
                yield part_schema, part
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for part in value:
            yield schema["items"], part


def _prune_nulls(schema: Schema, value: Any) -> None:
    """The server drops `key: null` where the field is not nullable."""
    if isinstance(value, dict):
        for part_schema, name in [(schema.get("properties", {}).get(name), name) for name in value]:
            if value[name] is None and part_schema and "null" not in (part_schema.get("type") or []):
                del value[name]
                return _prune_nulls(schema, value)
    for part_schema, part in _children(schema, value):
        _prune_nulls(part_schema, part)
    return None


def _fill_defaults(schema: Schema, value: Any) -> None:
    if isinstance(value, dict):
        for name, part_schema in schema.get("properties", {}).items():
            if name not in value and "default" in part_schema:
                value[name] = copy.deepcopy(part_schema["default"])
    for part_schema, part in _children(schema, value):
        _fill_defaults(part_schema, part)


def _check_list(_validator: object, list_type: str, items: Any, schema: Schema) -> Iterator[ValidationError]:
    if not isinstance(items, list) or list_type not in ("map", "set"):
        return
    keys = schema.get("x-kubernetes-list-map-keys", [])
    seen = set()
    for item in items:
        key = repr([item.get(name) for name in keys]) if list_type == "map" and isinstance(item, dict) else repr(item)
        if key in seen:
            yield ValidationError(f"duplicate item {key}")
        seen.add(key)


def _check_rules(
    _validator: object, rules: list[dict[str, str]], value: Any, _schema: Schema
) -> Iterator[ValidationError]:
    environment = celpy.Environment()
    for rule in rules:
        if "oldSelf" in rule["rule"]:
            continue
        program = environment.program(environment.compile(rule["rule"]))
        if not program.evaluate({"self": json_to_cel(value)}):
            yield ValidationError(rule.get("message") or f"failed rule: {rule['rule']}")


StrictValidator = extend(
    Draft202012Validator, {"x-kubernetes-list-type": _check_list, "x-kubernetes-validations": _check_rules}
)
