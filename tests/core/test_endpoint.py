import pytest

from extproc.core.endpoint import Endpoint
from extproc.core.errors import EndpointError


@pytest.mark.parametrize(
    ("text", "shown", "host", "port"),
    [
        pytest.param("10.0.0.1:8000", "10.0.0.1:8000", "10.0.0.1", 8000, id="IPv4"),
        pytest.param(" 10.0.0.1:08000 ", "10.0.0.1:8000", "10.0.0.1", 8000, id="trimmed"),
        pytest.param("[::1]:80", "[::1]:80", "::1", 80, id="IPv6"),
        pytest.param("[0:0::1]:80", "[::1]:80", "::1", 80, id="IPv6 is compressed as in Envoy"),
    ],
)
def test_an_endpoint_has_one_canonical_text(text, shown, host, port):
    endpoint = Endpoint.parse(text)

    assert endpoint == shown
    assert (endpoint.host, endpoint.port) == (host, port)
    assert Endpoint.parse(endpoint) == endpoint


@pytest.mark.parametrize(
    "text",
    [
        *("", "10.0.0.1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:٣"),
        *("vllm:8000", "::1:80", "[10.0.0.1]:80", "10.0.0.1:-1", "[::1:80", "10.0.0.256:80"),
    ],
)
def test_what_is_no_endpoint_is_refused(text):
    with pytest.raises(EndpointError):
        Endpoint.parse(text)
