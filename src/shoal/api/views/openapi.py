"""The description of the API: FastAPI's own schema, with the bodies we read ourselves and the problems we
answer.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter

from shoal import __version__
from shoal.api import requests
from shoal.api.http.problems import MEDIA_TYPE
from shoal.api.routing import BODY_FIELD, PERMISSION_FIELD
from shoal.api.views.schema import ProblemView
from shoal.spec import flags_schema, job_schema
from shoal.spec.parse import service_schema

REF = "#/components/schemas/"
ARCHIVE_BODY = {
    "required": True,
    "content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}},
}
MUTATIONS = ("post", "put", "patch", "delete")
KEY_PARAMETER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key for a repeated request: the change happens once.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,200}$"},
}

LINKS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "submit_job": (
        "201",
        {"job_id": "$response.body#/jobs/0/job_id"},
        ("show_job", "explain_job", "read_logs", "stop_job", "retry_job"),
    ),
    "create_token": ("201", {"token_id": "$response.body#/id"}, ("revoke_token",)),
    "create_user": ("201", {"name": "$response.body#/name"}, ("update_user",)),
    "create_project": ("201", {"name": "$response.body#/name"}, ("update_project", "list_members")),
}
"""What a client can do next with a reply: (status, parameters, operations)."""


def schema_bytes(app: FastAPI) -> bytes:
    """Return the schema as JSON. It is built and encoded once for each application."""
    if app.openapi_schema is None:
        app.openapi_schema = build_schema(app)
        app.state.schema_bytes = msgspec.json.encode(app.openapi_schema)
    encoded: bytes = app.state.schema_bytes
    return encoded


def build_schema(app: FastAPI) -> dict[str, Any]:
    """The whole description. `x-shoal-permission` names what a route needs."""
    schema = get_openapi(
        title="Shoal",
        version=__version__,
        description="Many machines, one AI cluster. Errors are RFC 9457 problem documents.",
        routes=app.routes,
    )
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    _put(components, "ProblemView", TypeAdapter(ProblemView).json_schema(ref_template=REF + "{model}"))
    _put(components, "JobSpec", job_schema())
    _put(components, "JobFlags", flags_schema())
    _put(components, "ServiceSpec", service_schema())
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            _complete(operation, method, path, components)
    for leftover in ("HTTPValidationError", "ValidationError"):
        components.pop(leftover, None)
    return schema


def _complete(operation: dict[str, Any], method: str, path: str, components: dict[str, Any]) -> None:
    """Security, body, idempotency key and problems of one operation."""
    if operation.get(PERMISSION_FIELD) != "open":
        operation["security"] = [{"token": []}]
    operation["responses"].pop("422", None)
    problem = {"content": {MEDIA_TYPE: {"schema": {"$ref": f"{REF}ProblemView"}}}}
    operation["responses"]["4XX"] = {"description": "Refused.", **problem}
    operation["responses"]["503"] = {"description": "Not now.", **problem}
    _link(operation)
    body = operation.pop(BODY_FIELD, None)
    if body is not None:
        operation["requestBody"] = _body(getattr(requests, body), components)
    elif path.startswith("/v1/archives/") and method == "put":
        operation["requestBody"] = ARCHIVE_BODY
    if method in MUTATIONS and not path.startswith(("/v1/supervisor/", "/v1/serving/")):
        operation.setdefault("parameters", []).append(KEY_PARAMETER)


def _link(operation: dict[str, Any]) -> None:
    if operation["operationId"] in LINKS:
        status, parameters, targets = LINKS[operation["operationId"]]
        links = {target: {"operationId": target, "parameters": parameters} for target in targets}
        operation["responses"][status]["links"] = links


def _body(model: type[BaseModel], components: dict[str, Any]) -> dict[str, Any]:
    schema = model.model_json_schema()
    if model is requests.SubmitBody:
        schema["properties"] |= {"spec": {"$ref": f"{REF}JobSpec"}, "flags": {"$ref": f"{REF}JobFlags"}}
        schema["oneOf"] = [{"required": ["spec"]}, {"required": ["flags"]}]
    if model is requests.ServeBody:
        schema["properties"]["spec"] = {"$ref": f"{REF}ServiceSpec"}
    _put(components, model.__name__, schema)
    return {
        "required": "required" in schema or "oneOf" in schema,
        "content": {"application/json": {"schema": {"$ref": REF + model.__name__}}},
    }


def _put(components: dict[str, Any], name: str, schema: dict[str, Any]) -> None:
    """Add a schema. Its own definitions get names that cannot collide."""
    definitions = schema.pop("$defs", {})
    schema.pop("$schema", None)
    schema.pop("$id", None)
    for inner, definition in definitions.items():
        components[f"{name}.{inner}"] = _renamed(definition, name)
    components[name] = _renamed(schema, name)


def _renamed(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {
            key: f"{REF}{name}.{ref.removeprefix('#/$defs/')}"
            if key == "$ref" and isinstance(ref := item, str) and ref.startswith("#/$defs/")
            else _renamed(item, name)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_renamed(item, name) for item in value]
    return value
