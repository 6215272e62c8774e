from hypothesis import given
from hypothesis import strategies as st

from extproc.core.endpoint import Endpoint
from extproc.core.rendezvous import score

ENDPOINTS = [Endpoint.parse(f"10.0.0.{i}:8000") for i in range(1, 12)]
keys = st.integers(0, 2**64 - 1)


def home(key, endpoints=ENDPOINTS, weights=None):
    return max(endpoints, key=lambda e: score(e, key, (weights or {}).get(e, 1.0)))


@given(keys)
def test_a_new_endpoint_takes_keys_but_moves_none_between_the_others(key):
    before, after = home(key, ENDPOINTS[:10]), home(key, ENDPOINTS)

    assert after in {before, ENDPOINTS[10]}


@given(keys, st.floats(1.0, 10.0))
def test_a_raised_weight_only_gains_keys(key, weight):
    favoured = ENDPOINTS[3]
    before, after = home(key), home(key, weights={favoured: weight})

    assert after in {before, favoured}


def test_shares_follow_weights():
    weights = {ENDPOINTS[0]: 3.0}
    homes = [home(key * 0x9E3779B97F4A7C15 % 2**64, ENDPOINTS[:3], weights) for key in range(5000)]

    assert 0.56 < homes.count(ENDPOINTS[0]) / 5000 < 0.64  # 3 of 5
    assert 0.17 < homes.count(ENDPOINTS[1]) / 5000 < 0.23  # 1 of 5


def test_homes_are_a_wire_format():
    """Routers of different releases share a fleet: these homes may not change."""
    assert [ENDPOINTS.index(home(key)) for key in range(8)] == [1, 2, 2, 4, 7, 6, 6, 9]
