import json

import pytest
from rich.console import Console

from extproc.cli import main as run_command
from extproc.conversations import Answer, Workload
from extproc.demo import Result, draw_table, main, percentile, summarize
from extproc.standin.settings import StandinSettings

FIGURES = {"hit_rate", "ttft_p50_s", "ttft_p99_s", "wall_s", "requests"}


def small():
    """Two instruction prefixes on four engines: taking turns, each engine begins cold.

    So half of the eight requests find nothing under round-robin, a quarter under tiered.
    """
    return Workload(
        prefixes=2,
        conversations=4,
        turns=2,
        clients=1,
        instruction_tokens=(1_200, 1_300),
        turn_tokens=100,
        answer_tokens=4,
        engines=4,
        engine=StandinSettings(prefill_tokens_per_s=50_000.0, decode_tokens_per_s=1_000.0),
    )


def answer(*, ttft_s=0.1, endpoint="10.0.0.1:80", prompt_tokens=100, cached_tokens=0):
    return Answer(
        text="",
        endpoint=endpoint,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        ttft_s=ttft_s,
        ended_s=0.0,
    )


def test_the_same_conversations_find_more_in_the_caches_under_tiered(capsys):
    pytest.importorskip("envoy")

    assert main(["--json", "--seed", "3"], small()) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == ["round-robin", "tiered"]
    for one in figures.values():
        assert one.keys() == FIGURES
        assert len(one["requests"]) == 4
        assert sum(one["requests"].values()) == 8
        assert 0 < one["ttft_p50_s"] <= one["ttft_p99_s"] <= one["wall_s"]
    assert figures["tiered"]["hit_rate"] > figures["round-robin"]["hit_rate"]


def test_a_missing_envoy_is_an_error_of_one_line(capsys):
    assert run_command(["demo", "--json", "--envoy", "/nowhere/envoy"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("extproc: no Envoy binary at '/nowhere/envoy'")
    assert told.err.count("\n") == 1


def test_the_hit_rate_weighs_each_answer_by_its_prompt():
    answers = [
        answer(prompt_tokens=300, cached_tokens=300),
        answer(prompt_tokens=100, cached_tokens=0),
    ]

    assert summarize(answers, [], 1.0).hit_rate == 0.75


def test_an_endpoint_without_requests_is_counted_too():
    answers = [answer(endpoint="b:1"), answer(endpoint="b:1"), answer(endpoint="c:1")]

    requests = summarize(answers, ["a:1", "b:1", "c:1"], 1.0).requests

    assert requests == {"a:1": 0, "b:1": 2, "c:1": 1}


def test_times_are_summed_up_by_nearest_rank():
    result = summarize([answer(ttft_s=i / 100) for i in range(200, 0, -1)], [], 7.5)

    assert (result.ttft_p50_s, result.ttft_p99_s, result.wall_s) == (1.0, 1.98, 7.5)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        pytest.param([3.0], 0.5, 3.0, id="one value is every percentile"),
        pytest.param([2.0, 1.0], 0.5, 1.0, id="the lower of two is the median"),
        pytest.param([3.0, 1.0, 2.0], 0.5, 2.0, id="order does not matter"),
        pytest.param([1.0, 2.0, 3.0], 0.99, 3.0, id="few values have their greatest as p99"),
        pytest.param([1.0, 2.0], 0.0, 1.0, id="nothing lies below the least"),
    ],
)
def test_a_percentile_is_one_of_the_values(values, share, expected):
    assert percentile(values, share) == expected


def test_no_values_have_no_percentile():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_the_table_sets_policies_side_by_side():
    def result(hit_rate, requests):
        return Result(
            hit_rate=hit_rate, ttft_p50_s=0.25, ttft_p99_s=1.5, wall_s=9.0, requests=requests
        )

    console = Console(width=100)
    with console.capture() as shown:
        console.print(
            draw_table({"round-robin": result(0.4, {"a:1": 5}), "tiered": result(0.9, {"b:1": 7})})
        )

    lines = shown.get().splitlines()
    assert any("round-robin" in line and "tiered" in line for line in lines)
    assert any("40.0%" in line and "90.0%" in line for line in lines)
    assert any("endpoint" in line and " 5 " in line and " 7 " in line for line in lines)
