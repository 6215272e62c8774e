"""Write into each golden file what the code of today makes of its request.

A changed hash parts routers of different releases from one another: it belongs into the
changelog. A new case is a file with `path`, `headers` and `body`; run this to complete it.
"""

import json
from pathlib import Path

from extproc.core.endpoint import Endpoint
from extproc.core.events import EndpointUp
from extproc.core.intake import IntakeSettings, identify, read_request
from extproc.core.router import Router, RouterSettings

FOLDER = Path(__file__).parent
ENDPOINTS = [Endpoint.parse(f"10.0.0.{host}:8000") for host in (1, 2, 3, 4)]


def new_router():
    router = Router(RouterSettings(), router_id="golden")
    for endpoint in ENDPOINTS:
        router.apply(EndpointUp(endpoint=endpoint), 0.0)
    return router


def shown(number):
    return f"{number:016x}"


def outcome(case):
    """Say what a request is known by, and where a router that saw nothing yet sends it."""
    asked = (case["path"], case["headers"], case["body"].encode())
    known = identify(*asked, complete=True, settings=IntakeSettings())
    request = read_request(*asked, complete=True, subset=None, settings=IntakeSettings())
    decision = new_router().route(request, 0.0)
    return {
        "prompt": [
            [f"{segment.kind}: {len(segment.data)} bytes" for segment in sequence]
            for sequence in known.prompt.sequences
        ],
        "model": known.model,
        "session": [known.session.value, known.session.source] if known.session else None,
        "prompt_tokens": request.prompt_tokens,
        "namespace": shown(known.namespace),
        "tier1": shown(known.tier1),
        "tier2": shown(known.tier2),
        "chains": [[shown(block) for block in chain] for chain in known.chains],
        "decision": {"endpoints": list(decision.endpoints), "reason": decision.reason},
    }


def update():
    for file in sorted(FOLDER.glob("*.json")):
        case = json.loads(file.read_text())
        request = {name: case[name] for name in ("path", "headers", "body")}
        made = json.dumps(request | {"outcome": outcome(case)}, indent=1, ensure_ascii=False)
        file.write_text(made + "\n")


if __name__ == "__main__":
    update()
