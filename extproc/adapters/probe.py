"""One question whether a service is up: gRPC health of a router, or a GET of an HTTP URL.

For container health checks, so that an image needs no other tool; kept to one attempt
within a time limit.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_OK = range(200, 300)


def probe(address: str, *, service: str = "", timeout_s: float = 2.0) -> str | None:
    """Ask `host:port`, `unix:/path` or `http://host:port/path`; None: up, else what is wrong.

    `service` is the name of gRPC health to ask for; empty: whether requests are routed.
    """
    if address.startswith("http://"):
        return _probe_http(address, timeout_s)
    return _probe_grpc(address, service, timeout_s)


def _probe_http(url: str, timeout_s: float) -> str | None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=timeout_s) as response:
            status = response.status
    except urllib.error.HTTPError as error:
        with error:
            status = error.code
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"no answer: {getattr(error, 'reason', error)}"
    return None if status in _OK else f"status {status}"


def _probe_grpc(address: str, service: str, timeout_s: float) -> str | None:
    request = health_pb2.HealthCheckRequest(service=service)
    # A proxy of the environment is for the world outside, never for a health check.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            # What a call raises is the call itself, which the type does not say.
            return f"no answer: {getattr(error, 'code')().name}"  # noqa: B009
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return None if serving else health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
