"""Sound tool schemas, as common libraries write them."""

_BOUND = 2**53 - 1

CLIENT_SCHEMAS = {
    "zod": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "path": {"type": "string", "minLength": 1, "maxLength": 9, "description": "A file."},
            "line": {"type": "integer", "minimum": -_BOUND, "maximum": _BOUND},
            "mode": {"type": "string", "enum": ["read", "write"], "default": "read"},
            "limit": {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]},
            "never": {"not": {}},
        },
        "required": ["path", "mode"],
        "additionalProperties": False,
    },
    "a choice of zod that may be null": {
        "type": "object",
        "properties": {
            "colors": {"anyOf": [{"type": "string", "enum": ["active", "none"]}, {"type": "null"}]}
        },
        "required": ["colors"],
        "additionalProperties": False,
    },
    "a union of zod": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "action": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"kind": {"type": "string", "const": "go"}},
                        "required": ["kind"],
                        "additionalProperties": False,
                    },
                    {
                        "type": "object",
                        "properties": {
                            "kind": {"type": "string", "const": "say"},
                            "text": {"type": "string", "maxLength": 5},
                        },
                        "required": ["kind", "text"],
                        "additionalProperties": False,
                    },
                ]
            }
        },
        "required": ["action"],
    },
    "pydantic": {
        "$defs": {
            "Color": {"enum": ["red", "green"], "title": "Color", "type": "string"},
            "Item": {
                "properties": {
                    "name": {"maxLength": 5, "title": "Name", "type": "string"},
                    "color": {"$ref": "#/$defs/Color", "default": "red"},
                    "count": {
                        "anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}],
                        "default": None,
                        "title": "Count",
                    },
                },
                "required": ["name"],
                "title": "Item",
                "type": "object",
            },
        },
        "properties": {
            "items": {
                "items": {"$ref": "#/$defs/Item"},
                "maxItems": 2,
                "title": "Items",
                "type": "array",
            },
            "first": {"allOf": [{"$ref": "#/$defs/Item"}], "description": "The first."},
        },
        "required": ["items"],
        "title": "Order",
        "type": "object",
    },
    "an older pydantic": {
        "title": "Order",
        "type": "object",
        "properties": {"item": {"$ref": "#/definitions/Item"}},
        "required": ["item"],
        "definitions": {
            "Item": {
                "title": "Item",
                "type": "object",
                "properties": {"id": {"title": "Id", "type": "integer", "maximum": 99}},
                "required": ["id"],
            }
        },
    },
    "a server of tools": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "state": {"type": ["string", "null"], "enum": ["open", "closed", None]},
            "labels": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
            "page": {"type": "number", "minimum": 1, "examples": [1]},
            "owner": {"$ref": "#/properties/repo"},
            "repo": {"type": "string", "maxLength": 6},
        },
        "required": ["owner", "repo"],
        "anyOf": [{"required": ["state"]}, {"required": ["page"], "properties": {"state": False}}],
    },
    "one of several": {
        "type": "object",
        "properties": {"id": {"type": "integer", "maximum": 9}, "url": {"type": "string"}},
        "anyOf": [{"required": ["id"]}, {"required": ["url"]}],
    },
    "exactly one of several, and a pair": {
        "type": "object",
        "properties": {
            "url": {"type": "string", "maxLength": 5},
            "id": {"type": "integer", "maximum": 9},
            "x": {"type": "integer", "minimum": 0, "maximum": 9},
            "y": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "oneOf": [{"required": ["url"]}, {"required": ["id"]}],
        "dependentRequired": {"x": ["y"], "id": ["x"]},
    },
    "a base with more": {
        "allOf": [
            {
                "type": "object",
                "properties": {"id": {"type": "integer", "minimum": 1}},
                "required": ["id"],
            },
            {"type": "object", "properties": {"id": {"maximum": 9}, "on": {"type": "boolean"}}},
        ]
    },
    "an intersection of zod": {
        "allOf": [
            {
                "type": "object",
                "properties": {"id": {"type": "integer", "maximum": 9}},
                "required": ["id"],
            },
            {"type": "object", "properties": {"on": {"type": "boolean"}}},
        ],
        "unevaluatedProperties": False,
    },
    "conditions": {
        "type": "object",
        "properties": {
            "kind": {"type": "string", "enum": ["file", "link", "folder"]},
            "path": {"type": "string", "maxLength": 5},
            "target": {"type": "string", "maxLength": 5},
            "mode": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["kind"],
        "allOf": [
            {"if": {"properties": {"kind": {"const": "file"}}}, "then": {"required": ["path"]}},
            {
                "if": {"properties": {"kind": {"const": "link"}}},
                "then": {"required": ["target"]},
                "else": {"not": {"required": ["target"]}},
            },
            {"not": {"properties": {"mode": {"maximum": 3}}, "required": ["mode"]}},
        ],
        "dependentSchemas": {"mode": {"required": ["path"]}},
        "additionalProperties": False,
    },
    "what is required only": {
        "type": "object",
        "properties": {},
        "required": ["total"],
        "additionalProperties": {"type": "integer"},
    },
}
