"""What each dialect's page says, from pages of real engines and from small ones of our own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.engines.reading import Reading, restarted
from extproc.adapters.engines.recognition import DIALECTS, recognise_models, recognise_page

BESIDE = Path(__file__).parents[3] / "shared" / "engine-samples"
SAMPLES = Path(os.environ.get("ENGINE_SAMPLES", BESIDE))

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:cache_config_info{block_size="32",note="a,\\"b\\"}",num_gpu_blocks="280"} 1.0
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 106447.0
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 52800.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 106447.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 53.0
process_start_time_seconds 1.79609e+09
"""
VLLM_OLD = """\
vllm:num_requests_running{model_name="tiny"} 1.0
vllm:gpu_cache_usage_perc{model_name="tiny"} 0.5
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0
# HELP vllm:gpu_prefix_cache_queries_total GPU prefix cache queries, in terms of number of blocks.
vllm:gpu_prefix_cache_queries_total{model_name="tiny"} 10.0
vllm:gpu_prefix_cache_hits_total{model_name="tiny"} 4.0
"""
SGLANG = """\
sglang:num_running_reqs{model_name="tiny",tp_rank="0"} 2.0
sglang:num_running_reqs{model_name="tiny",tp_rank="1"} 2.0
sglang:num_queue_reqs{model_name="tiny",tp_rank="0"} 1.0
sglang:num_grammar_queue_reqs{model_name="tiny",tp_rank="0"} 1.0
sglang:token_usage{model_name="tiny",tp_rank="0"} 0.12
sglang:max_total_num_tokens{model_name="tiny",tp_rank="0"} 65536.0
sglang:page_size{model_name="tiny",tp_rank="0"} 32.0
sglang:prompt_tokens_total{is_streaming="true",model_name="tiny"} 1000.0
sglang:prompt_tokens_total{is_streaming="false",model_name="tiny"} 10.0
"""
TRTLLM = """\
trtllm_num_requests_running{model_name="tiny"} 4.0
trtllm_num_requests_waiting{model_name="tiny"} 0.0
trtllm_kv_cache_utilization{model_name="tiny"} 0.75
trtllm_kv_cache_max_blocks{model_name="tiny"} 1000.0
trtllm_kv_cache_tokens_per_block{model_name="tiny"} 32.0
trtllm_kv_cache_reused_blocks_total{model_name="tiny"} 4.0
trtllm_kv_cache_missed_blocks_total{model_name="tiny"} 6.0
"""


def read(page):
    dialect = recognise_page(page)
    assert dialect
    return dialect.read(page)


def sample(name):
    if not SAMPLES.is_dir():
        pytest.skip("no captured samples here")
    return (SAMPLES / name).read_text(encoding="utf-8")


def test_a_page_of_vllm_is_read():
    assert read(VLLM) == Reading(
        running=2,
        waiting=3,
        kv_usage=0.25,
        cache_tokens=8_960,
        block_tokens=32,
        prefix_queries=106_447.0,
        prefix_hits=52_800.0,
        computed_tokens=53_647.0,
        progress=106_500.0,
        start_time_s=1.79609e09,
    )


def test_older_names_of_vllm_count_blocks():
    assert read(VLLM_OLD) == Reading(
        running=1,
        kv_usage=0.5,
        cache_tokens=1_600,
        block_tokens=16,
        prefix_queries=160.0,
        prefix_hits=64.0,
        computed_tokens=96.0,
    )


def test_tokens_computed_here_are_preferred():
    page = (
        VLLM + 'vllm:prompt_tokens_by_source_total{source="local_compute"} 7.0\n'
        'vllm:prompt_tokens_by_source_total{source="local_cache_hit"} 9.0\n'
    )

    assert read(page).computed_tokens == 7.0


def test_engines_behind_one_address_are_summed():
    second = VLLM.replace('engine="0"', 'engine="1"').replace("} 0.25", "} 0.75")
    reading = read(VLLM + second)

    assert (reading.running, reading.waiting, reading.kv_usage) == (4, 6, 0.5)


def test_ranks_of_one_sglang_engine_count_once():
    reading = read(SGLANG)

    assert (reading.running, reading.waiting) == (2, 2)
    assert (reading.cache_tokens, reading.block_tokens) == (65_536, 32)
    assert (reading.prefix_queries, reading.prefix_hits) == (1_010.0, 0.0)


