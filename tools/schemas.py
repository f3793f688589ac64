"""Write the JSON Schemas of the executor protocol into docs/spec/; review the diff afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from ergon_framework.executors.protocol import ExecutionOutcome, ExecutionRequest

FOLDER: Final = Path(__file__).parents[1] / "docs" / "spec"
MESSAGES: Final[dict[str, type[BaseModel]]] = {
    "execution-request.schema.json": ExecutionRequest,
    "execution-outcome.schema.json": ExecutionOutcome,
}


def build_schema(name: str) -> str:
    """Return the schema for the file *name*."""
    document: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    document |= MESSAGES[name].model_json_schema()
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    for name in MESSAGES:
        (FOLDER / name).write_text(build_schema(name), encoding="utf-8")
        print(name)
