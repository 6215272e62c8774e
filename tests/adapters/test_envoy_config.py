"""The gateway's Envoy configuration: what it must say, and that Envoy takes it."""

import pytest
import yaml
from betterproto2 import Casing
from envoy_data_plane.envoy.config.bootstrap.v3 import Bootstrap

from extproc.adapters.envoy_config import bootstrap, filter_snippet, to_yaml
from extproc.adapters.envoy_process import find_envoy, validate
from extproc.adapters.envoy_settings import GatewaySettings
from extproc.core.endpoint import Endpoint
from extproc.core.phases import DESTINATION_HEADER, BodyMode, Observe

V4 = Endpoint("10.0.0.1:8000")
V6 = Endpoint("[fd00::1]:8000")
MODES = [mode for mode in BodyMode if mode is not BodyMode.NONE]


def written(**settings):
    return yaml.safe_load(to_yaml(bootstrap(GatewaySettings(**settings))))


def manager(config):
    (listener,) = config["static_resources"]["listeners"]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


def routes(config):
    (host,) = manager(config)["route_config"]["virtual_hosts"]
    return host["routes"]


def http_filter(config, name):
    (found,) = [one for one in manager(config)["http_filters"] if one["name"].endswith(name)]
    return found["typed_config"]


def cluster(config, name):
    (found,) = [one for one in config["static_resources"]["clusters"] if one["name"] == name]
    return found


def addresses(cluster):
    localities = cluster["load_assignment"].get("endpoints", ())
    return [
        member["endpoint"]["address"]
        for locality in localities
        for member in locality["lb_endpoints"]
    ]


def tcp(host, port):
    return {"socket_address": {"address": host, "port_value": port}}


def test_the_text_is_the_same_every_time():
    settings = GatewaySettings(endpoints=(V4, V6))

    assert to_yaml(bootstrap(settings)) == to_yaml(bootstrap(settings))


def test_the_text_read_back_is_the_message():
    message = bootstrap(GatewaySettings(endpoints=(V4, V6), routers=("unix:/run/a", "10.0.0.9:1")))
    again = Bootstrap.from_dict(yaml.safe_load(to_yaml(message)))

    assert again.to_dict(casing=Casing.SNAKE) == message.to_dict(casing=Casing.SNAKE)


def test_what_only_we_may_set_is_taken_from_clients_first():
    (early,) = manager(written())["early_header_mutation_extensions"]

    assert early["typed_config"]["mutations"] == [
        {"remove": DESTINATION_HEADER},
        {"remove_on_match": {"key_matcher": {"prefix": "x-extproc-", "ignore_case": True}}},
    ]


def test_the_decision_in_metadata_comes_before_the_header():
    (policy,) = cluster(written(), "llm")["load_balancing_policy"]["policies"]
    override = policy["typed_extension_config"]["typed_config"]
    (fallback,) = override["fallback_policy"]["policies"]

    assert override["override_host_sources"] == [
        {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION_HEADER}]}},
        {"header": DESTINATION_HEADER},
    ]
    assert fallback["typed_extension_config"]["name"].endswith("least_request")


def test_our_metadata_is_received_and_the_subset_hint_sent():
    options = http_filter(written(), "ext_proc")["metadata_options"]

    assert options == {
        "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint"]},
        "receiving_namespaces": {"untyped": ["envoy.lb"]},
    }


def test_credentials_are_not_among_the_headers_sent_to_routers():
    rules = http_filter(written(forward_headers=("x-session-id", ":path")), "ext_proc")
    names = [one["exact"] for one in rules["forward_rules"]["allowed_headers"]["patterns"]]

    assert "x-session-id" in names
    assert names.count(":path") == 1
    assert not {"authorization", "cookie", "x-api-key"} & set(names)


def test_a_body_is_shown_and_kept_for_retries_up_to_one_limit_over_either_protocol():
    config = written(buffer_bytes=1_000_000)
    (listener,) = config["static_resources"]["listeners"]
    http2 = manager(config)["http2_protocol_options"]

    assert listener["per_connection_buffer_limit_bytes"] == 1_000_000
    assert http2["initial_stream_window_size"] == 1_000_000