def test_the_last_gauge_of_an_idle_sglang_is_not_believed():
    idle = SGLANG.replace("} 2.0", "} 0.0").replace("} 1.0\n", "} 0.0\n")

    assert read(SGLANG).kv_usage == 0.12
    assert read(idle).kv_usage == 0.0


def test_a_page_of_tensorrt_llm_is_read():
    assert read(TRTLLM) == Reading(
        running=4,
        waiting=0,
        kv_usage=0.75,
        cache_tokens=32_000,
        block_tokens=32,
        prefix_queries=320.0,
        prefix_hits=128.0,
        computed_tokens=192.0,
    )


def test_tensorrt_llm_is_never_asked_where_asking_takes_away():
    assert DIALECTS["trtllm"].path == "/prometheus/metrics"


def test_a_captured_page_of_vllm_gives_what_it_shows():
    page = sample("vllm-0.32.0-metrics.txt")

    assert recognise_page(page) is DIALECTS["vllm"]
    assert read(page) == Reading(
        running=0,
        waiting=0,
        kv_usage=0.0,
        cache_tokens=262_144,
        block_tokens=32,
        prefix_queries=34.0,
        prefix_hits=0.0,
        computed_tokens=34.0,
        progress=53.0,
        start_time_s=1796097108.79,
    )


def test_a_captured_page_of_sglang_gives_what_it_shows():
    page = sample("sglang-0.5.23-metrics.txt")

    assert recognise_page(page) is DIALECTS["sglang"]
    assert read(page) == Reading(
        running=0,
        waiting=0,
        kv_usage=0.0,
        cache_tokens=65_536,
        block_tokens=32,
        prefix_queries=103_217.0,
        prefix_hits=51_200.0,
        computed_tokens=52_017.0,
        progress=103_317.0,
    )


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ('{"data": [{"id": "m", "owned_by": "vllm"}]}', "vllm"),
        ('{"data": [{"id": "m", "owned_by": "sglang"}]}', "sglang"),
        ('{"data": [{"id": "m", "owned_by": "tensorrt_llm"}]}', "trtllm"),
        ('{"data": [{"id": "m", "owned_by": "somebody"}]}', None),
        ('{"data": [7, {"owned_by": ["vllm"]}]}', None),
        ('{"data": null}', None),
        ("[]", None),
        ("[" * 100_000, None),
        ("<html>", None),
        ("", None),
    ],
)
def test_an_engine_is_recognised_by_its_models(answer, name):
    found = recognise_models(answer)

    assert (found.name if found else None) == name


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param("", id="empty"),
        pytest.param("<html>not metrics</html>", id="no metrics"),
        pytest.param("vllm:num_requests_running NaN", id="no number"),
        pytest.param("sglang:num_running_reqs abc\nsglang:token_usage +Inf", id="words"),
        pytest.param('vllm:cache_config_info{num_gpu_blocks="None",block_size="16"} 1', id="None"),
        pytest.param("trtllm_num_requests_running{" + "x" * 100_000, id="a long line"),
    ],
)
def test_what_is_not_said_stays_unknown(name, page):
    known = DIALECTS[name].read(page)

    assert known in (Reading(), Reading(block_tokens=16))


LINES = [*VLLM.splitlines(), *SGLANG.splitlines(), *TRTLLM.splitlines(), "{", "vllm:x{"]


@given(
    st.sampled_from(sorted(DIALECTS)),
    st.lists(st.sampled_from(LINES) | st.text()),
    st.floats(allow_nan=True) | st.none(),
)
def test_no_page_is_an_error(name, lines, value):
    page = "\n".join(lines)
    if value is not None:
        page = page.replace("} 2.0", f"}} {value}")
    reading = DIALECTS[name].read(page)

    assert reading.kv_usage is None or 0.0 <= reading.kv_usage <= 1.0
    for count in (reading.running, reading.waiting, reading.cache_tokens):
        assert count is None or count >= 0


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param(Reading(start_time_s=100), Reading(start_time_s=100.01), False, id="same"),
        pytest.param(Reading(start_time_s=100), Reading(start_time_s=200), True, id="later start"),
        pytest.param(Reading(computed_tokens=9), Reading(computed_tokens=2), True, id="reset"),
        pytest.param(Reading(progress=9), Reading(progress=2), True, id="progress reset"),
        pytest.param(Reading(computed_tokens=2), Reading(computed_tokens=9), False, id="grown"),
        pytest.param(Reading(), Reading(computed_tokens=9), False, id="unknown before"),
    ],
)
def test_a_restart_is_seen(before, after, expected):
    assert restarted(before, after) is expected
