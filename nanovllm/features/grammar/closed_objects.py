"""Closes the objects of a JSON schema: no properties except the named ones, unless it says otherwise.

JSON Schema takes any further property of an object. A client that asks for a document means those of its class; a
model that may invent others often finds no end. llama.cpp reads schemas so too.

An object is closed after composition, as by `unevaluatedProperties: false`: the parts of `allOf` and the target of
`$ref` stay open where they are combined, and a last part lists the properties of all. Each branch of `anyOf` and
`oneOf` is closed with the properties around it. So a definition has two forms, open within a composition and closed as
a value.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

# Keywords that say otherwise, or that a list of names would contradict.
_OWN_SAY = (
    "additionalProperties", "unevaluatedProperties", "enum", "const", "if", "not", "dependentSchemas",
    "$dynamicRef", "propertyNames",
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf")
_BRANCHES = ("anyOf", "oneOf")
_PARTS = ("items", "contains", "additionalItems", "unevaluatedItems", "additionalProperties", "unevaluatedProperties")
_DEFINITIONS = ("$defs", "definitions")
MAX_CHAIN = 50  # definitions combined in a row
MAX_NAMES = 200_000  # names of properties that are collected for one schema


def with_closed_objects(schema: Any) -> Any:
    """Return the schema with closed objects; one with `$id` within, or references by other names, stays open there.

    Raises ValueError for compositions of more than MAX_NAMES names, or MAX_CHAIN definitions in a row.
    """
    if not isinstance(schema, dict) or any("$id" in part for part in _schemas_within(schema)):
        return schema
    return _Closing(schema).whole()


def _schemas_within(schema: Any) -> Iterator[Schema]:
    for value in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        if isinstance(value, dict):
            yield value
        yield from _schemas_within(value)


@dataclass(slots=True)
class _Names:
    """Properties and patterns that a composition names, and whether it may be closed."""

    properties: dict[str, None] = field(default_factory=dict)  # names in order; the values are unused
    patterns: dict[str, None] = field(default_factory=dict)
    is_free: bool = False

    def add(self, other: _Names) -> None:
        self.properties |= other.properties
        self.patterns |= other.patterns
        self.is_free = self.is_free or other.is_free

    @property
    def matter(self) -> bool:
        """Whether they tell anything of a composition's objects."""
        return bool(self.properties or self.patterns or self.is_free)

    @property
    def may_close(self) -> bool:
        return bool(self.properties or self.patterns) and not self.is_free

    def closing(self) -> Schema:
        """Schema that takes these names alone."""
        made: Schema = {"properties": dict.fromkeys(self.properties, True), "additionalProperties": False}
        return made | {"patternProperties": dict.fromkeys(self.patterns, True)} if self.patterns else made


