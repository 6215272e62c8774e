import socket

import pytest
from aiohttp import ClientSession

from extproc.adapters.admin import AdminServer, AdminSources
from extproc.core.endpoint import Endpoint
from extproc.core.prediction import Tally
from extproc.core.router import EndpointView

VIEW = EndpointView(
    endpoint=Endpoint("10.0.0.1:8000"),
    weight=1.0,
    ready=True,
    draining=False,
    outstanding_tokens=12.0,
    inflight=3.0,
    blocks=7,
    held_back=False,
    cached=Tally(requests=2, predicted=30, routed=40, hits=20, queries=50),
    healed=1,
)


def sources(*, ready=True):
    return AdminSources(
        render_metrics=lambda: b"extproc_ready 1\n",
        is_ready=lambda: ready,
        snapshot=lambda: (VIEW,),
    )


@pytest.mark.parametrize(
    ("path", "ready", "status", "text"),
    [
        pytest.param("/metrics", True, 200, "extproc_ready 1\n", id="metrics"),
        pytest.param("/healthz", False, 200, "ok\n", id="alive though not ready"),
        pytest.param("/readyz", True, 200, "ready\n", id="ready"),
        pytest.param("/readyz", False, 503, "not ready", id="not ready"),
        pytest.param("/debug/endpoints", True, 200, '"inflight": 3.0', id="the pool"),
        pytest.param("/other", True, 404, "", id="nothing else"),
    ],
)
async def test_a_page_is_served(path, ready, status, text):
    server = AdminServer("127.0.0.1", 0, sources(ready=ready))
    await server.start()
    async with (
        ClientSession() as session,
        session.get(f"http://127.0.0.1:{server.port}{path}") as response,
    ):
        assert response.status == status
        assert text in await response.text()
    await server.stop()


async def test_a_taken_port_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = AdminServer("127.0.0.1", taken.getsockname()[1], sources())
        with pytest.raises(OSError, match="address already in use"):
            await server.start()
