"""Which dialect an endpoint speaks, from what it answers.

/v1/models names the engine and changes nothing anywhere; metrics pages are looked at only
where it does not, TensorRT-LLM's first, since reading its /metrics would take from others.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from extproc.adapters.engines.sglang import SGLANG
from extproc.adapters.engines.trtllm import TRTLLM
from extproc.adapters.engines.vllm import VLLM

if TYPE_CHECKING:
    from extproc.adapters.engines.reading import Dialect

MODELS_PATH = "/v1/models"

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (VLLM, SGLANG, TRTLLM)}
"""Every dialect by its name in the config."""

PAGES: tuple[str, ...] = (TRTLLM.path, VLLM.path)
"""Metrics pages in the order in which an endpoint of no known owner is asked for them."""


def recognise_models(answer: str) -> Dialect | None:
    """Recognise the engine by its list of models; None when it names no known owner."""
    try:
        models = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    data = models.get("data") if isinstance(models, dict) else None
    for model in data if isinstance(data, list) else ():
        owner = model.get("owned_by") if isinstance(model, dict) else None
        for dialect in DIALECTS.values():
            if owner == dialect.owner:
                return dialect
    return None


def recognise_page(page: str) -> Dialect | None:
    """Recognise the engine by the names on its metrics page; None for no known names."""
    for dialect in DIALECTS.values():
        if page.startswith(dialect.prefix) or f"\n{dialect.prefix}" in page:
            return dialect
    return None