class _Closing:
    """Closing of one schema; references are pointers into it."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._forms: dict[tuple[str, bool], str] = {}  # (reference, whether it is open) -> name of the definition
        self._num_names = 0

    def whole(self) -> Schema:
        made: Schema = self._value({name: part for name, part in self._root.items() if name not in _DEFINITIONS})
        kept = {name: self._root[name] for name in _DEFINITIONS if name in self._root and self._names_others()}
        forms: Schema = {}
        while len(forms) < len(self._forms):  # each form may need others, and itself
            for (reference, is_open), name in list(self._forms.items())[len(forms) :]:
                target = self._target(reference)
                forms[name] = self._open(target) if is_open else self._value(target)
        if forms:
            kept["$defs"] = kept.get("$defs", {}) | forms
        return made | kept

    def _names_others(self) -> bool:
        """Whether a reference is no pointer, so that the definitions stay as they were too."""
        parts = [self._root, *_schemas_within(self._root)]
        return any("$ref" in part and self._target(part["$ref"]) is None for part in parts)

    # ------------------------------------------------------------------------------------------------------- forms

    def _value(self, schema: Any, around: _Names | None = None) -> Any:
        """The closed form of a schema that stands for a whole value.

        Args:
            around: names of the composition that it is a branch of.
        """
        if not isinstance(schema, dict):
            return schema
        if around is None and set(schema) - _NOTES == {"$ref"} and self._target(schema["$ref"]) is not None:
            return schema | {"$ref": self._definition(schema["$ref"], is_open=False)}
        names = self._names(schema)
        if around is not None:
            names.add(around)
        if not (names.may_close or self._has_branches(schema)) or not _may_be_object(schema):
            return self._open(schema)
        groups = [name for name in _BRANCHES if any(self._names(part).matter for part in _listed(schema, name))]
        if groups:
            made = self._open({name: part for name, part in schema.items() if name not in groups})
            for group in groups:
                beside = self._names({name: part for name, part in schema.items() if name != group})
                if around is not None:
                    beside.add(around)
                each = beside if beside.matter else None
                made[group] = [self._value(part, each) for part in _listed(schema, group)]
            return made
        made = self._open(schema)
        if not any(name in schema for name in (*_LISTS, "$ref")) and names.properties.keys() <= _keys(schema):
            return made | {"additionalProperties": False}
        return made | {"allOf": [*made.get("allOf", ()), names.closing()]}

    def _open(self, schema: Any) -> Any:
        """The form of a part of a composition: the values within are closed, it is not."""
        if not isinstance(schema, dict):
            return schema
        made = dict(schema)
        for name in ("properties", "patternProperties"):
            if isinstance(schema.get(name), dict):
                made[name] = {key: self._value(part) for key, part in schema[name].items()}
        for name in _PARTS:
            if name in schema:
                made[name] = self._value(schema[name])
        if isinstance(schema.get("prefixItems"), list):
            made["prefixItems"] = [self._value(part) for part in schema["prefixItems"]]
        for name in _LISTS:
            if isinstance(schema.get(name), list):
                made[name] = [self._open(part) for part in schema[name]]
        if "$ref" in schema and self._target(schema["$ref"]) is not None:
            made["$ref"] = self._definition(schema["$ref"], is_open=True)
        return made

    def _definition(self, reference: str, *, is_open: bool) -> str:
        """A reference to the form of a reference's target, which `whole` makes, once."""
        if (name := self._forms.get((reference, is_open))) is None:
            self._forms[reference, is_open] = name = f"form-{len(self._forms)}"
        return f"#/$defs/{name}"

    @staticmethod
    def _has_branches(schema: Schema) -> bool:
        return any(name in schema for name in _BRANCHES)

    # ------------------------------------------------------------------------------------------------------- names

    def _names(self, schema: Any, above: tuple[str, ...] = ()) -> _Names:
        """Names of a composition.

        Args:
            above: references that lead here.
        """
        found = _Names()
        if not isinstance(schema, dict):
            return found
        found.is_free = any(name in schema for name in _OWN_SAY)
        found.properties = dict.fromkeys(_keys(schema))
        least = schema.get("minProperties")
        found.is_free = found.is_free or (isinstance(least, int) and least > len(found.properties))
        required = schema.get("required")
        if found.properties and isinstance(required, list):
            found.properties |= dict.fromkeys(name for name in required if isinstance(name, str))
        patterns = schema.get("patternProperties")
        found.patterns = dict.fromkeys(patterns if isinstance(patterns, dict) else ())
        for name in _LISTS:
            for part in _listed(schema, name):
                names = self._names(part, above)
                names.is_free = names.is_free and name not in _BRANCHES  # each branch of these says it for itself
                found.add(names)
        reference = schema.get("$ref")
        if isinstance(reference, str) and len(above) > MAX_CHAIN:
            raise _too_large(f"combines definitions through more than {MAX_CHAIN} others")
        if isinstance(reference, str) and reference not in above:
            target = self._target(reference)
            found.is_free = found.is_free or target is None
            self._count(len(above))
            found.add(self._names(target, (*above, reference)))
        self._count(1 + len(found.properties))
        return found

    def _count(self, num_names: int) -> None:
        self._num_names += num_names
        if self._num_names > MAX_NAMES:
            raise _too_large(f"has compositions of more than {MAX_NAMES} names of properties")

    def _target(self, reference: Any) -> Any:
        """The schema that a pointer such as #/$defs/Node points at; None for another reference, or if there is none."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        found: Any = self._root
        for part in unquote(reference).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            else:
                return None
        if found is self._root:
            return {name: part for name, part in self._root.items() if name not in _DEFINITIONS}
        return found if isinstance(found, dict | bool) else None


def _too_large(reason: str) -> ValueError:
    return ValueError(
        f"structured_output.json_schema {reason}, so its objects cannot be closed. Set additionalProperties in it, or "
        "open_objects."
    )


# Keywords that say nothing of values.
_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment", "readOnly", "writeOnly"}


def _keys(schema: Mapping[str, Any]) -> KeysView[str]:
    properties = schema.get("properties")
    return properties.keys() if isinstance(properties, dict) else {}.keys()


def _listed(schema: Mapping[str, Any], name: str) -> list[Any]:
    parts = schema.get(name)
    return parts if isinstance(parts, list) else []


def _may_be_object(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type", "object")
    return "object" in (kinds if isinstance(kinds, list) else [kinds])