def test_http2_windows_stay_within_what_envoy_allows():
    small, large = (
        manager(written(buffer_bytes=size))["http2_protocol_options"] for size in (16_384, 2**31)
    )

    assert small["initial_stream_window_size"] == 65_535
    assert set(large.values()) == {2**31 - 1}


def test_every_router_hears_of_every_request():
    routers = ("127.0.0.1:9002", "[::1]:9003", "unix:/run/extproc.sock")
    config = written(routers=routers)
    logs = [
        log["typed_config"]["common_config"]["grpc_service"]["envoy_grpc"]["cluster_name"]
        for log in manager(config)["access_log"]
    ]
    expected = [tcp("127.0.0.1", 9002), tcp("::1", 9003), {"pipe": {"path": "/run/extproc.sock"}}]

    assert addresses(cluster(config, "extproc")) == expected
    assert [addresses(cluster(config, log)) for log in logs] == [[one] for one in expected]


@pytest.mark.parametrize("observe", [Observe.STREAM, Observe.NONE])
def test_no_access_log_is_sent_that_nobody_reads(observe):
    config = written(observe=observe)

    assert "access_log" not in manager(config)
    assert [one["name"] for one in config["static_resources"]["clusters"]] == ["llm", "extproc"]


def test_observing_the_stream_asks_for_every_part_of_the_response():
    mode = http_filter(written(observe=Observe.STREAM), "ext_proc")["processing_mode"]

    assert mode["response_header_mode"] == "SEND"
    assert mode["response_body_mode"] == "STREAMED"
    assert mode["response_trailer_mode"] == "SEND"


@pytest.mark.parametrize("mode", MODES)
def test_the_body_mode_is_the_one_asked_for(mode):
    processing = http_filter(written(body_mode=mode), "ext_proc")["processing_mode"]

    assert processing["request_body_mode"] == mode.name


def test_bodies_that_envoy_may_repeat_on_a_retry_are_not_retried():
    *_, route = routes(written(body_mode=BodyMode.FULL_DUPLEX_STREAMED))

    assert "retry_policy" not in route["route"]


def test_without_admin_port_there_is_no_admin_interface():
    assert "admin" not in written(admin_port=None)


def test_without_health_path_endpoints_are_not_checked():
    config = written(health_path=None)

    assert "health_checks" not in cluster(config, "llm")
    assert not any("path" in route["match"] for route in routes(config))


def test_idle_clusters_are_checked_as_often_as_busy_ones():
    (check,) = cluster(written(health_interval_s=30.0), "llm")["health_checks"]

    assert check["no_traffic_interval"] == "2s"


def test_the_snippet_has_a_place_for_every_part():
    parts = yaml.safe_load(filter_snippet(GatewaySettings()))

    assert list(parts) == [
        "listener",
        "http_connection_manager",
        "routes",
        "llm_cluster",
        "clusters",
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("observe", Observe)
async def test_envoy_takes_every_mode_with_every_form_of_address(mode, observe):
    routers = ("127.0.0.1:9002", "[::1]:9002", "unix:/run/extproc.sock")
    settings = GatewaySettings(body_mode=mode, observe=observe, routers=routers, endpoints=(V4, V6))

    await validate(find_envoy(), to_yaml(bootstrap(settings)))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"endpoints": ()}, id="no endpoints"),
        pytest.param({"routers": ()}, id="no routers"),
        pytest.param({"admin_port": None}, id="no admin"),
        pytest.param({"health_path": None}, id="no health checks"),
        pytest.param({"listen_host": "::1"}, id="IPv6 listener"),
        pytest.param({"failure_mode_allow": False, "retries": 0}, id="strict"),
        pytest.param({"buffer_bytes": 16_384, "max_body_bytes": 1}, id="small limits"),
        pytest.param({"max_body_bytes": 2**32 - 1, "buffer_bytes": 2**32 - 1}, id="large limits"),
    ],
)
async def test_envoy_takes_unusual_settings(settings):
    await validate(find_envoy(), to_yaml(bootstrap(GatewaySettings(**settings))))
